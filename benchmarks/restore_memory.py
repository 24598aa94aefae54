"""Peak memory of restoring float32 parameters as bfloat16.

Writes synthetic parameters of a language model's shapes and restores them in a
fresh process, over fake CPU devices:

  python -m benchmarks.restore_memory --bytes 1e9 --devices 4

Prints JSON: bytes of the result, the peak of the process's memory above what it
held before, and their ratio.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import threading
import time

_LAYERS, _WIDTH = 8, 1024


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--bytes", type=float, default=1e9, help="of the result")
  parser.add_argument("--devices", type=int, default=1, help="fake CPU devices")
  parser.add_argument("--folder", help=argparse.SUPPRESS)
  parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.folder:
    (_write if args.write else _restore)(args)
    return
  with tempfile.TemporaryDirectory() as folder:
    for more in (["--write"], []):
      _again(args, folder, more)


def _again(args: argparse.Namespace, folder: str, more: list[str]) -> None:
  """Runs one half in a process of its own, whose memory is its alone."""
  flags = f"--xla_force_host_platform_device_count={args.devices}"
  numbers = ["--bytes", str(args.bytes), "--devices", str(args.devices)]
  numbers += ["--folder", folder]
  subprocess.run(
    [sys.executable, "-m", "benchmarks.restore_memory", *numbers, *more],
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    check=True,
  )


def _abstract(args: argparse.Namespace) -> dict:
  import jax
  import jax.numpy as jnp
  from jax.sharding import NamedSharding, PartitionSpec

  mesh = jax.make_mesh((args.devices,), ("fsdp",))
  split = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
  shapes = {
    "q": (_LAYERS, _WIDTH, _WIDTH),
    "kv": (_LAYERS, _WIDTH, _WIDTH // 2),
    "out": (_LAYERS, _WIDTH, _WIDTH),
    "gate": (_LAYERS, _WIDTH, 3 * _WIDTH),
    "up": (_LAYERS, _WIDTH, 3 * _WIDTH),
    "down": (_LAYERS, 3 * _WIDTH, _WIDTH),
    "norm": (_LAYERS, _WIDTH),
  }
  stack = sum(2 * a * b * c[0] if c else 2 * a * b
              for a, b, *c in shapes.values())  # fmt: skip
  stacks = max(1, round(args.bytes / stack))
  return {
    f"blocks{index}": {
      name: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split)
      for name, shape in shapes.items()
    }
    for index in range(stacks)
  }


def _write(args: argparse.Namespace) -> None:
  import jax
  import numpy as np

  from moh_jax import config as config_lib
  from moh_jax.runtime import checkpoint

  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.standard_normal(x.shape, np.float32), _abstract(args)
  )
  run = config_lib.Config(config_lib.ViTConfig())
  metadata = checkpoint.Metadata(run)
  checkpoint.save_params(args.folder, params, metadata)


def _restore(args: argparse.Namespace) -> None:
  import jax

  from moh_jax.runtime import checkpoint

  abstract = _abstract(args)
  jax.block_until_ready(jax.numpy.zeros(8))
  with _Peak() as peak:
    params = checkpoint.restore_params(args.folder, 0, abstract, use_ema=False)
    jax.block_until_ready(params)
  result = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  ratio = round(peak.above / result, 3)
  line = {"result_bytes": result, "peak_bytes": peak.above, "ratio": ratio}
  print(json.dumps({**line, "devices": args.devices}))


class _Peak:
  """The largest resident memory inside, above that at the beginning."""

  def __enter__(self) -> "_Peak":
    self._before, self._largest, self._ends = _resident(), 0, False
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()
    return self

  def _watch(self) -> None:
    while not self._ends:
      self._largest = max(self._largest, _resident())
      time.sleep(0.002)

  def __exit__(self, *_) -> None:
    self._ends = True
    self._thread.join()

  @property
  def above(self) -> int:
    # The kernel's own record misses nothing, but knows of no beginning.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(self._largest, most) - self._before


def _resident() -> int:
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
  main()
