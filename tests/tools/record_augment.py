"""Records what timm's augmentations make of a photograph.

Needs torch, Pillow below 12, whose `ImageOps.posterize` takes 0 bits, and
timm's wheel, unpacked, but nothing that timm imports elsewhere:

  python tests/tools/record_augment.py TIMM_FOLDER PHOTOGRAPH tests/goldens

PHOTOGRAPH is scikit-learn's china.jpg, of which a part is made smaller.
"""

import importlib
import pathlib
import sys
from unittest import mock

import numpy as np
import torch
from PIL import Image

LEVELS = (0, 3, 9, 10)
SIZES = (10, 255, 256, 300, 1_281_167)  # of sets of images
_VERSION = "1.0.31"
_FILLS = {"rgb": (124, 116, 104), "grey": 77}


def _changed(timm, pictures: dict) -> dict[str, np.ndarray]:
  """Each operation at each level and sign."""
  found = {}
  for mode, picture in pictures.items():
    hparams = {"img_mean": _FILLS[mode], "interpolation": 3}
    for name in timm._RAND_INCREASING_TRANSFORMS:
      for level in LEVELS:
        operation = timm.AugmentOp(name, 1.0, level, hparams)
        for sign, number in (("+", 0.4), ("-", 0.6)):
          with mock.patch.object(timm.random, "random", return_value=number):
            changed = np.asarray(operation(picture))
          found[f"{name}{sign}{level}/{mode}"] = changed
  return found


def _erased(timm) -> np.ndarray:
  """[20000, 2] uint8: rows and columns of erased boxes, 0 where none is."""
  erasing = timm.RandomErasing(0.25, mode="pixel", device="cpu")
  timm.random.seed(0)
  found = []
  for _ in range(20000):
    changed = erasing(torch.zeros(1, 48, 64))[0] != 0
    found.append((changed.any(1).sum(), changed.any(0).sum()))
  return np.array(found, np.uint8)


def main(source: str, photograph: str, out: str) -> None:
  """Records all in one file."""
  sys.path.insert(0, str(pathlib.Path(source) / "timm/data"))
  sampler = importlib.import_module("distributed_sampler").RepeatAugSampler
  with Image.open(photograph) as whole:
    rgb = whole.resize((32, 24), Image.Resampling.BICUBIC, (80, 60, 560, 420))
  pictures = {"rgb": rgb, "grey": rgb.convert("L")}
  arrays = {
    "photograph": np.asarray(rgb),
    "photograph_grey": np.asarray(pictures["grey"]),
    "erased": _erased(importlib.import_module("random_erasing")),
    "sizes": np.array(SIZES),
    "epochs": np.array(
      [len(sampler(range(n), num_replicas=1, rank=0)) for n in SIZES]
    ),
  }
  made = _changed(importlib.import_module("auto_augment"), pictures)
  # Several names and levels give the same pixels: each image is stored once.
  for mode, ndim in (("rgb", 3), ("grey", 2)):
    mine = {name: image for name, image in made.items() if image.ndim == ndim}
    stored, places = np.unique([*mine.values()], axis=0, return_inverse=True)
    arrays[f"images_{mode}"], arrays[f"places_{mode}"] = stored, places
    arrays[f"names_{mode}"] = np.array(list(mine))
  np.savez_compressed(pathlib.Path(out) / f"timm_{_VERSION}.npz", **arrays)


if __name__ == "__main__":
  main(*sys.argv[1:])
