"""MoH-ViT: a TransNeXt classifier with routed heads (arXiv:2410.11842)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.heads import HeadBudget
from moh_jax.config.vit import StageShape, ViTConfig
from moh_jax.layers.aggregated import AggregatedAttention, FullAttention
from moh_jax.layers.linear import Linear
from moh_jax.layers.mlp import (
  ConvGLU,
  LayerNorm,
  OverlapPatchEmbed,
  check_shape,
)
from moh_jax.layers.partitioning import constrain
from moh_jax.layers.stack import DropPath, ModelAux, collect_aux, scan_blocks
from moh_jax.ops.position import RelativeCoordinates, relative_coordinates
from moh_jax.ops.routing import RouterAux

_NORM_EPS = 1e-6


class Block(nn.Module):
  """Pre-norm attention and convolutional GLU, each with stochastic depth.

  Attributes:
    config: the model.
    budget: the stage's head split.
    shape: the stage's token grids.
    mlp_dim: F.
    train: whether branches are dropped.
  """

  config: ViTConfig
  budget: HeadBudget
  shape: StageShape
  mlp_dim: int
  train: bool = False

  @nn.compact
  def __call__(
    self, x: jax.Array, drop_rate: jax.Array, coordinates: RelativeCoordinates
  ) -> tuple[jax.Array, RouterAux]:
    """Maps x [B, N, C] to [B, N, C] and the router's side values."""
    cfg = self.config
    dtype = jnp.dtype(cfg.dtype)
    common = {
      "budget": self.budget,
      "router": cfg.router,
      "qkv_bias": cfg.qkv_bias,
      "out_multiplier": cfg.attention_out_multiplier,
      "dtype": dtype,
      "name": "attn",
    }
    if self.shape.pool_grid is None:
      attention = FullAttention(implementation=cfg.attention_impl, **common)
    else:
      attention = AggregatedAttention(
        grid=self.shape.grid,
        pool_grid=self.shape.pool_grid,
        window=cfg.window,
        **common,
      )
    drop = DropPath(deterministic=not (self.train and cfg.drop_path > 0))
    out, aux = attention(layer_norm(dtype, "norm1")(x), coordinates)
    x = x + drop(out, drop_rate)
    mlp = ConvGLU(self.mlp_dim, self.shape.grid, dtype=dtype, name="mlp")
    x = x + drop(mlp(layer_norm(dtype, "norm2")(x)), drop_rate)
    return constrain(x, "batch", "tokens", None), aux


class Stage(nn.Module):
  """Patch embedding, a scanned stack of equal blocks, LayerNorm.

  Attributes:
    config: the model.
    index: 0 for the first stage.
    train: whether branches are dropped.
  """

  config: ViTConfig
  index: int
  train: bool = False

  @nn.compact
  def __call__(self, images: jax.Array) -> tuple[jax.Array, RouterAux]:
    """Maps [B, X, Y, channels] to tokens [B, N, C] and layers' side values."""
    cfg, index = self.config, self.index
    dtype = jnp.dtype(cfg.dtype)
    shape = cfg.stage_shapes()[index]
    x = OverlapPatchEmbed(
      features=cfg.embed_dims[index],
      kernel_size=3 if index else 2 * cfg.patch_stride - 1,
      stride=2 if index else cfg.patch_stride,
      dtype=dtype,
      name="patch_embed",
    )(images)
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    x = constrain(x, "batch", "tokens", None)
    stack = scan_blocks(
      Block, cfg.depths[index], in_axes=(0, nn.broadcast), remat=cfg.remat
    )
    x, aux = stack(
      config=cfg,
      budget=cfg.budgets()[index],
      shape=shape,
      mlp_dim=cfg.mlp_dims[index],
      train=self.train,
      name="blocks",
    )(
      x,
      jnp.asarray(drop_path_rates(cfg)[index]),
      relative_coordinates(
        shape.grid, shape.pool_grid or shape.grid, shape.pretrain_grid
      ),
    )
    return layer_norm(dtype, "norm")(x), aux


class ViT(nn.Module):
  """The classifier.

  Under `mutable=["intermediates"]` it records `stageI_out`, each stage's tokens
  after its LayerNorm, besides every layer's routing.

  Attributes:
    config: the model.
  """

  config: ViTConfig

  @nn.compact
  def __call__(
    self, images: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, ModelAux]:
    """Classifies images.

    Args:
      images: [B, X, Y, channels] normalized pixels, (X, Y) the config's size.
      train: drop branches; needs the rng "dropout" if drop_path is above 0.

    Returns:
      logits [B, num_classes] float32 and the routers' side values.

    Raises:
      ValueError: images of another shape.
    """
    cfg = self.config
    cfg.check_complete()
    check_shape("images", images, cfg.input_shape)
    dtype = jnp.dtype(cfg.dtype)
    x = constrain(images.astype(dtype), "batch", "tokens", None, None)
    layers = {}
    for index, shape in enumerate(cfg.stage_shapes()):
      name = f"stage{index + 1}"
      tokens, layers[name] = Stage(cfg, index, train, name=name)(x)
      self.sow("intermediates", f"{name}_out", tokens)
      x = tokens.reshape(tokens.shape[0], *shape.grid, -1)
    pooled = tokens.astype(jnp.float32).mean(1)
    head = Linear(cfg.num_classes, ("embed", "classes"), name="head")
    logits = head(pooled)
    return logits, collect_aux(layers)


def layer_norm(dtype: jnp.dtype, name: str) -> nn.LayerNorm:
  """LayerNorm of blocks and stage ends."""
  return LayerNorm(epsilon=_NORM_EPS, dtype=dtype, name=name)


def drop_path_rates(config: ViTConfig) -> list[np.ndarray]:
  """Stochastic-depth rate of every block, linear in depth; an array a stage."""
  total = sum(config.depths)
  rates = np.linspace(0, config.drop_path, total, dtype=np.float32)
  return np.split(rates, np.cumsum(config.depths)[:-1])
