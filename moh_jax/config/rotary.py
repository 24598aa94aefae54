"""Rotary position embedding as a section of language models."""

import dataclasses

ROPE_SCALINGS = ("none", "linear", "dynamic", "llama3")


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
  """Rotary position embedding (RoPE, arXiv:2104.09864) and its extensions.

  Attributes:
    dim: D, width of a head.
    theta: base; pair i turns by theta ** (-2 i / D) a token.
    scaling: "none"; "linear" divides positions by `factor`
      (arXiv:2306.15595); "dynamic" raises the base where a text is longer than
      `original_length` (NTK); "llama3" divides the slow frequencies alone by
      `factor` (LLaMA 3.1).
    factor: of the scaling.
    low_freq_factor: wavelengths above original_length / this are divided.
    high_freq_factor: wavelengths below original_length / this are kept;
      between the two the frequencies are interpolated.
    original_length: tokens of the training before it was scaled.
  """

  dim: int
  theta: float = 10000.0
  scaling: str = "none"
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_length: int = 8192
