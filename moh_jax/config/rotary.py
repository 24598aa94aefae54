"""The section `model.rope` of language models: rotary position embedding."""

import dataclasses

from moh_jax.config.checks import at_least, one_of

ROPE_SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
  """Rotary position embedding (RoPE, arXiv:2104.09864) and its extensions.

  Attributes:
    theta: base of the frequencies, at least 1; pair i of a head of width D
      turns by theta ** (-2 i / D) a token.
    scaling: how texts longer than those of the training are read: "none";
      "linear" divides positions by `factor` (arXiv:2306.15595); "dynamic"
      raises the base where a text is longer than `original_length` (NTK);
      "llama3" divides the slow frequencies alone by `factor` (LLaMA 3.1);
      "yarn" does so with other borders, and makes attention sharper
      (arXiv:2309.00071).
    factor: how many times longer than `original_length` a text may be, at
      least 1; not used by "none".
    low_freq_factor: "llama3" divides wavelengths above original_length / this,
      in tokens.
    high_freq_factor: "llama3" keeps wavelengths below original_length / this
      as they are, and interpolates between the two.
    original_length: tokens of a text in the training before the scaling; used
      by "dynamic", "llama3" and "yarn".
    beta_fast: "yarn" keeps the pairs that turn at least so many times in
      `original_length` tokens as they are.
    beta_slow: "yarn" divides the pairs that turn at most so many times, and
      interpolates between the two.
    truncate: whether "yarn" rounds both borders to whole pairs, outwards.
    attention_factor: number that "yarn" multiplies rotated queries and keys
      by; None is 0.1 ln(factor) + 1.
  """

  theta: float = 10000.0
  scaling: str = "none"
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_length: int = 8192
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  attention_factor: float | None = None

  def __post_init__(self):
    one_of("rope", self, scaling=ROPE_SCALINGS)
    at_least("rope", 1, self, "theta", most=1e12)
    at_least("rope", 1, self, "factor", "original_length")
    at_least("rope", 0, self, "low_freq_factor", "high_freq_factor")
    at_least("rope", 0, self, "beta_fast", "beta_slow", "attention_factor")
    low, high = self.low_freq_factor, self.high_freq_factor
    if not 0 < low < high:
      raise ValueError(
        f"rope.low_freq_factor={low} must be above 0 and below "
        f"rope.high_freq_factor={high}"
      )
    if not 0 < self.beta_slow <= self.beta_fast:
      raise ValueError(
        f"rope.beta_slow={self.beta_slow} must be above 0 and at most "
        f"rope.beta_fast={self.beta_fast}"
      )
    if self.attention_factor is not None and not self.attention_factor > 0:
      raise ValueError(
        f"rope.attention_factor={self.attention_factor} must be above 0"
      )
    if self.scaling == "yarn" and self.theta <= 1:
      raise ValueError(
        f"rope.theta={self.theta} must be above 1 for rope.scaling='yarn'"
      )
