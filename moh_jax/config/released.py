"""Sizes and head budgets of the released models and their baselines."""

import dataclasses

from moh_jax.config.dit import DiTConfig
from moh_jax.config.heads import RouterConfig
from moh_jax.config.layers import without_router
from moh_jax.config.llm import LLMConfig, RotaryConfig
from moh_jax.config.vit import ViTConfig

# Parameters that the released ViT recipe does not decay: norms, biases, and
# what sets positions and temperatures.
NO_DECAY = (
  "*/bias",
  "*/scale",
  "*query_embedding",
  "*relative_pos_bias_local",
  "*/cpb/*",
  "*temperature",
)

_VIT_SMALL = ViTConfig(
  channels=3,
  num_classes=1000,
  embed_dims=(72, 144, 288, 576),
  depths=(5, 5, 22, 5),
  num_heads=(3, 6, 12, 24),
  drop_path=0.45,
  remat="dots",
)
_VIT_BASE = dataclasses.replace(
  _VIT_SMALL,
  embed_dims=(96, 192, 384, 768),
  depths=(5, 5, 23, 5),
  num_heads=(4, 8, 16, 32),
  shared_heads=(4, 8, 4, 5),
  top_k=(0, 0, 8, 16),
  drop_path=0.6,
)


def _vit(base: ViTConfig, shared: tuple, top_k: tuple) -> ViTConfig:
  return dataclasses.replace(base, shared_heads=shared, top_k=top_k)


# Sizes and head budgets: arXiv:2410.11842 (MoH) and 2311.17132 (TransNeXt).
VIT_MODELS: dict[str, ViTConfig] = {
  "moh-vit-s80": _vit(_VIT_SMALL, (3, 6, 3, 8), (0, 0, 6, 12)),
  "moh-vit-s75": _vit(_VIT_SMALL, (3, 6, 3, 4), (0, 0, 6, 12)),
  "moh-vit-b75": _vit(_VIT_BASE, (4, 8, 4, 5), (0, 0, 8, 16)),
  "moh-vit-b50": _vit(_VIT_BASE, (2, 2, 2, 4), (2, 4, 6, 8)),
  "transnext-micro": without_router(
    _VIT_SMALL,
    embed_dims=(48, 96, 192, 384),
    depths=(2, 2, 15, 2),
    num_heads=(2, 4, 8, 16),
    drop_path=0.15,
  ),
  "transnext-tiny": without_router(
    _VIT_SMALL, depths=(2, 2, 15, 2), drop_path=0.25
  ),
  "transnext-small": without_router(_VIT_SMALL),
  "transnext-base": without_router(_VIT_BASE),
}

# (layers, width, heads) of the baselines: arXiv:2212.09748.
_DIT_SIZES = {
  "s": (12, 384, 6),
  "b": (12, 768, 12),
  "l": (24, 1024, 16),
  "xl": (28, 1152, 16),
}
# Groups of (layers, heads, shared, top_k): arXiv:2410.11842 and its release.
_DIT_BUDGETS = {
  "s2-90": ((8, 6, 3, 2), (4, 6, 6, 0)),
  "s2-75": ((2, 6, 2, 1), (4, 6, 3, 1), (4, 6, 3, 2), (2, 6, 6, 0)),
  "b2-90": ((5, 12, 6, 4), (5, 12, 7, 4), (2, 12, 12, 0)),
  "b2-75": ((2, 12, 4, 2), (8, 12, 6, 3), (2, 12, 12, 0)),
  "l2-90": ((8, 8, 8, 0), (8, 16, 16, 0), (8, 24, 16, 3)),
  "l2-75": ((8, 8, 8, 0), (8, 16, 8, 4), (8, 24, 12, 4)),
  "xl2-90": ((9, 8, 8, 0), (10, 16, 16, 0), (9, 24, 16, 3)),
  "xl2-75": ((9, 8, 8, 0), (10, 16, 10, 2), (9, 24, 14, 2)),
}


def _plain_dit(size: str, patch: int) -> DiTConfig:
  depth, width, heads = _DIT_SIZES[size]
  return DiTConfig(
    channels=4,
    num_classes=1000,
    patch_size=patch,
    width=width,
    num_heads=(heads,) * depth,
    head_dim=width // heads,
    shared_heads=(heads,) * depth,
    top_k=(0,) * depth,
    router=RouterConfig("none"),
    remat="dots",
  )


def _dit(name: str) -> DiTConfig:
  columns = zip(
    *(split for depth, *split in _DIT_BUDGETS[name] for _ in range(depth)),
    strict=True,
  )
  heads, shared, top_k = columns
  size, patch = name.partition("-")[0][:-1], int(name.partition("-")[0][-1])
  return dataclasses.replace(
    _plain_dit(size, patch),
    router=RouterConfig(),
    num_heads=heads,
    shared_heads=shared,
    top_k=top_k,
  )


DIT_MODELS: dict[str, DiTConfig] = {
  **{f"moh-dit-{name}": _dit(name) for name in _DIT_BUDGETS},
  **{
    f"dit-{size}{patch}": _plain_dit(size, patch)
    for size in _DIT_SIZES
    for patch in (2, 4, 8)
  },
}

# (layers, width, MLP width, heads, head dim): arXiv:2410.11842.
_LLM_SIZES = {
  "s": (12, 768, 2048, 12, 64),
  "b": (24, 1536, 4096, 16, 96),
}
# (shared, top_k). The paper gives the activated share; of the active heads at
# least 40 % are shared here.
_LLM_BUDGETS = {"s-75": (4, 5), "s-50": (3, 3), "b-75": (6, 6), "b-50": (4, 4)}


def _llm(name: str) -> LLMConfig:
  depth, width, mlp_dim, heads, head_dim = _LLM_SIZES[name[0]]
  shared, top_k = _LLM_BUDGETS[name]
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
  **{f"moh-llm-{name}": _llm(name) for name in _LLM_BUDGETS},
  **{f"llm-{size}": without_router(_llm(f"{size}-75")) for size in _LLM_SIZES},
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
