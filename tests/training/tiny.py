"""A run small enough for tests, in every form they need."""

import dataclasses
from typing import Any

from moh_jax import config as config_lib
from moh_jax.config import Config

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


def config(**sections: dict[str, Any]) -> Config:
  """The tiny run on real digits, with fields of some sections changed."""
  base = Config(
    model=MODEL,
    data=config_lib.DataConfig(
      source="digits",
      batch_size=16,
      augment="shift",
      mean=(0.3,),
      std=(0.37,),
      num_threads=1,
      prefetch=1,
    ),
    optim=config_lib.OptimConfig(lr=1e-3, warmup_steps=2),
    train=config_lib.TrainConfig(steps=4, mixup=0.2, cutmix=0.5),
    mesh=config_lib.MeshConfig(data=1, fsdp=1, tensor=1),
    checkpoint=config_lib.CheckpointConfig(every=2),
    eval=config_lib.EvalConfig(every=0, batch_size=120),
    log=config_lib.LogConfig(every=1, tensorboard=False, progress=False),
  )
  changed = {
    name: dataclasses.replace(getattr(base, name), **fields)
    for name, fields in sections.items()
  }
  return dataclasses.replace(base, **changed)


def deterministic_config(**sections: dict[str, Any]) -> Config:
  """A run whose losses do not depend on the order of a batch's examples."""
  sections["model"] = {"drop_path": 0.0, **sections.get("model", {})}
  plain = {"mixup": 0.0, "cutmix": 0.0}
  sections["train"] = {**plain, **sections.get("train", {})}
  return config(**sections)
