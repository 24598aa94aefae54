"""A family of its own, as another package would define it.

Images are cut into patches; every layer attends with routed heads.
"""

import dataclasses

import flax.linen as nn

import moh_jax
from moh_jax.config import ImageClassifier, LayerStack


@dataclasses.dataclass(frozen=True)
class PatchConfig(LayerStack, ImageClassifier):
  """The section `model`; the tuples have one value per layer.

  Attributes:
    family: "patch".
    image_size: rows and columns of the input, pixels.
    channels: of the input.
    num_classes: outputs.
    patch: rows and columns of a token, pixels.
    width: C.
    num_heads: heads.
    head_dim: width of a head.
    shared_heads: heads that are always on.
    top_k: routed heads per token.
  """

  family: str = "patch"
  image_size: tuple[int, int] = (8, 8)
  channels: int = 1
  num_classes: int = 10
  patch: int = 2
  width: int = 32
  num_heads: tuple[int, ...] = (4, 4)
  head_dim: int = 8
  shared_heads: tuple[int, ...] = (1, 1)
  top_k: tuple[int, ...] = (2, 2)

  def check(self):
    """Refuses an image that patches do not fill."""
    super().check()
    if any(side % self.patch for side in self.image_size):
      self.fail("image_size", f"must be multiples of model.patch={self.patch}")

  @property
  def num_tokens(self) -> int:
    """N."""
    rows, columns = self.image_size
    return rows * columns // self.patch**2


class PatchNet(nn.Module):
  """A classifier of patches, with one routed attention a layer."""

  config: PatchConfig

  @nn.compact
  def __call__(self, images, *, train=False):
    """Images [B, X, Y, channels] to (logits [B, num_classes], aux)."""
    del train
    cfg = self.config
    size = (cfg.patch, cfg.patch)
    x = nn.Conv(cfg.width, size, strides=size, name="patches")(images)
    x = x.reshape(x.shape[0], -1, cfg.width)
    shape = (1, cfg.num_tokens, cfg.width)
    x = x + self.param("position", nn.initializers.normal(0.02), shape)
    aux = {}
    for layer, budget in enumerate(cfg.budgets()):
      attention = moh_jax.MoHAttention(
        budget, cfg.router, implementation=cfg.attention_impl
      )
      y, aux[f"layer{layer}"] = attention(nn.LayerNorm()(x))
      x = x + y
    logits = nn.Dense(cfg.num_classes, name="head")(x.mean(1))
    return logits, moh_jax.collect_aux(aux)


moh_jax.register_family(
  moh_jax.ImageClassifierFamily("patch", model=PatchConfig, network=PatchNet)
)
