"""A small MoH-ViT on a folder of images: copy it and change what differs.

  python -m moh_jax train --config=docs/examples/my_images.py --workdir=DIR \
    --config.data.path=IMAGES

IMAGES holds train/CLASS/* and val/CLASS/*.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Describes the run; what is not named here has its default."""
  return ml_collections.ConfigDict(
    {
      "model": {
        "family": "vit",
        "image_size": (32, 32),
        "patch_stride": 2,  # pixels between tokens of the first stage
        "embed_dims": (48, 96),  # two stages; the second halves the grid
        "depths": (2, 2),
        "num_heads": (4, 8),
        "shared_heads": (1, 2),
        "top_k": (2, 4),  # 75 % of the heads are active
        "mlp_ratios": (4, 4),
        "sr_ratios": (2, 1),
      },
      "data": {
        "source": "image_folder",
        "path": "IMAGES",
        "batch_size": 64,
        "augment": "crop_flip",
      },
      "optim": {"lr": 1e-3},
      "train": {"steps": 2000},
    }
  )
