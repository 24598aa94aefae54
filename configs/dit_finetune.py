"""A DiT or MoH-DiT of your own classes, from a trained one.

  python -m moh_jax encode-latents --data FOLDER --vae VAE --out LATENTS
  python train.py --config=configs/dit_finetune.py --workdir=DIR \
    --config.data.path=LATENTS --config.train.init_from=CHECKPOINT

FOLDER holds a folder of images for each class, or images alone, which is one
class: then the model is unconditional. All but the label table is the
checkpoint's, its vector of "no label" included. Arguments: latents (default,
for the released models), pixels (a model without an autoencoder, on FOLDER).
"""

import ml_collections

ARGUMENTS = ("latents", "pixels")


def get_config(arg: str = "latents") -> ml_collections.ConfigDict:
  data = {"source": "latents", "path": "LATENTS", "batch_size": 32}
  if arg == "pixels":
    data |= {
      "source": "image_folder",
      "path": "IMAGES",
      "val_share": 0.1,
      "bad_images": "check",
      "augment": "center_flip",
    }
  return ml_collections.ConfigDict(
    {
      "model": {},
      "data": data,
      "optim": {
        "lr": 1e-4,
        "schedule": "constant",
        "warmup_steps": 100,
        "weight_decay": 0.0,
        "ema_decay": 0.999,
      },
      "train": {"steps": 5000, "init_from": ""},
      "checkpoint": {"every": 500},
      "eval": {"every": 500, "batch_size": 32},
      "sample": {"every": 0},  # previews of latents need --vae
    }
  ).lock()
