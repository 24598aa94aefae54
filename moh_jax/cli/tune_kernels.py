"""`python -m moh_jax tune-kernels`."""

import argparse

import jax
import jax.numpy as jnp

from moh_jax.bench.tiles import Workload, tune
from moh_jax.ops.kernels.sizes import FILE_VARIABLE, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  default = Workload()
  parser.add_argument(
    "--out",
    required=True,
    metavar="FILE",
    help=f"JSON file to add to; {FILE_VARIABLE}=FILE makes the library use it",
  )
  parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
  parser.add_argument("--dtype", default=default.dtype)
  parser.add_argument("--batch", type=int, default=default.batch)
  parser.add_argument("--tokens", type=int, default=default.tokens)
  parser.add_argument("--heads", type=int, default=default.num_heads)
  parser.add_argument(
    "--active", type=int, default=default.active, help="heads of a token"
  )
  parser.add_argument("--causal", action="store_true")


def run(args: argparse.Namespace) -> int:
  """Measures head dims and adds them to a file."""
  device = jax.devices()[0]
  if device.platform not in ("gpu", "tpu"):
    raise ValueError(
      f"the kernels run on GPUs and TPUs, not on {device.device_kind}"
    )
  for head_dim in args.head_dim:
    workload = Workload(
      batch=args.batch,
      tokens=args.tokens,
      num_heads=args.heads,
      active=args.active,
      head_dim=head_dim,
      dtype=args.dtype,
      causal=args.causal,
    )
    sizes = tune(workload, device.platform, report=print)
    dtype = jnp.dtype(args.dtype).name
    write(args.out, {(device.device_kind, head_dim, dtype): sizes})
    print(f"{device.device_kind} {head_dim} {dtype}: {sizes}")
  return 0
