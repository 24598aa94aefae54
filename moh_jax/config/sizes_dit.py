"""Sizes and head budgets of MoH-DiT and DiT."""

import dataclasses

from moh_jax.config.dit import DiTConfig
from moh_jax.config.heads import RouterConfig

# (layers, width, heads) of the baselines: arXiv:2212.09748.
_SIZES = {
  "s": (12, 384, 6),
  "b": (12, 768, 12),
  "l": (24, 1024, 16),
  "xl": (28, 1152, 16),
}
# Groups of (layers, heads, shared, top_k): arXiv:2410.11842 and its release.
_BUDGETS = {
  "s2-90": ((8, 6, 3, 2), (4, 6, 6, 0)),
  "s2-75": ((2, 6, 2, 1), (4, 6, 3, 1), (4, 6, 3, 2), (2, 6, 6, 0)),
  "b2-90": ((5, 12, 6, 4), (5, 12, 7, 4), (2, 12, 12, 0)),
  "b2-75": ((2, 12, 4, 2), (8, 12, 6, 3), (2, 12, 12, 0)),
  "l2-90": ((8, 8, 8, 0), (8, 16, 16, 0), (8, 24, 16, 3)),
  "l2-75": ((8, 8, 8, 0), (8, 16, 8, 4), (8, 24, 12, 4)),
  "xl2-90": ((9, 8, 8, 0), (10, 16, 16, 0), (9, 24, 16, 3)),
  "xl2-75": ((9, 8, 8, 0), (10, 16, 10, 2), (9, 24, 14, 2)),
}


def _baseline(size: str, patch: int) -> DiTConfig:
  depth, width, heads = _SIZES[size]
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


def _moh(name: str) -> DiTConfig:
  columns = zip(
    *(split for depth, *split in _BUDGETS[name] for _ in range(depth)),
    strict=True,
  )
  heads, shared, top_k = columns
  size, patch = name.partition("-")[0][:-1], int(name.partition("-")[0][-1])
  return dataclasses.replace(
    _baseline(size, patch),
    router=RouterConfig(),
    num_heads=heads,
    shared_heads=shared,
    top_k=top_k,
  )


DIT_MODELS: dict[str, DiTConfig] = {
  **{f"moh-dit-{name}": _moh(name) for name in _BUDGETS},
  **{
    f"dit-{size}{patch}": _baseline(size, patch)
    for size in _SIZES
    for patch in (2, 4, 8)
  },
}
