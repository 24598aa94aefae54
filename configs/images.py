"""Your own images: a folder for each class, from scratch or fine-tuned.

  python train.py --config=configs/images.py:small --workdir=DIR \
    --config.data.path=FOLDER
  python train.py --config=configs/images.py:finetune --workdir=DIR \
    --config.data.path=FOLDER --config.train.init_from=CHECKPOINT

FOLDER holds train/CLASS/* and val/CLASS/*, or CLASS/*, of which a tenth is held
out. The number of classes, the channels (grey or RGB) and the image size come
from it; `--config.model.image_size=96` states a size.

Arguments: small and medium (MoH-ViT from scratch; 75 % of the heads), small_mha
and medium_mha (the multi-head baseline), finetune (the model of a checkpoint,
with a head for the new classes), dit (a small MoH-DiT that makes such images of
32 x 32 pixels; images without class folders train it unconditionally).
"""

import ml_collections

from moh_jax import config as lib
from moh_jax.config.released import NO_DECAY

ARGUMENTS = ("small", "small_mha", "medium", "medium_mha", "finetune", "dit")
_DATA = {
  "source": "image_folder",
  "path": "IMAGES",
  "val_share": 0.1,
  "bad_images": "check",
  "batch_size": 32,
}
_CLASSIFIER_DATA = {**_DATA, "augment": "crop_flip", "eval_resize": None}
_OPTIM = {"lr": 1e-3, "final_lr": 1e-5}
# Stages of "small" (1.5 million parameters), and as wide as TransNeXt-Micro's.
_STAGES = {
  "small": {
    "embed_dims": (48, 96, 192),
    "depths": (2, 2, 2),
    "num_heads": (4, 4, 8),
    "shared_heads": (1, 1, 2),
    "top_k": (2, 2, 4),
    "mlp_ratios": (4, 4, 4),
    "sr_ratios": (4, 2, 1),
    "drop_path": 0.05,
  },
  "medium": {
    "embed_dims": (48, 96, 192, 384),
    "depths": (2, 2, 6, 2),
    "num_heads": (4, 4, 8, 16),
    "shared_heads": (1, 1, 2, 4),
    "top_k": (2, 2, 4, 8),
    "drop_path": 0.1,
  },
}


def get_config(arg: str = "small") -> ml_collections.ConfigDict:
  if arg == "finetune":
    return _finetune()
  if arg == "dit":
    return lib.to_config_dict(_dit())
  size, _, mha = arg.partition("_")
  model = lib.ViTConfig(image_size=None, **_STAGES[size])
  config = lib.Config(
    lib.without_router(model) if mha else model,
    data=lib.DataConfig(**_CLASSIFIER_DATA),
    optim=lib.OptimConfig(**_OPTIM, no_decay=NO_DECAY),
    train=lib.TrainConfig(steps=2000),
    classifier=lib.ClassifierConfig(label_smoothing=0.1),
    eval=lib.EvalConfig(batch_size=32),
  )
  return lib.to_config_dict(config)


def _dit() -> lib.Config:
  depth = 6
  return lib.Config(
    lib.DiTConfig(
      patch_size=4,
      width=192,
      num_heads=(8,) * depth,
      head_dim=24,
      shared_heads=(2,) * depth,
      top_k=(4,) * depth,
    ),
    data=lib.DataConfig(**_DATA, augment="center_flip"),
    optim=lib.OptimConfig(**_OPTIM, weight_decay=0.0, ema_decay=0.999),
    train=lib.TrainConfig(steps=4000),
    eval=lib.EvalConfig(batch_size=32),
    # As for digits: few steps and few pixels learn v faster than the noise.
    diffusion=lib.DiffusionConfig(space="pixel", prediction="v"),
    sample=lib.SampleConfig(
      every=None, method="dpm", steps="20", cfg_scale=2.0
    ),
  )


def _finetune() -> ml_collections.ConfigDict:
  """A short run; what it does not state is the checkpoint's."""
  return ml_collections.ConfigDict(
    {
      "model": {},
      "data": _CLASSIFIER_DATA,
      "optim": {**_OPTIM, "no_decay": NO_DECAY, "layer_decay": 0.9},
      "train": {"steps": 300, "init_from": ""},
      "classifier": {"label_smoothing": 0.1},
      "eval": {"batch_size": 32},
    }
  ).lock()
