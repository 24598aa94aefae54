"""Predicted times of attention on devices that nothing was measured on.

    python -m benchmarks.predict

prints, as Markdown, the time of packed attention over that of the fastest
attention of all heads, and the entries of `moh_jax/ops/crossovers.json` that
follow from it. A measurement can refute both: `python -m benchmarks.card`.

A prediction adds up three parts. The core: FLOPs of the tiles that are visited,
counted for heads that are used evenly, over the kernel's rate, see below. The
glue: bytes of the table, of the gathered queries and of the scattered outputs,
over the memory's published speed. The launches: 3 microseconds each.

Rates of the kernels: cuDNN and Mosaic GPU on an H100 as measured for all heads
(32, 16,384 tokens a call at 4,096 tokens, benchmarks/results/card_h100.json);
Triton there from the tuning files of tokamax (openxla/tokamax). On an A100
73 % of the peak forward (the largest share that the paper of FlashAttention-2
states, arXiv:2307.08691), and assumed 63 % backward and 1.4 and 2 times as
long for Triton. Elsewhere half of the peak is assumed, for packed and all heads
alike, so that only tiles and bytes decide. Peaks and memory speeds are those of
the vendors' data sheets.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator

from benchmarks.tables import markdown
from moh_jax.ops.attention import LENGTHS, Crossover
from moh_jax.ops.basics import HALF
from moh_jax.training.flops import published_peak

_TOKENS, _WIDTH = 16384, 2048  # of a call: N * batch, heads * head dim
_ROWS = 128  # of a tile
_LAUNCH = 3e-6
_LAUNCHES = 4  # of small programs beside the kernel, forward; backward twice
_BACKWARD = 2.5  # FLOPs over those of the forward pass


@dataclasses.dataclass(frozen=True)
class Rates:
  """What is known of a device and a kernel.

  Attributes:
    device: as in `Crossover`.
    backend: what packs, as in `Crossover`.
    dtypes: as in `Crossover`.
    head_dim: D that the rates are for; they stand for all up to `most`.
    most: largest head dim.
    memory: bytes per second.
    packed: FLOP/s of the packing kernel, forward and backward.
    dense: FLOP/s of the fastest kernel for all heads, forward and backward.
  """

  device: str
  backend: str
  dtypes: tuple[str, ...]
  head_dim: int
  most: int
  memory: float
  packed: tuple[float, float]
  dense: tuple[float, float]


def seconds(
  rates: Rates, tokens: int, share: float | None, *, causal: bool
) -> tuple[float, float]:
  """Predicts the forward and the backward pass.

  Args:
    rates: of the device and the kernel.
    tokens: N; the batch makes 16,384 tokens, at least one sequence.
    share: share of the heads that are active; None is the dense kernel.
    causal: whether later keys are hidden.
  """
  heads = _WIDTH // rates.head_dim
  pairs = max(1, _TOKENS // tokens) * heads * tokens
  rows, speeds = 1.0, rates.dense
  if share is not None:
    # A head's last tile is half empty on average.
    rows, speeds = share + _ROWS / (2 * tokens), rates.packed
  keys = float(tokens)
  if causal:  # the rows of a tile spread over more positions if few are active
    keys = tokens / 2 + _ROWS / (2 * (share or 1))
  flops = 4 * pairs * rows * min(keys, tokens) * rates.head_dim
  core = flops / speeds[0], _BACKWARD * flops / speeds[1]
  if share is None:
    return core
  size = 2 if rates.dtypes == HALF else 4
  # Queries are read and written as rows, outputs read as rows and written; the
  # table is made and read.
  glue = pairs * ((3 * share + 1) * rates.head_dim * size + 16) / rates.memory
  glue += _LAUNCHES * _LAUNCH
  return core[0] + glue, core[1] + 2 * glue


def largest_share(rates: Rates, tokens: int, *, causal: bool) -> float:
  """Largest share, in percent steps, at which packing is predicted faster."""
  dense = sum(seconds(rates, tokens, None, causal=causal))
  shares = [percent / 100 for percent in range(5, 100)]
  faster = [
    s for s in shares if sum(seconds(rates, tokens, s, causal=causal)) < dense
  ]
  return max(faster, default=0.0)


def _all_rates() -> Iterator[Rates]:
  tera = 1e12
  # Forward and backward, at head dim 64 and 128.
  cudnn = (440, 408), (614, 494)
  hopper = {
    "mosaic_gpu": ((393, 367), (558, 456)),
    "triton": ((309, 259), (398, 322)),
  }
  for device, memory in (("H200", 4.8), ("H100", 3.35)):
    for backend, pairs in hopper.items():
      for index, (dim, most) in enumerate(((64, 64), (128, 256))):
        packed, dense = (
          tuple(tera * x for x in values[index]) for values in (pairs, cudnn)
        )
        yield Rates(
          device, backend, HALF, dim, most, memory * tera, packed, dense
        )
  ampere = tuple(part * published_peak("A100") for part in (0.73, 0.63))
  slower = ampere[0] / 1.4, ampere[1] / 2
  yield Rates("A100", "triton", HALF, 64, 256, 2.04 * tera, slower, ampere)
  single = (156 / 2 * tera,) * 2  # TensorFloat-32
  yield Rates(
    "A100", "triton", ("float32",), 64, 256, 2.04 * tera, single, single
  )
  for device, kind, memory in (
    ("v5e", "TPU v5 lite", 0.82),
    ("v6e", "TPU v6 lite", 1.64),
    ("v5p", "TPU v5p", 2.77),
  ):
    for dtypes, part in ((HALF, 0.5), (("float32",), 0.25)):
      rate = (part * published_peak(kind),) * 2
      yield Rates(
        device, "mosaic_tpu", dtypes, 128, 256, memory * tera, rate, rate
      )


def crossovers() -> list[Crossover]:
  """The predicted entries of the table of crossovers."""
  return [
    Crossover(
      *(rates.device, rates.backend, list(rates.dtypes), rates.most, causal),
      [largest_share(rates, n, causal=causal) for n in LENGTHS],
    )
    for rates, causal in _cases()
  ]


def _cases() -> Iterator[tuple[Rates, bool]]:
  """Rates, bidirectional and causal."""
  return itertools.product(_all_rates(), (False, True))


def ratios() -> str:
  """Markdown: forward and backward over all heads, at 50 % and 75 %."""
  rows = []
  for rates, causal in _cases():
    for share in (0.5, 0.75) if rates.dtypes == HALF else ():
      cells = [
        sum(seconds(rates, n, share, causal=causal))
        / sum(seconds(rates, n, None, causal=causal))
        for n in LENGTHS
      ]
      yes = "yes" if causal else "no"
      case = rates.device, rates.backend, str(rates.head_dim), yes
      rows.append([*case, f"{share:.0%}", *(f"{x:.2f}" for x in cells)])
  header = ("device", "kernel", "head dim", "causal", "share")
  return markdown([*header, *(f"{n:,}" for n in LENGTHS)], rows)


def main() -> None:
  """Prints both tables."""
  argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
  print(ratios() + "\n")
  for entry in crossovers():
    print(f"{entry.line()},")


if __name__ == "__main__":
  main()
