"""MoH-LLM: a decoder of the LLaMA kind with routed heads (arXiv:2410.11842)."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config import LayerGroup, LLMConfig
from moh_jax.config.heads import HeadBudget
from moh_jax.layers.linear import LINEAR_INIT, product, scaled_normal_init
from moh_jax.layers.mlp import MLP, Table
from moh_jax.layers.moh import MoHAttention, Places
from moh_jax.layers.partitioning import constrain, declare
from moh_jax.layers.router import HeadChoice
from moh_jax.layers.stack import ModelAux, collect_aux, scan_blocks
from moh_jax.layers.vocabulary import lookup
from moh_jax.ops.cache import LayerCache, Slots, make_cache
from moh_jax.ops.position import rotation
from moh_jax.ops.routing import RouterAux

# A cache per stack: with a leading layer axis, or a tuple of every layer's.
StackCache = LayerCache | tuple[LayerCache, ...]


class OutputKernel(nn.Module):
  """Weights of the output layer, stored as [C, V] or output-major as [V, C].

  Losses and decoding multiply by the weights themselves, without an adapter.
  """

  output_major: bool

  @nn.compact
  def __call__(self, width: int, vocab: int) -> jax.Array:
    """Returns the kernel [C, V]."""
    shape, axes = (width, vocab), ("embed", "vocab")
    if self.output_major:
      return declare(self, "kernel", LINEAR_INIT, shape[::-1], axes[::-1]).T
    return declare(self, "kernel", LINEAR_INIT, shape, axes)


class Block(nn.Module):
  """Attention and gated MLP, each after RMSNorm.

  Attributes:
    config: the model.
    budget: the layer's head split.
    output_major: how its kernels are stored, see `KernelLayer`.
  """

  config: LLMConfig
  budget: HeadBudget
  output_major: bool = False

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    choice: HeadChoice,
    cache: LayerCache | None,
    slots: Slots | None,
    places: Places,
    token_mask: jax.Array | None,
  ) -> tuple[jax.Array, tuple[RouterAux, LayerCache | None]]:
    """Maps x [B, N, C] to [B, N, C], the router's values and the new cache."""
    cfg = self.config
    dtype, branch_init = jnp.dtype(cfg.dtype), scaled_normal_init(cfg.depth)
    attention = MoHAttention(
      budget=self.budget,
      router=cfg.router,
      num_kv_heads=cfg.num_kv_heads,
      causal=True,
      use_bias=cfg.qkv_bias,
      out_bias=cfg.out_bias,
      qk_norm=cfg.norm_eps if cfg.qk_norm else None,
      out_init=branch_init,
      out_multiplier=cfg.attention_out_multiplier,
      output_major=self.output_major,
      implementation=cfg.attention_impl,
      dtype=dtype,
      name="attn",
    )
    normed = rms_norm(cfg, "attn_norm")(x)
    how = {"token_mask": token_mask, "places": places, "choice": choice}
    if cache is None:
      out, aux = attention(normed, **how)
    else:
      out, aux, cache = attention.decode(normed, cache, slots, **how)
    x = x + out
    kinds = {"down_init": branch_init, "dtype": dtype, "name": "mlp"}
    mlp = MLP(cfg.mlp_dim, True, cfg.mlp_bias, self.output_major, **kinds)
    x = x + mlp(rms_norm(cfg, "mlp_norm")(x))
    return constrain(x, "batch", "tokens", None), (aux, cache)


class LLM(nn.Module):
  """The network: tokens to logits of the next ones.

  Under `mutable=["intermediates"]` every layer records its routing.

  Attributes:
    config: the model.
    unrolled: every layer has parameters of its own (`unroll`) in
      place of stacked ones, and its kernels are output-major: decoding reads
      them without copying them out of a stack.
  """

  config: LLMConfig
  unrolled: bool = False

  def __call__(
    self,
    tokens: jax.Array,
    **options: Any,
  ) -> tuple[jax.Array, ModelAux]:
    """Predicts the next token at every place.

    Args:
      tokens: [B, N] int32.
      **options: keyword arguments of `extend`: positions, segments, token_mask,
        counted, top_k, head_scale, with_logits.

    Returns:
      Logits [B, N, V] float32, or what the output layer reads [B, N, C]; and
      the routers' side values.

    Raises:
      ValueError: more tokens than the model's range.
    """
    out, aux, _ = self.extend(tokens, None, None, **options)
    return out, aux

  @nn.compact
  def extend(
    self,
    tokens: jax.Array,
    cache: tuple[StackCache, ...] | None,
    slots: Slots | None,
    *,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    counted: jax.Array | None = None,
    top_k: jax.Array | None = None,
    head_scale: jax.Array | None = None,
    with_logits: bool = True,
  ) -> tuple[jax.Array, ModelAux, tuple[StackCache | None, ...]]:
    """Predicts the next token of texts whose earlier tokens are in a cache.

    Call it by `model.apply(..., method="extend")`.

    Args:
      tokens: [B, N] int32 new tokens.
      cache: of the tokens before them, `new_cache` at first; None is as
        `__call__`.
      slots: where the new tokens' keys and values go, and which they see; not
        needed without a cache.
      positions: [B, N] int32; None is 0 to N - 1, or with a cache the number of
        the slot, right for texts without padding.
      segments: [B, N] int32 documents packed into a sequence; a token sees only
        its own. None is one document. Read only if `slots.first` is None,
        which else says what tokens see.
      token_mask: [B, N] bool, False for padding: not counted, and unseen if
        `slots.first` is None.
      counted: [B, N] bool, tokens that the side values count; None is those of
        the token mask.
      top_k: [layers] int32 routed heads per token, at least 1, in place of the
        config's where a layer routes.
      head_scale: [layers, H] or [layers, B, 1, H] float32 that multiplies the
        gates, for models of one number of heads.
      with_logits: False leaves the output layer out (`output_logits` is it).

    Returns:
      The results of `__call__`, and the cache with the new tokens in it; the
      one that was given is unchanged.

    Raises:
      ValueError: more new tokens than the model's range.
    """
    cfg = self.config
    cfg.check_complete()
    batch, length = tokens.shape
    if length > cfg.max_length:
      raise ValueError(
        f"a sequence of {length} tokens exceeds model.max_length="
        f"{cfg.max_length}, the range of its positions"
      )
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
      if slots is not None:
        positions = positions + jnp.reshape(slots.start, (-1, 1))
    places = Places(
      rotation(positions, cfg.rope, cfg.head_dim, token_mask, segments),
      segments,
      counted,
    )
    order = None
    if cfg.head_order:
      order = [x for group in cfg.layer_groups() for x in group.orders]
      order = jnp.asarray(order, jnp.int32)
    choices = HeadChoice(top_k, order, head_scale)  # with a layer axis

    axes = ("vocab", "embed")
    table = Table(cfg.vocab_size, cfg.width, axes, name="embed")()
    x = lookup(table, tokens, cfg.dtype)
    caches = [None] * len(cfg.layer_groups()) if cache is None else cache
    layers, written = {}, []
    first = 0
    for index, group in enumerate(cfg.layer_groups()):
      name = f"blocks{index}"
      choice = jax.tree.map(lambda a: a[first : first + group.depth], choices)  # noqa: B023
      first += group.depth
      each, shared = (choice, caches[index]), (slots, places, token_mask)
      x, (layers[name], new) = self._stack(name, group, x, each, shared)
      written.append(new)
    aux = collect_aux(layers)
    x = rms_norm(cfg, "norm")(x)
    if not with_logits:
      return x, aux, tuple(written)
    if cfg.tie_embeddings:
      kernel = table.T
    else:
      head = OutputKernel(self.unrolled, name="head")
      kernel = head(cfg.width, cfg.vocab_size)
    return output_logits(x, kernel), aux, tuple(written)

  @nn.nowrap
  def new_cache(
    self, batch: int, slots: int, dtype: str = "float32"
  ) -> tuple[StackCache, ...]:
    """Makes an empty cache for `extend`.

    Args:
      batch: B, texts.
      slots: M, tokens of a text at most.
      dtype: "float32" or "bfloat16".

    Returns:
      For every stack of layers its cache; with a leading layer axis, or if
      `unrolled` a tuple of one per layer.
    """
    cfg = self.config
    sizes = batch, cfg.num_kv_heads, slots, cfg.head_dim, dtype
    depths = [group.depth for group in cfg.layer_groups()]
    if self.unrolled:
      return tuple(
        tuple(make_cache(*sizes) for _ in range(depth)) for depth in depths
      )
    layer = make_cache(*sizes)
    return tuple(
      jax.tree.map(lambda x: jnp.stack([x] * depth), layer)  # noqa: B023
      for depth in depths
    )

  def _stack(
    self, name: str, group: LayerGroup, x: jax.Array, each: tuple, shared: tuple
  ) -> tuple[jax.Array, tuple[RouterAux, Any]]:
    """Runs equal blocks.

    Args:
      name: of their parameters.
      group: how many blocks, and their head split.
      x: [B, N, C].
      each: the blocks' arguments with a layer axis, choice and cache.
      shared: those that serve all blocks: slots, places and token mask.

    Returns:
      [B, N, C], the routers' values and the caches, both with a layer axis.
    """
    cfg, depth = self.config, group.depth
    if not self.unrolled:
      axes = (0, 0, *[nn.broadcast] * len(shared))
      stack = scan_blocks(Block, depth, in_axes=axes, remat=cfg.remat)
      return stack(cfg, group.budget, name=name)(x, *each, *shared)
    choices, caches = each
    caches = [None] * depth if caches is None else caches
    values, written = [], []
    for layer in range(depth):
      choice = jax.tree.map(lambda a: a[layer], choices)  # noqa: B023
      block = Block(cfg, group.budget, True, name=f"{name}_{layer}")
      x, (aux, new) = block(x, choice, caches[layer], *shared)
      values.append(aux)
      written.append(new)
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *values)
    return x, (stacked, tuple(written))


def apply_packed(
  model: nn.Module, params: Any, batch: Mapping[str, Any], **options: Any
) -> Any:
  """Applies a network, but for its output layer, to packed sequences.

  Args:
    model: an `LLM`.
    params: of the network.
    batch: "inputs", "positions" and "segments" [B, N] int32; segment 0 is
      padding, which the side values do not count.
    **options: of `extend`, or of `flax.linen.Module.apply`.
  """
  places = {name: batch[name] for name in ("positions", "segments")}
  places["counted"] = batch["segments"] > 0
  options = {**places, "with_logits": False, **options}
  return model.apply({"params": params}, batch["inputs"], **options)


def rms_norm(config: LLMConfig, name: str) -> nn.RMSNorm:
  """RMSNorm (arXiv:1910.07467), computed in float32."""
  return nn.RMSNorm(
    epsilon=config.norm_eps, dtype=jnp.dtype(config.dtype), name=name
  )


def output_kernel(params: Any, config: LLMConfig) -> jax.Array:
  """Returns the output layer's weights [C, V] from a model's parameters."""
  if config.tie_embeddings:
    return params["embed"]["embedding"].T
  return params["head"]["kernel"]


def output_logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Applies the output layer: x [..., C], kernel [C, V] to [..., V] float32."""
  return jnp.matmul(
    x, kernel.astype(x.dtype), preferred_element_type=jnp.float32
  )


def unrolled_logits(x: jax.Array, params: Any, config: LLMConfig) -> jax.Array:
  """Applies the output layer of unrolled parameters (`unroll`).

  Args:
    x: [..., C] what the output layer reads.
    params: of the model, unrolled.
    config: the model.

  Returns:
    [..., V] float32.
  """
  tied = config.tie_embeddings
  kernel = params["embed"]["embedding"] if tied else params["head"]["kernel"]
  kernel = kernel.astype(x.dtype)  # [V, C]
  return product(x, kernel, output_major=True, dtype=jnp.float32)


def unroll(params: Any, config: LLMConfig) -> Any:
  """Cuts stacks into layers and stores kernels output-major.

  Args:
    params: as trained, every stack with a leading layer axis.
    config: the model.

  Returns:
    Parameters for `LLM(config, unrolled=True)`.
  """

  def output_major(path: tuple, x: jax.Array) -> jax.Array:
    """Puts the output dimensions of a layer's kernel first."""
    *_, module, name = (key.key for key in path)
    if name != "kernel":
      return x
    inputs = 2 if module == "out" else 1  # heads and their dim, or the width
    return jnp.moveaxis(x, range(inputs), range(-inputs, 0))

  out = {n: tree for n, tree in params.items() if not n.startswith("blocks")}
  if "head" in out:
    out["head"] = {"kernel": out["head"]["kernel"].T}
  for index, group in enumerate(config.layer_groups()):
    for layer in range(group.depth):
      out[f"blocks{index}_{layer}"] = jax.tree_util.tree_map_with_path(
        lambda path, x: output_major(path, x[layer]),  # noqa: B023
        params[f"blocks{index}"],
      )
  return out
