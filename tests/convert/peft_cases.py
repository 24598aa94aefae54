"""Checkpoints with adapters, and what our network computes with them."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from moh_jax.config import LLMConfig, LoraConfig, TuneConfig
from moh_jax.convert.checkpoints import export
from moh_jax.models import stored
from moh_jax.models.adapters import Adapters, join
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.parameters import abstract_params
from tests.convert import tiny_llm

_QWEN2 = dataclasses.replace(tiny_llm.MHA, qkv_bias=True)
CASES = {
  "moh": tiny_llm.MOH,  # two-stage routers, which are trained whole
  "plain": tiny_llm.MHA,
  "query_norm": tiny_llm.QUERY_NORM,
  "joined": dataclasses.replace(
    tiny_llm.MHA, num_kv_heads=6, attention_out_multiplier=0.5
  ),
  "untied": _QWEN2,
  "tied": dataclasses.replace(_QWEN2, tie_embeddings=True),
  "int8": tiny_llm.QUERY_NORM,
}
_WHOLE = {"untied": ("embed/*", "norm/*"), "tied": ("embed/*",)}
_LORA = LoraConfig(
  rank=3, alpha=6.0, targets=("*/attn/q", "*/attn/v", "*/attn/out", "*/mlp/*")
)


def write_case(folder: pathlib.Path, name: str) -> None:
  """Writes one of the cases, see `write`."""
  lora = dataclasses.replace(
    _LORA,
    whole=_WHOLE.get(name, _LORA.whole),
    base_dtype="int8" if name == "int8" else "float32",
  )
  write(folder, CASES[name], lora)


def write(
  folder: pathlib.Path, model: LLMConfig, lora: LoraConfig = _LORA
) -> None:
  """Writes `base`, `lora`, `grads`, their exports, and io.npz."""
  run = tiny_llm.released_run(model, {})
  base = str(folder / "base")
  params = tiny_llm.random_params(run.model)
  checkpoint.save_params(base, params, Metadata(run))
  train = dataclasses.replace(run.train, init_from=base)
  config = dataclasses.replace(run, tune=TuneConfig(lora=lora), train=train)
  model, inputs = make_model(config)
  adapters = Adapters.of(abstract_params(model, inputs), lora)
  held = stored.base_abstract(run, adapters, None)
  params = jax.tree.map(lambda x, to: x.astype(to.dtype), params, held)
  metadata = Metadata(config, base_mark=steps.mark(base, 0))
  rng = np.random.default_rng(1)
  begin = adapters.begin(jax.random.key(0), params)
  trained = jax.tree.map(np.array, begin)
  for path, leaf in flatten_dict(trained).items():
    noise = rng.normal(size=leaf.shape, scale=0.2)
    if path[-1].startswith("lora") and adapters.kernels[path[:-1]].parts:
      has = adapters.adapted[path[:-1]]  # of the others both factors are 0
      noise *= has.reshape(-1, *[1] * (1 if path[-1] == "lora_a" else 3))
    leaf += noise.astype(np.float32)
  tokens = rng.integers(0, 37, (2, 12))
  frozen = adapters.freeze(params)

  def loss(trained):
    logits, _ = model.apply({"params": join(frozen, trained)}, tokens)
    return jax.nn.log_softmax(logits)[..., 3].sum(), logits

  both = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, logits), grads = both(jax.tree.map(jnp.asarray, trained))
  # Export multiplies a factor by this constant, so its gradient is divided.
  constant = 1 / run.model.attention_out_multiplier
  inverse = dataclasses.replace(run.model, attention_out_multiplier=constant)
  inverse = dataclasses.replace(config, model=inverse)
  inverse = dataclasses.replace(metadata, config=inverse)
  grads = jax.device_get(grads)
  for what, *saved in (("lora", trained, metadata), ("grads", grads, inverse)):
    checkpoint.save_params(folder / what, *saved)
    export(str(folder / what), str(folder / f"peft_{what}"), to="peft")
  # In float32 the base is what it was before there were adapters.
  rounded = lora.base_dtype != "float32"
  for what, source, to in (
    ("base", "lora", "base") if rounded else ("base", "base", None),
    ("lora", "lora", None),
  ):
    export(str(folder / source), str(folder / f"hf_{what}"), to=to)
  np.savez(folder / "io.npz", tokens=tokens, logits=logits)


def tree_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """The trained parameters of a checkpoint, by path."""
  metadata, step = checkpoint.read_metadata(folder)
  boxed = abstract_params(*make_model(metadata.config))
  adapters = Adapters.of(boxed, metadata.config.tune.lora)
  abstract = stored.abstract_boxed(adapters.trained, None)
  params = checkpoint.restore_params(folder, step, abstract, use_ema=False)
  return flatten_dict(jax.device_get(params), sep="/")
