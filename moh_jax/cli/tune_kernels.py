"""`python -m moh_jax tune-kernels`."""

import argparse
import pathlib

import jax

from moh_jax.ops.kernels.sizes import read
from moh_jax.speed.tiles import Workload, tune, write


def run(args: argparse.Namespace) -> int:
  """Measures head dims and adds them to a file."""
  out = pathlib.Path(args.out)
  if not out.parent.is_dir():
    raise FileNotFoundError(f"--out {args.out!r}: no directory {out.parent}")
  if out.exists():
    read(out)  # what cannot be added to is an error before any work
  workloads = [
    Workload(
      batch=args.batch,
      tokens=args.tokens,
      heads=args.heads,
      active=args.active,
      head_dim=head_dim,
      dtype=args.dtype,
      causal=args.causal,
      rounds=args.rounds,
    )
    for head_dim in args.head_dim
  ]
  device = jax.devices()[0]
  if device.platform not in ("gpu", "tpu"):
    raise ValueError(
      f"the kernels run on GPUs and TPUs, not on {device.device_kind}"
    )
  for workload in workloads:
    sizes = tune(workload, device.platform, report=print)
    key = device.device_kind, workload.head_dim, workload.dtype
    write(out, {key: sizes})
    print(*key, sizes)
  return 0
