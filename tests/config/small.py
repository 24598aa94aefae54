"""Small sections of every family."""

from moh_jax import config as config_lib
from tests.training import tiny

VIT = config_lib.ViTConfig(
  image_size=(16, 8),
  patch_stride=2,
  embed_dims=(8, 12),
  depths=(1, 2),
  num_heads=(2, 4),
  shared_heads=(1, 2),
  top_k=(1, 1),
  mlp_ratios=(2, 2),
  sr_ratios=(2, 1),
)
DIT = config_lib.DiTConfig(
  input_size=(4, 6),
  channels=3,
  num_classes=5,
  width=8,
  num_heads=(4, 4, 6),
  head_dim=4,
  shared_heads=(2, 2, 6),
  top_k=(1, 1, 0),
)
LLM = tiny.LLM
