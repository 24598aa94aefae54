"""MoH-ViT and TransNeXt on ImageNet-1k with the paper's recipe.

  python train.py --config=configs/vit.py:s80 --workdir=DIR \
    --config.data.path=IMAGENET

IMAGENET holds train/CLASS/* and val/CLASS/*. Arguments: s80, s75, b75, b50
(MoH), micro, tiny, small, base (TransNeXt, plain multi-head attention).
Augmentation is random crop and flip, mixup and CutMix; the paper adds
RandAugment, random erasing and repeated augmentation.
"""

import ml_collections

from moh_jax import config as config_lib
from moh_jax.config import released_model
from moh_jax.config.sizes_vit import NO_DECAY

_ALIASES = {
  "s80": "moh-vit-s80",
  "s75": "moh-vit-s75",
  "b75": "moh-vit-b75",
  "b50": "moh-vit-b50",
  "micro": "transnext-micro",
  "tiny": "transnext-tiny",
  "small": "transnext-small",
  "base": "transnext-base",
}
_BATCH = 1024
_EPOCH = 1_281_167 // _BATCH  # steps


def get_config(arg: str = "s80") -> ml_collections.ConfigDict:
  if arg not in _ALIASES:
    raise ValueError(f"configs/vit.py:{arg} must be one of {tuple(_ALIASES)}")
  config = config_lib.Config(
    model=released_model(_ALIASES[arg]),
    data=config_lib.DataConfig(
      source="image_folder",
      path="data/imagenet",
      batch_size=_BATCH,
      augment="crop_flip",
      eval_resize=256,
      mean=(0.485, 0.456, 0.406),  # of ImageNet
      std=(0.229, 0.224, 0.225),
      num_threads=32,
    ),
    # arXiv:2410.11842, appendix; no decay on what the release exempts.
    optim=config_lib.OptimConfig(
      lr=1e-3,
      warmup_steps=5 * _EPOCH,
      warmup_lr=1e-6,
      final_lr=1e-5,
      weight_decay=0.05,
      no_decay=NO_DECAY,
      clip_norm=1.0,
    ),
    train=config_lib.TrainConfig(steps=300 * _EPOCH, balance_weight=0.01),
    classifier=config_lib.ClassifierConfig(
      label_smoothing=0.1, mixup=0.8, cutmix=1.0, cutmix_prob=0.5
    ),
    checkpoint=config_lib.CheckpointConfig(
      every=_EPOCH, keep_last=2, keep_every=50 * _EPOCH
    ),
    eval=config_lib.EvalConfig(every=5 * _EPOCH, batch_size=1024),
    log=config_lib.LogConfig(every=50),
  )
  cfg = config_lib.to_config_dict(config)
  with cfg.unlocked():
    cfg.model.dtype = "bfloat16"
  return cfg
