"""Measures the text pipeline, from shards to packed batches, in tokens/s.

  python -m benchmarks.text_pipeline --json benchmarks/results/text_cpu.json

The input is random tokens in documents of 1,000 tokens on average, in a
temporary folder. Threads read it, as in training.
"""

import argparse
import statistics
import tempfile
import time

import grain
import numpy as np

from moh_jax.cli import common
from moh_jax.config.data import TextDataConfig
from moh_jax.data.sequences import train_sequences
from moh_jax.data.token_sets import TokenSetWriter
from moh_jax.data.tokenizers import BytesTokenizer
from moh_jax.speed import timing

_SHARDS = 4
_DOCUMENT_TOKENS = 1000


class _Wide(BytesTokenizer):
  """Byte tokenizer with a vocabulary that almost fills the range of uint16."""

  vocab_size = 65000


def main() -> None:
  """Measures and prints a table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--tokens", type=int, default=50_000_000)
  parser.add_argument("--length", type=int, default=2048)
  parser.add_argument("--batch-size", type=int, default=8)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--seconds", type=float, default=3, help="of a round")
  common.add_json(parser)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    _write(f"{folder}/a/train", args.tokens)
    _write(f"{folder}/b/train", args.tokens // 10)
    calls = {
      f"{mixed}, {threads} threads": _stream(folder, mix, threads, args)
      for mixed, mix in (("one source", ("a",)), ("two sources", ("a", "b")))
      for threads in (1, 2, 4)
    }
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):  # in turns, so that a slow phase hits all
      for name, stream in calls.items():
        rates[name].append(_rate(stream, args))
  rows = [
    {
      "form": name,
      "tokens_per_s": statistics.median(values),
      "slowest": min(values),
    }
    for name, values in rates.items()
  ]
  cells = [
    (r["form"], f"{r['tokens_per_s'] / 1e6:.2f}", f"{r['slowest'] / 1e6:.2f}")
    for r in rows
  ]
  print(common.table(cells, ("form", "M tokens/s", "slowest round")))
  settings = {name: v for name, v in vars(args).items() if name != "json"}
  result = {"machine": timing.machine(), "settings": settings, "rows": rows}
  common.write_json(args.json, result)


def _write(folder: str, tokens: int):
  rng = np.random.default_rng(0)
  tokenizer = _Wide()
  writer = TokenSetWriter(
    folder, tokenizer, num_shards=_SHARDS, settings={}, notes={}
  )
  for shard in writer.todo():
    with writer.open(shard) as target:
      left = tokens // _SHARDS
      while left > 0:
        count = 1 + int(rng.exponential(_DOCUMENT_TOKENS))
        ids = rng.integers(0, tokenizer.vocab_size, count).tolist()
        target.add(ids, 4 * count)
        left -= count
  writer.finish()


def _stream(folder, mix, threads, args):
  data = TextDataConfig(
    source="tokens",
    path=folder,
    mix=mix,
    ratios=(100.0,) if len(mix) == 1 else (80.0, 20.0),
    sequence_length=args.length,
  )
  dataset = train_sequences(data, _Wide.vocab_size, seed=0)
  options = grain.ReadOptions(
    num_threads=threads, prefetch_buffer_size=4 * args.batch_size
  )
  return iter(dataset.to_iter_dataset(options).batch(args.batch_size))


def _rate(stream, args) -> float:
  """Tokens per second, after the batches that were prefetched meanwhile."""
  for _ in range(8):
    next(stream)
  batches, start = 0, time.perf_counter()
  while (passed := time.perf_counter() - start) < args.seconds:
    next(stream)
    batches += 1
  return batches * args.batch_size * args.length / passed


if __name__ == "__main__":
  main()
