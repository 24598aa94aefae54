"""MoH-ViT and TransNeXt on ImageNet-1k with the paper's recipe.

  python train.py --config=configs/vit.py:s80 --workdir=DIR \
    --config.data.path=IMAGENET
  python train.py --config=configs/vit.py:finetune_384 --workdir=DIR2 \
    --config.data.path=IMAGENET --config.train.init_from=DIR

IMAGENET holds train/CLASS/* and val/CLASS/*. Arguments: s80, s75, b75, b50
(MoH), micro, tiny, small, base (TransNeXt, plain multi-head attention), and
finetune_384, five epochs of a trained one at 384 x 384 pixels.
"""

import ml_collections

from moh_jax import config as lib
from moh_jax.config.released import NO_DECAY

_MOH = {name: f"moh-vit-{name}" for name in ("s80", "s75", "b75", "b50")}
_MHA = {n: f"transnext-{n}" for n in ("micro", "tiny", "small", "base")}
ARGUMENTS = (*_MOH, *_MHA, "finetune_384")
_BATCH = 1024
_EPOCH = 1_281_167 // _BATCH  # steps
_DATA = {
  "source": "image_folder",
  "path": "data/imagenet",
  "batch_size": _BATCH,
  "augment": "crop_flip",
  "auto_augment": "rand-m9-mstd0.5-inc1",
  "random_erasing": 0.25,
  "repeats": 3,
  "eval_resize": 256,
  "mean": (0.485, 0.456, 0.406),  # of ImageNet
  "std": (0.229, 0.224, 0.225),
  "num_threads": 32,
}
_CLASSIFIER = {"label_smoothing": 0.1, "mixup": 0.8, "cutmix": 1.0}
# No decay on what the release exempts.
_OPTIM = {"weight_decay": 0.05, "no_decay": NO_DECAY, "clip_norm": 1.0}


def get_config(arg: str = "s80") -> ml_collections.ConfigDict:
  if arg == "finetune_384":
    return _finetune()
  config = lib.Config(
    lib.released_model({**_MOH, **_MHA}[arg], dtype="bfloat16"),
    data=lib.DataConfig(**_DATA),
    # arXiv:2410.11842, appendix.
    optim=lib.OptimConfig(
      **_OPTIM,
      lr=1e-3,
      warmup_steps=5 * _EPOCH,
      warmup_lr=1e-6,
      final_lr=1e-5,
    ),
    train=lib.TrainConfig(steps=300 * _EPOCH),
    classifier=lib.ClassifierConfig(**_CLASSIFIER),
    checkpoint=lib.CheckpointConfig(every=_EPOCH, keep_every=50 * _EPOCH),
    eval=lib.EvalConfig(every=5 * _EPOCH, batch_size=1024),
  )
  return lib.to_config_dict(config)


def _finetune() -> ml_collections.ConfigDict:
  """Fine-tunes as TransNeXt's models of 384 pixels were made.

  Values of github.com/DaiShiResearch/TransNeXt, classification: a constant
  rate, no CutMix, evaluation without a crop. Its files state a drop path rate,
  but its script keeps the network in evaluation mode, where nothing is dropped.
  """
  size = {"image_size": (384, 384), "drop_path": 0.0, "dtype": "bfloat16"}
  rate = {"lr": 1e-5, "schedule": "constant", "warmup_steps": 0}
  return ml_collections.ConfigDict(
    {
      "model": size,
      "data": {**_DATA, "eval_resize": 0},
      "optim": {**_OPTIM, **rate},
      "train": {"steps": 5 * _EPOCH, "init_from": ""},
      "classifier": {**_CLASSIFIER, "cutmix": 0.0},
      "checkpoint": {"every": _EPOCH},
      "eval": {"every": _EPOCH, "batch_size": 1024},
    }
  ).lock()
