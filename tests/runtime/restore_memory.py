"""Peak memory of restoring float32 parameters as bfloat16.

Over all devices, fake ones for instance:

  python -m tests.runtime.restore_memory write FOLDER
  python -m tests.runtime.restore_memory restore FOLDER

The first call writes synthetic parameters of a language model's shapes; the
second one, in a fresh process, restores them and prints JSON: bytes of the
result, and of the peak of the process's memory above what it held before.
"""

import json
import os
import pathlib
import resource
import sys

import jax
import numpy as np

from moh_jax import config as config_lib
from moh_jax.runtime import checkpoint

_BYTES = 1e9  # of the result
# Blocks of 8 layers of width 1024: queries, keys and values, the output, MLP.
_SHAPES = {
  "q": (8, 1024, 1024),
  "kv": (8, 1024, 512),
  "out": (8, 1024, 1024),
  "gate": (8, 1024, 3072),
  "up": (8, 1024, 3072),
  "down": (8, 3072, 1024),
}


def _abstract() -> dict:
  mesh = jax.make_mesh((jax.device_count(),), ("fsdp",))
  split = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
  block = {
    name: jax.ShapeDtypeStruct(shape, "bfloat16", sharding=split)
    for name, shape in _SHAPES.items()
  }
  size = 2 * sum(np.prod(shape) for shape in _SHAPES.values())
  return {f"blocks{index}": block for index in range(round(_BYTES / size))}


def write(folder: str) -> None:
  """Writes the checkpoint."""
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.standard_normal(x.shape, np.float32), _abstract()
  )
  metadata = checkpoint.Metadata(config_lib.Config(config_lib.ViTConfig()))
  checkpoint.save_params(folder, params, metadata)


def restore(folder: str) -> None:
  """Restores it, and prints what that took."""
  abstract = _abstract()
  jax.block_until_ready(jax.numpy.zeros(8))
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  before = pages * os.sysconf("SC_PAGE_SIZE")
  params = checkpoint.restore_params(folder, 0, abstract, use_ema=False)
  jax.block_until_ready(params)
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  result = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  print(json.dumps({"result": result, "peak": most - before}), flush=True)


if __name__ == "__main__":
  {"write": write, "restore": restore}[sys.argv[1]](sys.argv[2])
