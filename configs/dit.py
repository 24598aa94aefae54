"""MoH-DiT and DiT on ImageNet 256 x 256 with the paper's recipe.

  python -m moh_jax encode-latents --data IMAGENET/train --split train \
    --vae VAE --out LATENTS
  python train.py --config=configs/dit.py:xl2_90 --workdir=DIR \
    --config.data.path=LATENTS

Arguments: s2_90, s2_75, b2_90, b2_75, l2_90, l2_75, xl2_90, xl2_75 (MoH); s2,
s4, s8, b2, ..., xl8 (DiT, plain multi-head attention). For 512 x 512 encode
with --image-size 512 and add --config.model.input_size="(64, 64)".
"""

import ml_collections

from moh_jax import config as config_lib
from moh_jax.config import released_model, released_models

_MODELS = {
  name.partition("dit-")[2].replace("-", "_"): name
  for name in released_models()
  if "dit-" in name
}
ARGUMENTS = tuple(_MODELS)


def get_config(arg: str = "xl2_90") -> ml_collections.ConfigDict:
  config = config_lib.Config(
    model=released_model(_MODELS[arg], dtype="bfloat16"),
    data=config_lib.DataConfig(
      source="latents",
      path="data/imagenet256_latents",
      batch_size=256,
    ),
    # arXiv:2212.09748: constant rate, no decay, no clipping, no warm-up.
    optim=config_lib.OptimConfig(
      lr=1e-4,
      schedule="constant",
      warmup_steps=0,
      weight_decay=0.0,
      clip_norm=0.0,
      ema_decay=0.9999,
    ),
    train=config_lib.TrainConfig(
      steps=7_000_000 if "xl" in arg else 400_000, balance_weight=0.01
    ),
    checkpoint=config_lib.CheckpointConfig(
      every=5_000, keep_last=2, keep_every=50_000
    ),
    eval=config_lib.EvalConfig(every=50_000, batch_size=256),
    log=config_lib.LogConfig(every=100),
    sample=config_lib.SampleConfig(method="ddpm", steps="250", cfg_scale=1.5),
  )
  return config_lib.to_config_dict(config)
