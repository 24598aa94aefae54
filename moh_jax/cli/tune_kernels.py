"""`python -m moh_jax tune-kernels`."""

import argparse

from moh_jax.cli import common, fields
from moh_jax.cli.arguments.speed import SHAPES
from moh_jax.ops.kernels.backends import kernel_options, read
from moh_jax.ops.kernels.sizes import Key
from moh_jax.ops.target import target
from moh_jax.speed.options import Workload
from moh_jax.speed.tiles import tune, write


def run(args: argparse.Namespace) -> int:
  """Measures head dims and adds them to a file."""
  out = common.out_file(args.out)
  if out.exists():
    read(out)  # what cannot be added to is an error before any work
  shapes = fields.given_fields(args, Workload, *SHAPES)
  workloads = [Workload(head_dim=dim, **shapes) for dim in args.head_dim]
  device = target()
  if device.platform not in ("gpu", "tpu"):
    raise ValueError(f"the kernels run on GPUs and TPUs, not on {device.kind}")
  for workload in workloads:
    options = kernel_options(device, workload.dtype, workload.head_dim)
    backend = options["backend"]
    sizes = tune(workload, backend, report=print)
    key = Key(backend, device.kind, workload.head_dim, workload.dtype)
    write(out, {key: sizes})
    print(*key, sizes)
  return 0
