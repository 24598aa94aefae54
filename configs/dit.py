"""MoH-DiT and DiT on ImageNet 256 x 256 with the paper's recipe.

  python -m moh_jax prepare encode-latents --data IMAGENET/train --split train \
    --vae VAE --out LATENTS
  python train.py --config=configs/dit.py:xl2_90 --workdir=DIR \
    --config.data.path=LATENTS

Arguments: s2_90, s2_75, b2_90, b2_75, l2_90, l2_75, xl2_90, xl2_75 (MoH);
s2_75_last and so on (ours: all heads in the later half of the layers, half of
them before); s2, s4, s8, b2, ..., xl8 (DiT, plain multi-head attention). Of
patch 2 also with _512 or _1024 behind the name: images have so many rows, 1,024
or 4,096 tokens; encode them with --image-size 512 or 1024.

Two arguments make a model of your own classes from a trained one: finetune (for
the released models, on latents of your images) and finetune_pixels (a model
without an autoencoder, on your images).

  python -m moh_jax prepare encode-latents --data FOLDER --vae VAE --out LATENTS
  python train.py --config=configs/dit.py:finetune --workdir=DIR \
    --config.data.path=LATENTS --config.train.init_from=CHECKPOINT

FOLDER holds a folder of images for each class, or images alone, which is one
class: then the model is unconditional. All but the label table is the
checkpoint's.
"""

import ml_collections

from moh_jax import config as lib

_MODELS = {
  name.partition("dit-")[2].replace("-", "_"): name
  for name in lib.released_models()
  if "dit-" in name
}
# arXiv:2212.09748: constant rate, no decay, no clipping, no warm-up.
_OPTIM = {"lr": 1e-4, "schedule": "constant", "weight_decay": 0.0}
_DATA = {
  "finetune": {"source": "latents", "path": "LATENTS", "batch_size": 32},
  "finetune_pixels": {
    "source": "image_folder",
    "path": "IMAGES",
    "batch_size": 32,
    "val_share": 0.1,
    "bad_images": "check",
    "augment": "center_flip",
  },
}
_SIDES = ("512", "1024")
ARGUMENTS = (
  *_MODELS,
  *(f"{name}_{side}" for name in _MODELS for side in _SIDES if "2" in name),
  *_DATA,
)


def get_config(arg: str = "xl2_90") -> ml_collections.ConfigDict:
  if arg in _DATA:
    return _finetune(_DATA[arg])
  name, _, side = arg.rpartition("_")
  name, pixels = (name, int(side)) if side in _SIDES else (arg, 256)
  cells = pixels // 8
  steps = 7_000_000 if pixels == 256 else 3_000_000  # 512 in arXiv:2212.09748
  config = lib.Config(
    lib.released_model(
      _MODELS[name], dtype="bfloat16", input_size=(cells, cells)
    ),
    data=lib.DataConfig(
      source="latents", path=f"data/imagenet{pixels}_latents", batch_size=256
    ),
    optim=lib.OptimConfig(
      **_OPTIM,
      warmup_steps=0,
      clip_norm=0.0,
      ema_decay=0.9999,
      accumulation=(pixels // 256) ** 2,  # as many tokens at a time
    ),
    train=lib.TrainConfig(steps=steps if "xl" in arg else 400_000),
    checkpoint=lib.CheckpointConfig(every=5_000, keep_every=50_000),
    eval=lib.EvalConfig(every=50_000, batch_size=256),
    log=lib.LogConfig(every=100),
  )
  return lib.to_config_dict(config)


def _finetune(data: dict) -> ml_collections.ConfigDict:
  """A short run; what it does not state is the checkpoint's."""
  return ml_collections.ConfigDict(
    {
      "model": {},
      "data": data,
      "optim": {**_OPTIM, "warmup_share": 0.02, "ema_decay": 0.999},
      "train": {"steps": 5000, "init_from": ""},
      "eval": {"batch_size": 32},
      "sample": {"every": 0},  # previews of latents need --vae
    }
  ).lock()
