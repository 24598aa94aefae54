"""MoH-ViT on scikit-learn's handwritten digits: minutes on a laptop's CPU.

  python train.py --config=configs/vit_digits.py --workdir=DIR

Arguments: moh (default; 75 % of the heads), mha (the multi-head baseline).
"""

import ml_collections

from moh_jax import config as lib
from moh_jax.config.released import NO_DECAY

ARGUMENTS = ("moh", "mha")


def get_config(arg: str = "moh") -> ml_collections.ConfigDict:
  model = lib.ViTConfig(
    image_size=(8, 8),
    patch_stride=1,  # a token per pixel
    embed_dims=(48, 96),
    depths=(2, 2),
    num_heads=(4, 8),
    shared_heads=(1, 2),
    top_k=(2, 4),
    mlp_ratios=(4, 4),
    sr_ratios=(2, 1),
    drop_path=0.05,
    attention_out_multiplier=0.5,  # the best in docs/results.md
  )
  config = lib.Config(
    lib.without_router(model) if arg == "mha" else model,
    data=lib.DataConfig(
      "digits", batch_size=64, augment="shift", num_threads=1
    ),
    optim=lib.OptimConfig(
      lr=2e-3,
      warmup_share=0.1,
      warmup_lr=1e-6,
      final_lr=1e-5,
      no_decay=NO_DECAY,
    ),
    train=lib.TrainConfig(steps=500),
    classifier=lib.ClassifierConfig(label_smoothing=0.1),
    eval=lib.EvalConfig(batch_size=120),
  )
  return lib.to_config_dict(config)
