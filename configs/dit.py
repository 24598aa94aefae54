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


def get_config(arg: str = "xl2_90") -> ml_collections.ConfigDict:
  name = ("moh-dit-" if "_" in arg else "dit-") + arg.replace("_", "-")
  if name not in released_models():
    known = [n for n in released_models() if "dit-" in n]
    known = tuple(
      n.removeprefix("moh-").removeprefix("dit-").replace("-", "_")
      for n in known
    )
    raise ValueError(f"configs/dit.py:{arg} must be one of {known}")
  config = config_lib.Config(
    model=released_model(name),
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
  cfg = config_lib.to_config_dict(config)
  with cfg.unlocked():
    cfg.model.dtype = "bfloat16"
  return cfg
