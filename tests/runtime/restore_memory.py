"""Peak memory of restoring float32 parameters as bfloat16.

Writes synthetic parameters of a language model's shapes and restores them in a
fresh process, over fake CPU devices:

  python -m tests.runtime.restore_memory --bytes 1e9 --devices 4

Prints JSON: bytes of the result, the peak of the process's memory above what it
held before, and their ratio.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import resource
import sys
import tempfile

# Blocks of 8 layers of width 1024: queries, keys and values, the output, MLP.
_SHAPES = {
  "q": (8, 1024, 1024),
  "kv": (8, 1024, 512),
  "out": (8, 1024, 1024),
  "gate": (8, 1024, 3072),
  "up": (8, 1024, 3072),
  "down": (8, 3072, 1024),
}
_BLOCK_BYTES = 2 * sum(a * b * c for a, b, c in _SHAPES.values())


def main() -> int:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--bytes", type=float, default=1e9, help="of the result")
  parser.add_argument("--devices", type=int, default=1, help="fake CPU devices")
  args = parser.parse_args()
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={args.devices}"
  )
  spawn = multiprocessing.get_context("spawn")
  with tempfile.TemporaryDirectory() as folder:
    # Each half has a process of its own, whose memory is its alone.
    for half in (_write, _restore):
      process = spawn.Process(
        target=half, args=(folder, args.bytes, args.devices)
      )
      process.start()
      process.join()
      if process.exitcode:
        return 1
  return 0


def _abstract(size: float, devices: int) -> dict:
  import jax
  import jax.numpy as jnp

  mesh = jax.make_mesh((devices,), ("fsdp",))
  split = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
  return {
    f"blocks{index}": {
      name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split)
      for name, shape in _SHAPES.items()
    }
    for index in range(max(1, round(size / _BLOCK_BYTES)))
  }


def _write(folder: str, size: float, devices: int) -> None:
  import jax
  import numpy as np

  from moh_jax import config as config_lib
  from moh_jax.runtime import checkpoint

  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.standard_normal(x.shape, np.float32), _abstract(size, devices)
  )
  run = config_lib.Config(config_lib.ViTConfig())
  checkpoint.save_params(folder, params, checkpoint.Metadata(run))


def _restore(folder: str, size: float, devices: int) -> None:
  import jax

  from moh_jax.runtime import checkpoint

  abstract = _abstract(size, devices)
  jax.block_until_ready(jax.numpy.zeros(8))
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  before = pages * os.sysconf("SC_PAGE_SIZE")
  params = checkpoint.restore_params(folder, 0, abstract, use_ema=False)
  jax.block_until_ready(params)
  most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  result, peak = (
    sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
    most - before,
  )
  line = {"result_bytes": result, "peak_bytes": peak, "devices": devices}
  print(json.dumps({**line, "ratio": round(peak / result, 3)}), flush=True)


if __name__ == "__main__":
  sys.exit(main())
