"""MoH-DiT: a diffusion transformer with routed heads (arXiv:2410.11842)."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config import DiTConfig
from moh_jax.config.heads import HeadBudget
from moh_jax.layers.linear import Dims, Linear, xavier_init
from moh_jax.layers.mlp import MLP, LayerNorm, Table, check_shape
from moh_jax.layers.moh import MoHAttention
from moh_jax.layers.partitioning import constrain
from moh_jax.layers.stack import ModelAux, collect_aux, scan_blocks
from moh_jax.ops.position import sincos_2d, sinusoidal
from moh_jax.ops.routing import RouterAux

_FREQUENCIES = 256  # features of a timestep


def _zeros_init(*_: Dims) -> nn.initializers.Initializer:
  """Zeros: at the start a block passes on its input, and the output is 0."""
  return nn.initializers.zeros


class Embedding(nn.Module):
  """Conditioning vector: features of the timestep, through an MLP, and label.

  Attributes:
    config: the model.
  """

  config: DiTConfig

  @nn.compact
  def __call__(
    self, t: jax.Array, labels: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Maps t [B] and labels [B] to vectors [B, C] float32.

    Returns:
      Those of the timesteps, and the conditioning.
    """
    cfg = self.config
    wide = cfg.width, ("embed", None)
    x = sinusoidal(t, _FREQUENCIES)
    x = nn.silu(Linear(*wide, gathered=True, name="time_in")(x))
    x = Linear(*wide, gathered=True, name="time_out")(x)
    rows = cfg.num_classes + bool(cfg.label_dropout)  # the last: no label
    table = Table(rows, cfg.width, (None, "embed"), name="label")()
    # Whole on every device: rows of a table split along the width would have
    # to be split along the batch by the same devices afterwards.
    vectors = jnp.take(constrain(table, None, None), labels, axis=0)
    return x, constrain(x + vectors, "batch", None)


class Modulation(nn.Module):
  """adaLN-Zero: vectors that shift, scale and gate, zero at the start.

  Attributes:
    parts: vectors.
    dtype: compute dtype.
  """

  parts: int
  dtype: jnp.dtype = jnp.float32

  @nn.compact
  def __call__(self, c: jax.Array) -> list[jax.Array]:
    """Maps c [B, C] to `parts` arrays [B, 1, C]."""
    out = Linear(
      self.parts * c.shape[-1],
      ("embed", None),
      gathered=True,
      kernel_init=_zeros_init,
      dtype=self.dtype,
      name="linear",
    )(nn.silu(c))
    return jnp.split(out[:, None, :], self.parts, axis=-1)


class Block(nn.Module):
  """Attention and MLP, each modulated and gated by the conditioning.

  Attributes:
    config: the model.
    budget: the layer's head split.
  """

  config: DiTConfig
  budget: HeadBudget

  @nn.compact
  def __call__(
    self, x: jax.Array, time: jax.Array, c: jax.Array
  ) -> tuple[jax.Array, RouterAux]:
    """Maps x [B, N, C] to [B, N, C] and the router's side values.

    Args:
      x: the tokens.
      time: [B, C] embedding of the timestep, which some routers read.
      c: [B, C] conditioning.
    """
    cfg = self.config
    dtype = jnp.dtype(cfg.dtype)
    parts = Modulation(6, dtype, name="modulation")(c)
    shift, scale, gate = parts[:3]
    out, aux = MoHAttention(
      budget=self.budget,
      router=cfg.router,
      kernel_init=xavier_init,
      out_multiplier=cfg.attention_out_multiplier,
      implementation=cfg.attention_impl,
      dtype=dtype,
      name="attn",
    )(modulate(layer_norm(dtype, "norm1")(x), shift, scale), time=time)
    x = x + gate * out
    shift, scale, gate = parts[3:]
    normed = layer_norm(dtype, "norm2")(x)
    mlp = MLP(cfg.mlp_dim, kernel_init=xavier_init, dtype=dtype, name="mlp")
    out = mlp(modulate(normed, shift, scale))
    x = constrain(x + gate * out, "batch", "tokens", None)
    self.sow("intermediates", "out", x)
    return x, aux


class DiT(nn.Module):
  """The network: noisy inputs, timesteps and labels to a prediction.

  Under `mutable=["intermediates"]` it records `tokens` (the input of the first
  block), `conditioning`, and every layer's `out` and routing.

  Attributes:
    config: the model.
  """

  config: DiTConfig

  @nn.compact
  def __call__(
    self, x: jax.Array, t: jax.Array, labels: jax.Array
  ) -> tuple[jax.Array, ModelAux]:
    """Predicts.

    Args:
      x: [B, X, Y, channels] noisy latents or pixels.
      t: [B] timesteps of the training process, integer or not.
      labels: [B] int32; num_classes stands for "no label" where the model was
        trained with label dropout.

    Returns:
      [B, X, Y, out_channels] float32, the prediction and then, if learned, the
      variance; and the routers' side values.

    Raises:
      ValueError: x of another shape.
    """
    cfg = self.config
    cfg.check_complete()
    check_shape("x", x, cfg.input_shape)
    # Both ends, the conditioning and the sum that runs through the blocks are
    # float32: in bfloat16 the input alone would lose what little noise the last
    # timesteps have. The blocks' branches compute in `dtype`.
    x = patchify(x.astype(jnp.float32), cfg.patch_size)
    x = Linear(
      cfg.width,
      (None, "embed"),
      gathered=True,
      kernel_init=xavier_init,
      name="patch",
    )(x)
    position = sincos_2d(cfg.grid, cfg.width)[None]
    x = constrain(x + position, "batch", "tokens", None)
    time, c = Embedding(cfg, name="embed")(t, labels)
    self.sow("intermediates", "tokens", x)
    self.sow("intermediates", "conditioning", c)

    layers = {}
    for index, group in enumerate(cfg.layer_groups()):
      name = f"blocks{index}"
      stack = scan_blocks(
        Block, group.depth, in_axes=(nn.broadcast,) * 2, remat=cfg.remat
      )
      x, layers[name] = stack(cfg, group.budget, name=name)(x, time, c)

    shift, scale = Modulation(2, name="final_modulation")(c)
    x = Linear(
      cfg.patch_size**2 * cfg.out_channels,
      ("embed", None),
      gathered=True,
      kernel_init=_zeros_init,
      name="final",
    )(modulate(layer_norm(jnp.float32, "final_norm")(x), shift, scale))
    out = unpatchify(x, cfg.grid, cfg.patch_size)
    return out, collect_aux(layers)


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
  """Scales and shifts tokens [B, N, C] by vectors [B, 1, C]."""
  return x * (1 + scale) + shift


def layer_norm(dtype: jnp.dtype, name: str) -> nn.LayerNorm:
  """LayerNorm without parameters: the conditioning scales and shifts."""
  return LayerNorm(
    epsilon=1e-6, use_bias=False, use_scale=False, dtype=dtype, name=name
  )


def patchify(x: jax.Array, patch: int) -> jax.Array:
  """Cuts [B, X, Y, c] into tokens [B, N, patch * patch * c], row by row.

  Within a token: rows of the patch, then columns, then channels.
  """
  batch, rows, columns, channels = x.shape
  x = x.reshape(batch, rows // patch, patch, columns // patch, patch, channels)
  return x.swapaxes(2, 3).reshape(batch, -1, patch * patch * channels)


def unpatchify(x: jax.Array, grid: tuple[int, int], patch: int) -> jax.Array:
  """Inverse of `patchify` for a grid of tokens."""
  batch, (rows, columns) = x.shape[0], grid
  x = x.reshape(batch, rows, columns, patch, patch, -1).swapaxes(2, 3)
  return x.reshape(batch, rows * patch, columns * patch, -1)
