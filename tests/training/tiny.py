"""A run small enough for tests, in every form they need."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np

from moh_jax import config as config_lib
from moh_jax.config import Config
from moh_jax.models.adapters import Adapters
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint
from moh_jax.runtime.parameters import abstract_params, unbox
from moh_jax.training.task import task_builder
from moh_jax.training.train import Result
from moh_jax.training.train import train as train_on

# All eight fake devices. Few heads are never balanced.
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
MODEL = config_lib.ViTConfig(
  image_size=(8, 8),
  channels=1,
  num_classes=10,
  patch_stride=2,
  embed_dims=(16, 16),
  depths=(1, 2),
  num_heads=(2, 4),
  shared_heads=(1, 2),
  top_k=(1, 1),
  mlp_ratios=(2, 2),
  sr_ratios=(2, 1),
  drop_path=0.2,
)

DIT = config_lib.DiTConfig(
  input_size=(8, 8),
  channels=1,
  num_classes=10,
  patch_size=4,
  width=16,
  num_heads=(2, 4),
  head_dim=4,
  shared_heads=(1, 2),
  top_k=(1, 1),
  mlp_ratio=2.0,
)

# Changes of their models after which all layers are alike, one scan instead of
# two: half the time to trace and compile, where only the family matters.
ALIKE = {
  "vit": {
    "embed_dims": (16,),
    "depths": (2,),
    "num_heads": (4,),
    "shared_heads": (2,),
    "top_k": (1,),
    "mlp_ratios": (2,),
    "sr_ratios": (1,),
  },
  "dit": {"num_heads": (4, 4), "shared_heads": (2, 2)},
  "llm": {},
}

LLM = config_lib.LLMConfig(
  vocab_size=60,
  max_length=32,
  width=32,
  mlp_dim=24,
  num_heads=(4, 4),
  num_kv_heads=2,
  head_dim=8,
  shared_heads=(1, 1),
  top_k=(2, 2),
  loss_chunk=5,
)


# One device, everything logged, checkpoints in between.
_RUN = {
  "mesh": config_lib.MeshConfig(data=1, fsdp=1, tensor=1),
  "checkpoint": config_lib.CheckpointConfig(every=2),
  "log": config_lib.LogConfig(every=1, tensorboard=False),
  "train": config_lib.TrainConfig(steps=4),
}
_ALONE = {"num_threads": 1, "prefetch": 1}
_DIGITS = config_lib.DataConfig(source="digits", batch_size=16, **_ALONE)
# Programs do not depend on `train.steps`, so that runs share them.
_OPTIM = config_lib.OptimConfig(
  lr=1e-2, schedule="constant", warmup_steps=2, ema_decay=0.9
)


def config(**sections: dict[str, Any]) -> Config:
  """The tiny run on real digits, with fields of some sections changed."""
  data = {"augment": "shift", "mean": (0.3,), "std": (0.37,)}
  base = Config(
    model=MODEL,
    data=dataclasses.replace(_DIGITS, **data),
    optim=config_lib.OptimConfig(lr=1e-3, warmup_steps=2),
    eval=config_lib.EvalConfig(every=0, batch_size=120),
    classifier=config_lib.ClassifierConfig(mixup=0.2, cutmix=0.5),
    **_RUN,
  )
  return changed(base, **sections)


def dit_config(**sections: dict[str, Any]) -> Config:
  """The tiny diffusion run on real digits, with other fields."""
  base = Config(
    model=DIT,
    data=dataclasses.replace(_DIGITS, mean=(0.5,), std=(0.5,)),
    optim=_OPTIM,
    eval=config_lib.EvalConfig(every=0, batch_size=120),
    diffusion=config_lib.DiffusionConfig(space="pixel", steps=50),
    sample=config_lib.SampleConfig(num=5, steps="4", cfg_scale=2.0),
    **_RUN,
  )
  return changed(base, **sections)


def llm_config(**sections: dict[str, Any]) -> Config:
  """The tiny run on random tokens, with other fields."""
  base = Config(
    model=LLM,
    data=config_lib.TextDataConfig(
      source="fake",
      sequence_length=16,
      batch_size=8,
      fake_examples=20,
      **_ALONE,
    ),
    optim=_OPTIM,
    eval=config_lib.EvalConfig(every=0, batch_size=8),
    tune=config_lib.TuneConfig(),
    **_RUN,
  )
  return changed(base, **sections)


CONFIGS = {"vit": config, "dit": dit_config, "llm": llm_config}


def random_params(config: Config, seed: int = 0) -> Any:
  """Parameters that leave no output zero, unlike those of a new DiT."""
  rng = np.random.RandomState(seed)
  return jax.tree.map(
    lambda leaf: np.float32(rng.normal(0, 0.2, leaf.shape)), _abstract(config)
  )


@functools.cache  # tracing a network takes seconds
def _abstract(config: Config) -> Any:
  return unbox(abstract_params(*make_model(config)))


def make_task(config: Config, decode: Any = None) -> Any:
  """The training task of the config's family."""
  return task_builder(config).make_task(config, decode)


def train(config: Config, workdir: str | os.PathLike, **options: Any) -> Result:
  """Trains on one device."""
  devices = jax.devices()[:1]
  return train_on(config, os.fspath(workdir), devices=devices, **options)


def before(owner: Any, name: str, do: Callable[..., Any]) -> Any:
  """Patch: does something with the arguments of a function before each call."""
  function = getattr(owner, name)

  def call(*args):
    do(*args)
    return function(*args)

  return mock.patch.object(owner, name, call)


def rows(
  workdir: str | os.PathLike, split: str | None = None
) -> list[dict[str, Any]]:
  """Rows of a run's metrics, of one split or of all, without its speeds."""
  text = pathlib.Path(workdir, "metrics.jsonl").read_text()
  return [
    {name: x for name, x in row.items() if not is_time(name)}
    for row in map(json.loads, text.splitlines())
    if split in (None, row["split"])
  ]


def losses(workdir: str | os.PathLike) -> list[float]:
  """The loss of every step of a run."""
  return [row["loss"] for row in rows(workdir, "train")]


def changed(base: Config, **sections: Any) -> Config:
  """A run with other sections, or with other fields of some of them."""
  new = {
    name: dataclasses.replace(getattr(base, name), **fields)
    if isinstance(fields, dict)
    else fields
    for name, fields in sections.items()
  }
  return dataclasses.replace(base, **new)


def stacked(source: Any, count: int) -> Any:
  """A batch of the first examples of a source."""
  return jax.tree.map(
    lambda *x: np.stack(x), *(source[i] for i in range(count))
  )


def all_log_probs(net: Any, params: Any, batch: Any) -> tuple[Any, Any]:
  """Of packed sequences, [B, N, V] float64 from all logits; and side values."""
  places = {name: batch[name] for name in ("positions", "segments")}
  call = functools.partial(jax.jit(net.apply), {"params": params})
  logits, aux = call(batch["inputs"], **places)
  return np.asarray(jax.nn.log_softmax(logits), np.float64), aux


def save(folder: str | os.PathLike, config: Config, names: Any = ()) -> str:
  """Writes random parameters as a checkpoint FOLDER/base; returns its path."""
  base = os.path.join(folder, "base")
  metadata = checkpoint.Metadata(config, names)
  checkpoint.save_params(base, random_params(config), metadata)
  return base


def adapted(config: Config) -> tuple[Any, Any, Any]:
  """The network, its frozen parameters, and adapters that add nothing yet."""
  net, inputs = make_model(config)
  adapters = Adapters.of(abstract_params(net, inputs), config.tune.lora)
  params = random_params(config)
  begun = adapters.begin(jax.random.key(0), params)
  return net, adapters.freeze(params), begun


def deterministic_config(**sections: dict[str, Any]) -> Config:
  """A run whose losses do not depend on the order of a batch's examples."""
  sections["model"] = {"drop_path": 0.0, **sections.get("model", {})}
  plain = {"mixup": 0.0, "cutmix": 0.0}
  sections["classifier"] = {**plain, **sections.get("classifier", {})}
  return config(**sections)


def is_time(metric: str) -> bool:
  """Whether a metric tells of speed, which differs from run to run."""
  return "second" in metric or metric.startswith("mfu")
