"""The model section of MoH-LLM."""

import dataclasses

from moh_jax.config.checks import (
  at_least,
  check_runtime,
  in_range,
  is_section,
  one_of,
)
from moh_jax.config.heads import RouterConfig
from moh_jax.config.layers import LayerStack
from moh_jax.config.rotary import RotaryConfig

CACHE_DTYPES = ("float32", "bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class LLMConfig(LayerStack):
  """Decoder of the LLaMA kind (arXiv:2302.13971) with or without MoH.

  `num_heads`, `shared_heads` and `top_k` hold one value per layer.

  Attributes:
    family: "llm".
    vocab_size: V, rows of the embedding.
    max_length: tokens of a sequence at most: RoPE's range.
    width: C.
    mlp_dim: F.
    num_heads: query heads of every layer; their number is the depth.
    num_kv_heads: key/value heads; query head h reads h // (H / K).
    head_dim: width of a head.
    shared_heads: heads that are always on, the first of `head_order`.
    top_k: routed heads per token.
    head_order: per layer, its heads in the order in which the first are shared;
      () is their own order. It moves no weights.
    norm_eps: of RMSNorm.
    rope: section of the rotary position embedding.
    tie_embeddings: the output layer is the embedding.
    qkv_bias: biases of the query, key and value projections.
    out_bias: bias of the attention's output.
    mlp_bias: biases of the MLP.
    router: section of the router; its kind "none" is multi-head attention.
    attention_impl: implementation of the attention.
    dtype: compute dtype; router, softmax, norms and loss are float32.
    remat: what the backward pass recomputes: "none", "full" or "dots".
    loss_chunk: tokens of a sequence whose logits exist at one time in training
      and scoring; 0 makes all at once.
  """

  family: str = "llm"
  vocab_size: int = 65536
  max_length: int = 2048
  width: int = 768
  mlp_dim: int = 2048
  num_heads: tuple[int, ...] = (12,) * 12
  num_kv_heads: int = 12
  head_dim: int = 64
  shared_heads: tuple[int, ...] = (4,) * 12
  top_k: tuple[int, ...] = (5,) * 12
  head_order: tuple[tuple[int, ...], ...] = ()
  norm_eps: float = 1e-5
  rope: RotaryConfig = RotaryConfig()
  tie_embeddings: bool = False
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  router: RouterConfig = RouterConfig()
  attention_impl: str = "auto"
  dtype: str = "float32"
  remat: str = "none"
  loss_chunk: int = 512

  # Fields that change neither the parameters nor what they mean, so that a
  # checkpoint may be continued or served with other values.
  RUNTIME_FIELDS = ("attention_impl", "dtype", "loss_chunk", "remat")
  sees = "before"

  def __post_init__(self):
    one_of("model", ("llm",), family=self.family)
    is_section("model", RouterConfig, router=self.router)
    is_section("model", RotaryConfig, rope=self.rope)
    check_runtime(self)
    at_least("model", 1, vocab_size=self.vocab_size, width=self.width)
    at_least("model", 1, max_length=self.max_length, mlp_dim=self.mlp_dim)
    at_least("model", 1, num_kv_heads=self.num_kv_heads)
    at_least("model", 0, loss_chunk=self.loss_chunk)
    in_range("model", 1e-12, 1.0, norm_eps=self.norm_eps)
    if self.head_dim < 2 or self.head_dim % 2:
      raise ValueError(
        f"model.head_dim={self.head_dim} must be even: RoPE turns pairs"
      )
    self.check_layers()
    for layer, heads in enumerate(self.num_heads):
      if heads % self.num_kv_heads:
        raise ValueError(
          f"model.num_kv_heads={self.num_kv_heads} must divide "
          f"model.num_heads[{layer}]={heads}"
        )
    self._check_order()

  def _check_order(self):
    if self.head_order and len(self.head_order) != self.depth:
      raise ValueError(
        f"model.head_order has {len(self.head_order)} rows, must have one per "
        f"layer ({self.depth}) or none"
      )
    if self.head_order and len(set(self.num_heads)) > 1:
      raise ValueError(
        f"model.head_order must be () where layers differ in their heads, "
        f"model.num_heads={self.num_heads}"
      )
    for layer, order in enumerate(self.head_order):
      if sorted(order) != list(range(self.num_heads[layer])):
        raise ValueError(
          f"model.head_order[{layer}]={order} must hold each of the "
          f"{self.num_heads[layer]} heads once"
        )

  @property
  def num_tokens(self) -> int:
    """N of the longest sequence."""
    return self.max_length
