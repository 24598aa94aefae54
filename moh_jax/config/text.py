"""Sections of models that read text."""

import dataclasses
import itertools
from typing import ClassVar

from moh_jax.config.checks import (
  MOST_AHEAD,
  MOST_BATCH,
  MOST_TOKENS,
  above,
  at_least,
  one_of,
)
from moh_jax.config.sources import check_source

TOKENIZERS = ("bpe", "bytes")
_SUM_TOLERANCE = 0.05  # percent: published mixes are rounded


@dataclasses.dataclass(frozen=True)
class TextDataConfig:
  """Where text comes from and how it becomes batches of packed sequences.

  Attributes:
    source: "tokens" (what `tokenize` writes), "stdlib" (the sources of the
      running Python's standard library, tokenized on first use) or "fake"
      (random tokens).
    path: folder of the token sets; for "stdlib" where they are prepared; "fake"
      has none.
    mix: names of the sources, path/NAME/{train,val}; () is the one set
      path/{train,val}.
    ratios: percent of the sequences that each of `mix` gives, 100 together.
    sequence_length: N, tokens of a sequence.
    batch_size: sequences per optimizer step, over all devices and processes.
    separate_documents: whether documents packed into one sequence do not see
      one another and count their positions from 0; False reads a sequence as
      one text.
    tokenizer: tokenizer of "stdlib": "bpe" (trained on it, model.vocab_size
      entries) or "bytes".
    num_threads: threads that read.
    prefetch: batches prepared ahead.
    workers: processes that prepare batches, each with `num_threads`; 0 prepares
      them in this process, None is 0. A program that starts them needs
      `if __name__ == "__main__":`.
    device_prefetch: batches that are on the devices before their step.
    fake_examples: sequences in each split of "fake".
  """

  reads: ClassVar[str] = "text"

  source: str = "fake"
  path: str = ""
  mix: tuple[str, ...] = ()
  ratios: tuple[float, ...] = ()
  sequence_length: int = 2048
  batch_size: int = 8
  separate_documents: bool = True
  tokenizer: str = "bpe"
  num_threads: int = 4
  prefetch: int = 4
  workers: int | None = None
  device_prefetch: int = 2
  fake_examples: int = 1024

  def __post_init__(self):
    one_of("data", self, tokenizer=TOKENIZERS)
    at_least("data", 1, self, "sequence_length", most=MOST_TOKENS)
    at_least("data", 1, self, "batch_size", most=MOST_BATCH)
    at_least("data", 1, self, "prefetch", "num_threads", most=MOST_AHEAD)
    at_least("data", 1, self, "device_prefetch", most=MOST_AHEAD)
    at_least("data", 0, self, "workers", most=MOST_AHEAD)
    at_least("data", 1, self, "fake_examples")
    check_source(self)
    self._check_mix()

  def _check_mix(self):
    if len(self.mix) != len(self.ratios):
      raise ValueError(
        f"data.ratios={self.ratios} must have one value for each of data.mix="
        f"{self.mix}"
      )
    if len(set(self.mix)) != len(self.mix):
      raise ValueError(f"data.mix={self.mix} must name each source once")
    above("data", 0, self, "ratios")
    if self.mix and abs(sum(self.ratios) - 100) > _SUM_TOLERANCE:
      raise ValueError(
        f"data.ratios={self.ratios} must sum to 100 (percent), not "
        f"{sum(self.ratios):g}"
      )


@dataclasses.dataclass(frozen=True)
class TuneConfig:
  """How routing changes during a run.

  Attributes:
    top_k_steps: optimizer steps at which the routed heads per token change, the
      first 0; () keeps model.top_k throughout.
    top_k_values: routed heads per token from each of these steps on, in every
      layer that routes; the last is model.top_k.
  """

  top_k_steps: tuple[int, ...] = ()
  top_k_values: tuple[int, ...] = ()

  def __post_init__(self):
    at_least("tune", 0, self, "top_k_steps", "top_k_values")
    steps, values = self.top_k_steps, self.top_k_values
    if len(steps) != len(values):
      raise ValueError(
        f"tune.top_k_values={values} must have one value for each of "
        f"tune.top_k_steps={steps}"
      )
    rising = all(a < b for a, b in itertools.pairwise(steps))
    if steps and (steps[0] != 0 or not rising):
      raise ValueError(f"tune.top_k_steps={steps} must rise from 0")
    if values and min(values) < 1:
      raise ValueError(f"tune.top_k_values={values} must be at least 1")
