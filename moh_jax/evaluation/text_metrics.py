"""Metrics of text from the nats that a model needs for it."""

import math


def bits_per_byte(nats: float, num_bytes: float) -> float:
  """Bits that a model needs for a byte of text, whatever its tokenizer.

  Args:
    nats: summed cross-entropy of the text's tokens.
    num_bytes: of the text as UTF-8, more than 0.
  """
  return nats / math.log(2) / num_bytes


def perplexity(nats: float, count: int) -> float:
  """Exponential of the mean nats per unit; infinite where it is too large.

  Args:
    nats: summed cross-entropy.
    count: units, at least 1.
  """
  try:
    return math.exp(nats / count)
  except OverflowError:
    return math.inf
