"""The model section of MoH-DiT."""

import dataclasses

from moh_jax.config.checks import (
  MOST_SIDE,
  MOST_TOKENS,
  MOST_WIDTH,
  at_least,
  at_most,
  in_range,
)
from moh_jax.config.layers import LayerStack


@dataclasses.dataclass(frozen=True)
class DiTConfig(LayerStack):
  """Diffusion transformer (arXiv:2212.09748) with or without MoH.

  The head tuples hold one value per layer.

  Attributes:
    family: "dit".
    input_size: rows and columns of the input: latents, or pixels.
    channels: channels of the input, 4 for latents of Stable Diffusion; None is
      those of the data.
    num_classes: labels; None is those of the data.
    patch_size: rows and columns of the input that make one token.
    width: C, a multiple of 4.
    num_heads: heads of each layer; the length of the tuple is the depth.
    head_dim: width of a head; heads x head_dim need not equal the width.
    shared_heads: heads of each layer that are on for every token, the first
      ones.
    top_k: heads of each layer that a token chooses among the others.
    mlp_ratio: the MLP's width F as a ratio: F is floor(C * ratio).
    label_dropout: share of training examples that lose their label, in [0, 1),
      which teaches the unconditional model that guidance needs; 0 leaves it
      out.
    learn_sigma: whether to predict the variance too, in as many further
      channels.
    dtype: compute dtype of the layers' branches, "float32" or "bfloat16";
      parameters, residual stream, conditioning, both ends, router and softmax
      stay float32.
  """

  family: str = "dit"
  input_size: tuple[int, int] = (32, 32)
  channels: int | None = None
  num_classes: int | None = None
  patch_size: int = 2
  width: int = 384
  num_heads: tuple[int, ...] = (6,) * 12
  head_dim: int = 64
  shared_heads: tuple[int, ...] = (3,) * 8 + (6,) * 4
  top_k: tuple[int, ...] = (2,) * 8 + (0,) * 4
  mlp_ratio: float = 4.0
  label_dropout: float = 0.1
  learn_sigma: bool = True

  def __post_init__(self):
    self.check_common("dit")
    at_least("model", 1, self, "channels", "head_dim", most=MOST_WIDTH)
    at_most("model", MOST_WIDTH, self, "width")
    at_least("model", 1, self, "num_classes", most=MOST_TOKENS)
    at_least("model", 1, self, "patch_size", most=MOST_SIDE)
    at_most("model", MOST_SIDE, self, "input_size")
    at_most("model", 1024, self, "mlp_ratio")
    in_range("model", 0, 0.999, self, "label_dropout")
    if self.width < 4 or self.width % 4:
      raise ValueError(
        f"model.width={self.width} must be a multiple of 4: sines and cosines "
        "of rows and columns"
      )
    if self.width * self.mlp_ratio < 1:
      raise ValueError(
        f"model.mlp_ratio={self.mlp_ratio} leaves no MLP column at width "
        f"{self.width}"
      )
    sides = self.input_size
    if min(sides) < 1 or any(side % self.patch_size for side in sides):
      raise ValueError(
        f"model.input_size={sides} must be multiples of model.patch_size="
        f"{self.patch_size}"
      )
    self.check_layers()

  @property
  def input_shape(self) -> tuple[int, int, int]:
    """Rows, columns and channels of an example."""
    return (*self.input_size, self.channels)

  @property
  def grid(self) -> tuple[int, int]:
    """Rows and columns of tokens."""
    rows, columns = self.input_size
    return rows // self.patch_size, columns // self.patch_size

  @property
  def num_tokens(self) -> int:
    """N."""
    return self.grid[0] * self.grid[1]

  @property
  def out_channels(self) -> int:
    """Channels of the output: the prediction, then the variance if learned."""
    return self.channels * (2 if self.learn_sigma else 1)

  @property
  def mlp_dim(self) -> int:
    """F."""
    return int(self.width * self.mlp_ratio)
