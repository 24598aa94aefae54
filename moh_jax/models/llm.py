"""MoH-LLM: a decoder of the LLaMA kind with routed heads (arXiv:2410.11842)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config import LLMConfig
from moh_jax.config.heads import HeadBudget
from moh_jax.layers.linear import product
from moh_jax.layers.mlp import SwiGLU
from moh_jax.layers.moh import (
  LINEAR_INIT,
  HeadChoice,
  ModelAux,
  MoHAttention,
  Places,
  collect_aux,
)
from moh_jax.layers.partitioning import constrain, sum_over_batch
from moh_jax.layers.stack import scan_blocks
from moh_jax.ops.cache import make_cache
from moh_jax.ops.cross_entropy import summed_cross_entropy
from moh_jax.ops.position import rotation
from moh_jax.ops.routing import RouterAux


class TokenTable(nn.Module):
  """A vector for every token.

  Attributes:
    config: the model.
  """

  config: LLMConfig

  @nn.compact
  def __call__(self) -> jax.Array:
    """[V, C] float32."""
    return self.param(
      "embedding",
      nn.with_logical_partitioning(LINEAR_INIT, ("vocab", "embed")),
      (self.config.vocab_size, self.config.width),
      jnp.float32,
    )


_OUTPUT_AXES = ("embed", "vocab")


class OutputKernel(nn.Module):
  """Weights of the output layer.

  Attributes:
    config: the model.
    output_major: how they are stored, see `Linear`.
  """

  config: LLMConfig
  output_major: bool = False

  @nn.compact
  def __call__(self) -> jax.Array:
    """[C, V] float32."""
    shape, axes = (self.config.width, self.config.vocab_size), _OUTPUT_AXES
    if self.output_major:
      shape, axes = shape[::-1], axes[::-1]
    kernel = self.param(
      "kernel",
      nn.with_logical_partitioning(LINEAR_INIT, axes),
      shape,
      jnp.float32,
    )
    return kernel.T if self.output_major else kernel


class Block(nn.Module):
  """Attention and gated MLP, each after RMSNorm.

  Attributes:
    config: the model.
    budget: the layer's head split.
    output_major: how its kernels are stored.
  """

  config: LLMConfig
  budget: HeadBudget
  output_major: bool = False

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    choice: HeadChoice,
    places: Places,
    token_mask: jax.Array | None,
  ) -> tuple[jax.Array, RouterAux]:
    """Maps x [B, N, C] to [B, N, C] and the router's values."""
    cfg = self.config
    dtype = jnp.dtype(cfg.dtype)
    attention = MoHAttention(
      budget=self.budget,
      router=cfg.router,
      num_kv_heads=cfg.num_kv_heads,
      causal=True,
      use_bias=cfg.qkv_bias,
      out_bias=cfg.out_bias,
      output_major=self.output_major,
      implementation=cfg.attention_impl,
      dtype=dtype,
      name="attn",
    )
    normed = rms_norm(cfg, "attn_norm")(x)
    out, aux = attention(normed, token_mask, places=places, choice=choice)
    x = x + out
    mlp = SwiGLU(
      cfg.mlp_dim, cfg.mlp_bias, self.output_major, dtype, name="mlp"
    )
    x = x + mlp(rms_norm(cfg, "mlp_norm")(x))
    return constrain(x, "batch", None, None), aux


class LLM(nn.Module):
  """The network: tokens to logits of the next ones.

  Under `mutable=["intermediates"]` every layer records its routing. With a
  variable collection "cache" (see `new_cache`) keys and values are written to
  it; `tokens` then stand in the slots from `slot` on.

  Attributes:
    config: the model.
    unrolled: every layer has parameters of its own (`unroll`) in place of
      stacked ones, and its kernels are output-major: decoding reads them
      without copying them out of a stack.
  """

  config: LLMConfig
  unrolled: bool = False

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    *,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    top_k: jax.Array | None = None,
    head_scale: jax.Array | None = None,
    slot: jax.Array | None = None,
    visible: jax.Array | None = None,
    with_logits: bool = True,
  ) -> tuple[jax.Array, ModelAux]:
    """Predicts the next token at every place.

    Args:
      tokens: [B, N] int32.
      positions: [B, N] int32; None is 0 to N - 1.
      segments: [B, N] int32 documents packed into a sequence; a token sees only
        its own. None is one document.
      token_mask: [B, N] bool, False for padding: unseen and not counted.
      top_k: [layers] int32 routed heads per token, at least 1, in place of the
        config's where a layer routes.
      head_scale: [layers, H] or [layers, B, 1, H] float32 that multiplies the
        gates, for models of one number of heads.
      slot: [] int32 of the first token in the cache.
      visible: [B, N, M] bool slots of the cache that the tokens see; None where
        the cache holds nothing before them.
      with_logits: False leaves the output layer out (`output_logits` is it).

    Returns:
      Logits [B, N, V] float32, or what the output layer reads [B, N, C]; and
      the routers' side values.

    Raises:
      ValueError: more tokens than the model's range.
    """
    cfg = self.config
    cfg.check_complete()
    dtype = jnp.dtype(cfg.dtype)
    batch, length = tokens.shape
    if length > cfg.max_length:
      raise ValueError(
        f"a sequence of {length} tokens exceeds model.max_length="
        f"{cfg.max_length}, the range of its positions"
      )
    if positions is None:
      positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    angles = rotation(positions, cfg.rope, cfg.head_dim, token_mask)
    places = Places(angles, segments, slot, visible)

    table = TokenTable(cfg, name="embed")()
    # Whole along the width: the devices that share it share the batch too.
    vectors = constrain(table.astype(dtype), "vocab", None)
    x = constrain(jnp.take(vectors, tokens, axis=0), "batch", None, None)
    choices = _choices(cfg, top_k, head_scale)
    layers, routed = {}, {}
    first = 0
    for index, group in enumerate(cfg.layer_groups()):
      name = f"blocks{index}"
      choice = jax.tree.map(lambda a: a[first : first + group.depth], choices)  # noqa: B023
      first += group.depth
      inputs = (choice, places, token_mask)
      x, layers[name] = self._stack(name, group.budget, group.depth, x, inputs)
      routed[name] = group.budget.top_k
    aux = collect_aux(layers, routed)
    x = rms_norm(cfg, "norm")(x)
    if not with_logits:
      return x, aux
    if cfg.tie_embeddings:
      kernel = table.T
    else:
      kernel = OutputKernel(cfg, self.unrolled, name="head")()
    return output_logits(x, kernel), aux

  def _stack(
    self,
    name: str,
    budget: HeadBudget,
    depth: int,
    x: jax.Array,
    inputs: tuple[HeadChoice, Places, jax.Array | None],
  ) -> tuple[jax.Array, RouterAux]:
    cfg = self.config
    if not self.unrolled:
      stack = scan_blocks(
        Block,
        depth,
        in_axes=(0, nn.broadcast, nn.broadcast),
        remat=cfg.remat,
      )
      return stack(cfg, budget, name=name)(x, *inputs)
    choices, *rest = inputs
    values = []
    for layer in range(depth):
      choice = jax.tree.map(lambda a: a[layer], choices)  # noqa: B023
      block = Block(cfg, budget, True, name=f"{name}_{layer}")
      x, aux = block(x, choice, *rest)
      values.append(aux)
    return x, jax.tree.map(lambda *parts: jnp.stack(parts), *values)


def output_kernel(params: Any, config: LLMConfig) -> jax.Array:
  """The output layer's weights [C, V] among a model's parameters."""
  if config.tie_embeddings:
    return params["embed"]["embedding"].T
  return params["head"]["kernel"]


def summed_nats(
  x: jax.Array,
  params: Any,
  config: LLMConfig,
  targets: jax.Array,
  weights: jax.Array,
) -> jax.Array:
  """Weighted sum of the targets' cross-entropies, a few logits at a time.

  Args:
    x: [B, N, C] what the output layer reads.
    params: of the model.
    config: its section.
    targets: [B, N] int32.
    weights: [B, N] float32.

  Returns:
    [] float32.
  """

  def local(x, targets, weights, kernel):
    return summed_cross_entropy(x, kernel, targets, weights, config.loss_chunk)

  return sum_over_batch(
    local, (x, targets, weights), (output_kernel(params, config),)
  )


def output_logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """The output layer: x [..., C] and kernel [C, V] to [..., V] float32."""
  return jnp.matmul(
    x, kernel.astype(x.dtype), preferred_element_type=jnp.float32
  )


def rms_norm(config: LLMConfig, name: str) -> nn.RMSNorm:
  """RMSNorm (arXiv:1910.07467), computed in float32."""
  return nn.RMSNorm(
    epsilon=config.norm_eps, dtype=jnp.dtype(config.dtype), name=name
  )


def _choices(
  config: LLMConfig, top_k: jax.Array | None, head_scale: jax.Array | None
) -> HeadChoice:
  """Every layer's departure from its budget, with a leading layer axis."""
  order = None
  if config.head_order:
    order = jnp.asarray(config.head_order, jnp.int32)
  return HeadChoice(top_k, order, head_scale)


def grow_vocabulary(params: Any, rows: int) -> Any:
  """Adds tokens: their vectors are the mean of the old ones.

  Args:
    params: of a model with fewer tokens.
    rows: tokens wanted.
  """
  grown = dict(params)
  for module, leaf, axis in (("embed", "embedding", 0), ("head", "kernel", 1)):
    if module in params:
      old = params[module][leaf]
      mean = old.mean(axis, keepdims=True)
      new = jnp.repeat(mean, rows - old.shape[axis], axis=axis)
      grown[module] = {leaf: jnp.concatenate([old, new], axis=axis)}
  return grown


def compute_dtypes(params: Any, config: LLMConfig) -> Any:
  """The dtype that the network uses each parameter in.

  Matrices are used in the compute dtype, so storing them in it changes no
  output; routers, norms and biases stay float32.

  Args:
    params: arrays or their shapes.
    config: the model.

  Returns:
    The tree with a dtype for every leaf.
  """

  def dtype(path: tuple, leaf: Any) -> jnp.dtype:
    names = [key.key for key in path]
    matrix = names[-1] in ("kernel", "embedding") and "router" not in names
    return jnp.dtype(config.dtype) if matrix else leaf.dtype

  return jax.tree_util.tree_map_with_path(dtype, params)


def unroll(params: Any, config: LLMConfig) -> Any:
  """Parameters of every layer by itself, output-major, for `unrolled`."""
  out = {n: tree for n, tree in params.items() if not n.startswith("blocks")}
  if "head" in out:
    out["head"] = {"kernel": out["head"]["kernel"].T}
  for index, group in enumerate(config.layer_groups()):
    for layer in range(group.depth):
      out[f"blocks{index}_{layer}"] = jax.tree_util.tree_map_with_path(
        lambda path, x: _output_major(path, x[layer]),  # noqa: B023
        params[f"blocks{index}"],
      )
  return out


def unrolled_logits(x: jax.Array, params: Any, config: LLMConfig) -> jax.Array:
  """The output layer of `unroll`: x [..., C] to [..., V] float32."""
  # Both kinds of weights are [V, C] here.
  name, leaf = "head", "kernel"
  if config.tie_embeddings:
    name, leaf = "embed", "embedding"
  kernel = params[name][leaf].astype(x.dtype)
  return product(x, kernel, output_major=True, dtype=jnp.float32)


def _output_major(path: tuple, x: jax.Array) -> jax.Array:
  """Puts the outputs of a layer's kernel first."""
  names = [key.key for key in path]
  if names[-1] != "kernel":
    return x
  inputs = 2 if names[-2] == "out" else 1  # heads and their dim, or the width
  return jnp.moveaxis(x, range(inputs), range(-inputs, 0))


def new_cache(
  config: LLMConfig,
  batch: int,
  slots: int,
  dtype: str = "float32",
  *,
  unrolled: bool = False,
) -> Any:
  """An empty variable collection "cache".

  Args:
    config: the model.
    batch: texts.
    slots: tokens of a text at most.
    dtype: "float32", "bfloat16" or "int8".
    unrolled: for a model of that kind.
  """
  layer = make_cache(batch, config.num_kv_heads, slots, config.head_dim, dtype)
  cache = {}
  for index, group in enumerate(config.layer_groups()):
    if unrolled:
      for i in range(group.depth):
        cache[f"blocks{index}_{i}"] = {"attn": {"keys_values": layer}}
    else:
      stacked = jax.tree.map(
        lambda x: jnp.zeros((group.depth, *x.shape), x.dtype),  # noqa: B023
        layer,
      )
      cache[f"blocks{index}"] = {"attn": {"keys_values": stacked}}
  return cache
