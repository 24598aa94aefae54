"""Sizes and head budgets of MoH-ViT and TransNeXt."""

import dataclasses

from moh_jax.config.layers import without_router
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

_SMALL = ViTConfig(
  channels=3,
  num_classes=1000,
  embed_dims=(72, 144, 288, 576),
  depths=(5, 5, 22, 5),
  num_heads=(3, 6, 12, 24),
  drop_path=0.45,
  remat="dots",
)
_BASE = dataclasses.replace(
  _SMALL,
  embed_dims=(96, 192, 384, 768),
  depths=(5, 5, 23, 5),
  num_heads=(4, 8, 16, 32),
  shared_heads=(4, 8, 4, 5),
  top_k=(0, 0, 8, 16),
  drop_path=0.6,
)


def _moh(base: ViTConfig, shared: tuple, top_k: tuple) -> ViTConfig:
  return dataclasses.replace(base, shared_heads=shared, top_k=top_k)


# Sizes and head budgets: arXiv:2410.11842 (MoH) and 2311.17132 (TransNeXt).
VIT_MODELS: dict[str, ViTConfig] = {
  "moh-vit-s80": _moh(_SMALL, (3, 6, 3, 8), (0, 0, 6, 12)),
  "moh-vit-s75": _moh(_SMALL, (3, 6, 3, 4), (0, 0, 6, 12)),
  "moh-vit-b75": _moh(_BASE, (4, 8, 4, 5), (0, 0, 8, 16)),
  "moh-vit-b50": _moh(_BASE, (2, 2, 2, 4), (2, 4, 6, 8)),
  "transnext-micro": without_router(
    _SMALL,
    embed_dims=(48, 96, 192, 384),
    depths=(2, 2, 15, 2),
    num_heads=(2, 4, 8, 16),
    drop_path=0.15,
  ),
  "transnext-tiny": without_router(
    _SMALL, depths=(2, 2, 15, 2), drop_path=0.25
  ),
  "transnext-small": without_router(_SMALL),
  "transnext-base": without_router(_BASE),
}
