"""Sizes and head budgets of the released models and their baselines."""

from moh_jax.config.dit import DiTConfig
from moh_jax.config.heads import RouterConfig
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

# (first width, layers, first heads, shared, top_k, drop path) of each size, and
# other splits of its heads: arXiv:2311.17132 (TransNeXt) and 2410.11842 (MoH).
# Widths and heads double from stage to stage.
_S80 = (3, 6, 3, 8), (0, 0, 6, 12)
_B75 = (4, 8, 4, 5), (0, 0, 8, 16)
_VIT_SIZES = {
  "micro": (48, (2, 2, 15, 2), 2, *_S80, 0.15),
  "tiny": (72, (2, 2, 15, 2), 3, *_S80, 0.25),
  "small": (72, (5, 5, 22, 5), 3, *_S80, 0.45),
  "base": (96, (5, 5, 23, 5), 4, *_B75, 0.6),
}
_VIT_BUDGETS = {
  "s80": ("small", *_S80),
  "s75": ("small", (3, 6, 3, 4), (0, 0, 6, 12)),
  "b75": ("base", *_B75),
  "b50": ("base", (2, 2, 2, 4), (2, 4, 6, 8)),
}


def _vit(size: str, *split: tuple[int, ...]) -> ViTConfig:
  width, depths, heads, shared, top_k, drop_path = _VIT_SIZES[size]
  shared, top_k = split or (shared, top_k)
  return ViTConfig(
    channels=3,
    num_classes=1000,
    embed_dims=tuple(width << stage for stage in range(4)),
    depths=depths,
    num_heads=tuple(heads << stage for stage in range(4)),
    shared_heads=shared,
    top_k=top_k,
    drop_path=drop_path,
    router=RouterConfig() if split else RouterConfig("none"),
    remat="dots",
  )


VIT_MODELS: dict[str, ViTConfig] = {
  **{f"moh-vit-{name}": _vit(*split) for name, split in _VIT_BUDGETS.items()},
  **{f"transnext-{size}": _vit(size) for size in _VIT_SIZES},
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
  # Ours: half of the heads in the first layers, all in the last.
  "s2-75-last": ((6, 6, 1, 2), (6, 6, 6, 0)),
  "b2-75-last": ((6, 12, 3, 3), (6, 12, 12, 0)),
  "l2-75-last": ((12, 16, 4, 4), (12, 16, 16, 0)),
  "xl2-75-last": ((14, 16, 4, 4), (14, 16, 16, 0)),
}


def _dit(size: str, patch: int, *groups: tuple[int, ...]) -> DiTConfig:
  depth, width, heads = _DIT_SIZES[size]
  layers = (
    split
    for count, *split in groups or ((depth, heads, heads, 0),)
    for _ in range(count)
  )
  num_heads, shared, top_k = zip(*layers)
  return DiTConfig(
    channels=4,
    num_classes=1000,
    patch_size=patch,
    width=width,
    num_heads=num_heads,
    head_dim=width // heads,
    shared_heads=shared,
    top_k=top_k,
    router=RouterConfig() if groups else RouterConfig("none"),
    remat="dots",
  )


DIT_MODELS: dict[str, DiTConfig] = {
  **{
    f"moh-dit-{name}": _dit(name.partition("2-")[0], 2, *groups)
    for name, groups in _DIT_BUDGETS.items()
  },
  **{
    f"dit-{size}{patch}": _dit(size, patch)
    for size in _DIT_SIZES
    for patch in (2, 4, 8)
  },
}

# (vocabulary, length, RoPE's theta, layers, width, MLP width, heads, key/value
# heads): arXiv:2410.11842, and LLaMA3 also with the vocabulary of the
# continue-tuned models.
_LLM_SIZES = {
  "s": (65536, 2048, 1e4, 12, 768, 2048, 12, 12),
  "b": (65536, 2048, 1e4, 24, 1536, 4096, 16, 16),
  # Ours: with grouped keys and values, and an MLP that is wider by as many
  # parameters (of "sg" by 0.1 % more, so that its width is a multiple of 8).
  "sg": (65536, 2048, 1e4, 12, 768, 2392, 12, 4),
  "bg": (65536, 2048, 1e4, 24, 1536, 4864, 16, 4),
  "8b": (128256, 8192, 5e5, 32, 4096, 14336, 32, 8),
  "8b-expanded": (160896, 8192, 5e5, 32, 4096, 14336, 32, 8),
  "70b": (128256, 8192, 5e5, 80, 8192, 28672, 64, 8),
}
# (shared, top_k) of equally many layers each. The paper gives the activated
# share; of the active heads at least 40 % are shared here.
_LLM_BUDGETS: dict[str, tuple[tuple[int, int], ...]] = {
  **{"s-75": ((4, 5),), "s-50": ((3, 3),)},
  **{"b-75": ((6, 6),), "b-50": ((4, 4),)},
  # Ours: half of the heads in the first layers, all in the last.
  **{"s-75-last": ((3, 3), (12, 0)), "b-75-last": ((4, 4), (16, 0))},
  # For groups: 12 heads are 4 groups of 3, 16 are 4 of 4.
  **{"sg-75": ((3, 6),), "sg-67": ((4, 4),), "sg-50": ((3, 3),)},
  **{"bg-75": ((4, 8),), "bg-50": ((4, 4),)},
}


def _llm(size: str, kind: str, *splits: tuple[int, int]) -> LLMConfig:
  vocabulary, length, theta, *layers = _LLM_SIZES[size]
  depth, width, mlp_dim, heads, kv_heads = layers
  shared, top_k = zip(*(x for x in splits for _ in range(depth // len(splits))))
  return LLMConfig(
    vocab_size=vocabulary,
    max_length=length,
    width=width,
    mlp_dim=mlp_dim,
    num_heads=(heads,) * depth,
    num_kv_heads=kv_heads,
    head_dim=width // heads,
    shared_heads=shared,
    top_k=top_k,
    rope=RotaryConfig(theta),
    router=RouterConfig(kind),
    remat="dots",
  )


LLM_MODELS: dict[str, LLMConfig] = {
  **{
    f"moh-llm-{name}": _llm(name.partition("-")[0], "two_stage", *split)
    for name, split in _LLM_BUDGETS.items()
  },
  **{
    f"llm-{size}": _llm(size, "none", *_LLM_BUDGETS[f"{size}-75"])
    for size in ("s", "b", "sg", "bg")
  },
  "moh-llama3-8b": _llm("8b-expanded", "query_norm", (16, 8)),
  "llama3-8b-expanded": _llm("8b-expanded", "none", (32, 0)),
  "llama3-8b": _llm("8b", "none", (32, 0)),
  "llama3-70b": _llm("70b", "none", (64, 0)),
}

# Repositories of the Hugging Face Hub that hold released weights.
REPOSITORIES = {
  **{
    f"moh-vit-{name}": f"Chat-UniVi/MoH-ViT-{name[0].upper()}-{name[1:]}"
    for name in _VIT_BUDGETS
  },
  **{
    f"transnext-{size}": f"DaiShiResearch/transnext-{size}-224-1k"
    for size in _VIT_SIZES
  },
  "moh-dit-xl2-90": "Chat-UniVi/MoH-DiT-XL-90",
  "moh-llama3-8b": "Chat-UniVi/MoH-LLaMA3-8B",
  "llama3-8b": "meta-llama/Meta-Llama-3-8B",
  "llama3-70b": "meta-llama/Meta-Llama-3-70B",
}
