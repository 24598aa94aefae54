"""Labelled batches of every family, and what is measured on them."""

import functools

import jax
import numpy as np

from moh_jax.config import MeshConfig
from moh_jax.evaluation.probe import make_probe
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding

BATCH = 8


@functools.cache
def batches(family, count=2, padded=3):
  """Batches on the host for tiny models; the last examples are padding."""
  rng = np.random.default_rng(0)
  total = BATCH * count
  batch = {
    "label": rng.integers(0, 3, total).astype(np.int32),
    "index": np.arange(total, dtype=np.int32),
    "mask": np.float32(np.arange(total) < total - padded),
  }
  if family == "llm":
    segments = np.ones((total, 16), np.int32)
    segments[::2, 11:] = 0
    batch |= {
      "inputs": rng.integers(0, 60, (total, 16)).astype(np.int32),
      "segments": segments,
      "positions": np.tile(np.arange(16, dtype=np.int32), (total, 1)),
    }
  else:
    batch["image"] = rng.normal(size=(total, 8, 8, 1)).astype(np.float32)
  return [
    {name: x[start : start + BATCH] for name, x in batch.items()}
    for start in range(0, total, BATCH)
  ]


def measure(function, config, params, parts, *names, **options):
  """What `function` finds on batches; `options` may say `data` and `tensor`."""
  axes = {axis: options.pop(axis, 1) for axis in ("data", "tensor")}
  devices = jax.devices()[: axes["data"] * axes["tensor"]]
  mesh = sharding.make_mesh(MeshConfig(**axes), devices)
  probe = make_probe(make_model(config)[0], config)
  with sharding.use_mesh(mesh):
    on_mesh = [sharding.shard_batch(part, mesh) for part in parts]
    return function(probe, config, params, on_mesh, *names, mesh, **options)
