"""Up to which share of active heads the packed form is the faster one.

Packing costs a table and two passes over the queries and outputs, and fills
blocks of rows up. It pays where the heads that it leaves out cost more: the
longer the sequence, the larger the share may be.
"""

import dataclasses
import math

import numpy as np

from moh_jax.ops.basics import HALF
from moh_jax.ops.target import Target

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclasses.dataclass(frozen=True)
class Crossover:
  """Where packing begins to pay on a kind of device.

  Attributes:
    device: whole words of the device's kind, or its platform: "H100", "cpu".
    backend: what packs: "xla", "cudnn", or a back end of Pallas.
    dtypes: names of the queries' dtypes.
    head_dim: D, the largest that this holds for.
    causal: whether attention is causal; None is either.
    shares: the largest share of active heads, for each of `LENGTHS`.
    measured: False for a prediction, see benchmarks/predict.py.
  """

  device: str
  backend: str
  dtypes: tuple[str, ...]
  head_dim: int
  causal: bool | None
  shares: tuple[float, ...]
  measured: bool = False


# The first entry that holds for a call counts.
# fmt: off
CROSSOVERS = (
  Crossover("cpu", "xla", ("float32",), 256, None, (0.8,) * 7, True),
  # Blocks are computed in float32, which few rows do not make up for.
  Crossover("cpu", "xla", HALF, 256, True, (0.5, *(0.8,) * 6), True),
  Crossover("cpu", "xla", HALF, 256, False, (0.0, *(0.8,) * 6), True),
  # Predictions of `python -m benchmarks.predict`, which says from what.
  Crossover("H200", "cudnn", HALF, 64, False,
    (0.31, 0.59, 0.77, 0.88, 0.94, 0.96, 0.98)),
  Crossover("H200", "cudnn", HALF, 256, False,
    (0.23, 0.52, 0.73, 0.85, 0.92, 0.96, 0.98)),
  Crossover("H200", "mosaic_gpu", HALF, 64, False,
    (0.28, 0.55, 0.71, 0.81, 0.86, 0.89, 0.9)),
  Crossover("H200", "mosaic_gpu", HALF, 64, True,
    (0.12, 0.28, 0.58, 0.74, 0.82, 0.87, 0.89)),
  Crossover("H200", "mosaic_gpu", HALF, 256, False,
    (0.2, 0.48, 0.67, 0.79, 0.85, 0.88, 0.9)),
  Crossover("H200", "mosaic_gpu", HALF, 256, True,
    (0.05, 0.21, 0.51, 0.7, 0.8, 0.86, 0.89)),
  Crossover("H200", "triton", HALF, 64, False,
    (0.16, 0.37, 0.5, 0.57, 0.6, 0.62, 0.63)),
  Crossover("H200", "triton", HALF, 64, True,
    (0.0, 0.16, 0.37, 0.5, 0.57, 0.61, 0.62)),
  Crossover("H200", "triton", HALF, 256, False,
    (0.09, 0.3, 0.44, 0.51, 0.55, 0.58, 0.59)),
  Crossover("H200", "triton", HALF, 256, True,
    (0.0, 0.11, 0.29, 0.44, 0.52, 0.56, 0.58)),
  Crossover("H100", "cudnn", HALF, 64, False,
    (0.23, 0.52, 0.73, 0.85, 0.92, 0.96, 0.98)),
  Crossover("H100", "cudnn", HALF, 256, False,
    (0.15, 0.44, 0.67, 0.82, 0.9, 0.95, 0.97)),
  Crossover("H100", "mosaic_gpu", HALF, 64, False,
    (0.21, 0.48, 0.67, 0.79, 0.85, 0.88, 0.9)),
  Crossover("H100", "mosaic_gpu", HALF, 64, True,
    (0.06, 0.22, 0.51, 0.69, 0.8, 0.85, 0.88)),
  Crossover("H100", "mosaic_gpu", HALF, 256, False,
    (0.13, 0.41, 0.62, 0.76, 0.83, 0.87, 0.9)),
  Crossover("H100", "mosaic_gpu", HALF, 256, True,
    (0.0, 0.16, 0.44, 0.64, 0.77, 0.84, 0.88)),
  Crossover("H100", "triton", HALF, 64, False,
    (0.11, 0.33, 0.47, 0.55, 0.6, 0.62, 0.63)),
  Crossover("H100", "triton", HALF, 64, True,
    (0.0, 0.13, 0.33, 0.48, 0.56, 0.6, 0.62)),
  Crossover("H100", "triton", HALF, 256, False,
    (0.0, 0.26, 0.41, 0.5, 0.55, 0.57, 0.58)),
  Crossover("H100", "triton", HALF, 256, True,
    (0.0, 0.08, 0.25, 0.41, 0.5, 0.55, 0.57)),
  Crossover("A100", "cudnn", HALF, 256, False,
    (0.33, 0.59, 0.77, 0.88, 0.93, 0.96, 0.98)),
  Crossover("A100", "triton", HALF, 256, False,
    (0.12, 0.3, 0.41, 0.47, 0.5, 0.52, 0.53)),
  Crossover("A100", "triton", HALF, 256, True,
    (0.0, 0.12, 0.28, 0.41, 0.47, 0.5, 0.52)),
  Crossover("A100", "triton", ("float32",), 256, False,
    (0.42, 0.66, 0.81, 0.9, 0.95, 0.97, 0.98)),
  Crossover("A100", "triton", ("float32",), 256, True,
    (0.24, 0.46, 0.71, 0.84, 0.91, 0.95, 0.97)),
  Crossover("v5e", "mosaic_tpu", HALF, 256, False,
    (0.31, 0.57, 0.76, 0.87, 0.93, 0.96, 0.98)),
  Crossover("v5e", "mosaic_tpu", HALF, 256, True,
    (0.16, 0.33, 0.61, 0.78, 0.88, 0.94, 0.97)),
  Crossover("v5e", "mosaic_tpu", ("float32",), 256, False,
    (0.32, 0.58, 0.76, 0.87, 0.93, 0.96, 0.98)),
  Crossover("v5e", "mosaic_tpu", ("float32",), 256, True,
    (0.17, 0.35, 0.62, 0.79, 0.88, 0.94, 0.97)),
  Crossover("v6e", "mosaic_tpu", HALF, 256, False,
    (0.0, 0.32, 0.57, 0.75, 0.86, 0.93, 0.96)),
  Crossover("v6e", "mosaic_tpu", HALF, 256, True,
    (0.0, 0.1, 0.35, 0.59, 0.76, 0.87, 0.93)),
  Crossover("v6e", "mosaic_tpu", ("float32",), 256, False,
    (0.08, 0.35, 0.59, 0.76, 0.87, 0.93, 0.96)),
  Crossover("v6e", "mosaic_tpu", ("float32",), 256, True,
    (0.0, 0.13, 0.37, 0.61, 0.77, 0.88, 0.93)),
  Crossover("v5p", "mosaic_tpu", HALF, 256, False,
    (0.37, 0.63, 0.8, 0.89, 0.94, 0.97, 0.98)),
  Crossover("v5p", "mosaic_tpu", HALF, 256, True,
    (0.2, 0.41, 0.67, 0.82, 0.9, 0.95, 0.97)),
  Crossover("v5p", "mosaic_tpu", ("float32",), 256, False,
    (0.4, 0.65, 0.8, 0.89, 0.94, 0.97, 0.98)),
  Crossover("v5p", "mosaic_tpu", ("float32",), 256, True,
    (0.22, 0.44, 0.69, 0.83, 0.91, 0.95, 0.97)),
)
# fmt: on


def largest_share(
  target: Target,
  backend: str,
  dtype: str,
  head_dim: int,
  queries: int,
  *,
  causal: bool,
  same_kernel: bool = False,
) -> float:
  """The largest share of active heads at which packing pays.

  Args:
    target: the device.
    backend: what packs, as in `Crossover`.
    dtype: name of the queries' dtype.
    head_dim: D.
    queries: N.
    causal: whether attention is causal.
    same_kernel: whether what packs would also compute every head. Then fewer
      heads are less work on any device, and one without entries of its own gets
      the smallest share of all that have some.

  Returns:
    The share, by linear interpolation in log N; 0 below the first length and
    where no entry holds.
  """
  entries = [
    entry
    for entry in CROSSOVERS
    if entry.backend == backend
    and dtype in entry.dtypes
    and head_dim <= entry.head_dim
    and entry.causal in (None, causal)
  ]
  for entry in entries:
    if entry.device == target.platform or target.is_a(entry.device):
      return _interpolate(queries, entry.shares)
  if not same_kernel:
    return 0.0
  return min((_interpolate(queries, x.shares) for x in entries), default=0.0)


def _interpolate(queries: int, shares: tuple[float, ...]) -> float:
  logs = [math.log(x) for x in LENGTHS]
  return float(np.interp(math.log(queries), logs, shares, left=0.0))
