"""Sizes and head budgets of MoH-LLM and LLaMA."""

import dataclasses

from moh_jax.config.heads import RouterConfig
from moh_jax.config.layers import without_router
from moh_jax.config.llm import LLMConfig
from moh_jax.config.rotary import RotaryConfig

# (layers, width, MLP width, heads, head dim): arXiv:2410.11842.
_SIZES = {
  "s": (12, 768, 2048, 12, 64),
  "b": (24, 1536, 4096, 16, 96),
}
# (shared, top_k). The paper gives the activated share; of the active heads at
# least 40 % are shared here.
_BUDGETS = {"s-75": (4, 5), "s-50": (3, 3), "b-75": (6, 6), "b-50": (4, 4)}


def _moh(name: str) -> LLMConfig:
  depth, width, mlp_dim, heads, head_dim = _SIZES[name[0]]
  shared, top_k = _BUDGETS[name]
  return LLMConfig(
    vocab_size=65536,
    width=width,
    mlp_dim=mlp_dim,
    num_heads=(heads,) * depth,
    num_kv_heads=heads,
    head_dim=head_dim,
    shared_heads=(shared,) * depth,
    top_k=(top_k,) * depth,
    remat="dots",
  )


_DEPTH = 32
_LLAMA3_8B = LLMConfig(
  vocab_size=128256,
  max_length=8192,
  width=4096,
  mlp_dim=14336,
  num_heads=(32,) * _DEPTH,
  num_kv_heads=8,
  head_dim=128,
  shared_heads=(32,) * _DEPTH,
  top_k=(0,) * _DEPTH,
  rope=RotaryConfig(theta=500000.0),
  router=RouterConfig("none"),
  remat="dots",
)
_LLAMA3_70B = dataclasses.replace(
  _LLAMA3_8B,
  width=8192,
  mlp_dim=28672,
  num_heads=(64,) * 80,
  shared_heads=(64,) * 80,
  top_k=(0,) * 80,
)
# Vocabulary as in the continue-tuned models.
_EXPANDED = dataclasses.replace(_LLAMA3_8B, vocab_size=160896)

LLM_MODELS: dict[str, LLMConfig] = {
  **{f"moh-llm-{name}": _moh(name) for name in _BUDGETS},
  **{f"llm-{size}": without_router(_moh(f"{size}-75")) for size in _SIZES},
  "moh-llama3-8b": dataclasses.replace(
    _EXPANDED,
    router=RouterConfig("query_norm"),
    shared_heads=(16,) * _DEPTH,
    top_k=(8,) * _DEPTH,
  ),
  "llama3-8b-expanded": _EXPANDED,
  "llama3-8b": _LLAMA3_8B,
  "llama3-70b": _LLAMA3_70B,
}
