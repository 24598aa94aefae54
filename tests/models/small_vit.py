"""ViT configs small enough for tests of everything around the model."""

from moh_jax.config import ViTConfig

# One stage of 2 x 2 tokens of images of 8 x 8 pixels.
ONE_STAGE = ViTConfig(
  image_size=(8, 8),
  num_classes=6,
  patch_stride=4,
  embed_dims=(8,),
  depths=(1,),
  num_heads=(4,),
  shared_heads=(1,),
  top_k=(1,),
  mlp_ratios=(2,),
  sr_ratios=(1,),
)
# Two stages, the first with window attention.
TWO_STAGES = ViTConfig(
  channels=3,
  image_size=(16, 16),
  num_classes=5,
  embed_dims=(8, 16),
  depths=(2, 1),
  num_heads=(2, 4),
  shared_heads=(1, 2),
  top_k=(1, 1),
  mlp_ratios=(2, 2),
  sr_ratios=(2, 1),
)
