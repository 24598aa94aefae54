"""Records what timm's augmentations make of a photograph.

Needs torch, Pillow below 12, whose `ImageOps.posterize` takes 0 bits, and
timm's wheel, unpacked, but nothing that timm imports elsewhere:

  python tests/tools/record_augment.py TIMM_FOLDER PHOTOGRAPH tests/goldens

PHOTOGRAPH is scikit-learn's china.jpg, of which a part is made smaller.
"""

import importlib.util
import pathlib
import sys
from unittest import mock

import numpy as np
from PIL import Image

LEVELS = (0, 3, 9, 10)
SIZES = (10, 255, 256, 300, 1_281_167)  # of sets of images
_VERSION = "1.0.31"


def _load(folder: pathlib.Path, name: str):
  spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _operations(timm, pictures: dict, fills: dict) -> dict[str, np.ndarray]:
  found = {}
  names = (*timm._RAND_TRANSFORMS, *timm._RAND_INCREASING_TRANSFORMS)
  for name in dict.fromkeys(names):
    for mode, picture in pictures.items():
      for level in LEVELS:
        hparams = {"img_mean": fills[mode], "interpolation": 3}
        operation = timm.AugmentOp(name, 1.0, level, hparams)
        for sign, number in (("+", 0.4), ("-", 0.6)):
          with mock.patch.object(timm.random, "random", return_value=number):
            changed = np.asarray(operation(picture))
          found[f"{name}{sign}{level}/{mode}"] = changed
  return found


def _three(timm, pictures: dict) -> dict[str, np.ndarray]:
  found = {}
  names = ("solarize", "grey", "blur")
  for name, policy in zip(names, timm.auto_augment_policy_3a({})):
    for mode, picture in pictures.items():
      with mock.patch.object(timm.random, "uniform", return_value=1.3):
        found[f"3a_{name}/{mode}"] = np.asarray(policy[0](picture))
  return found


def _erased(timm) -> np.ndarray:
  """[20000, 2] uint8: rows and columns of erased boxes, 0 where none is."""
  import torch

  erasing = timm.RandomErasing(0.25, mode="pixel", device="cpu")
  timm.random.seed(0)
  found = []
  for _ in range(20000):
    image = torch.zeros(1, 48, 64)
    changed = erasing(image)[0] != 0
    found.append((changed.any(1).sum(), changed.any(0).sum()))
  return np.array(found, np.uint8)


def _epochs(timm) -> np.ndarray:
  return np.array(
    [
      len(timm.RepeatAugSampler(range(size), num_replicas=1, rank=0))
      for size in SIZES
    ]
  )


def main(source: str, photograph: str, out: str) -> None:
  folder = pathlib.Path(source) / "timm" / "data"
  with Image.open(photograph) as whole:
    rgb = whole.resize((32, 24), Image.Resampling.BICUBIC, (80, 60, 560, 420))
  pictures = {"rgb": rgb, "grey": rgb.convert("L")}
  fills = {"rgb": (124, 116, 104), "grey": 77}
  policies = _load(folder, "auto_augment")
  arrays = {
    "photograph": np.asarray(rgb),
    "photograph_grey": np.asarray(pictures["grey"]),
    "erased": _erased(_load(folder, "random_erasing")),
    "sizes": np.array(SIZES),
    "epochs": _epochs(_load(folder, "distributed_sampler")),
  }
  made = {
    **_operations(policies, pictures, fills),
    **_three(policies, pictures),
  }
  # Several names and levels give the same pixels: each image is stored once.
  stored, places = [], {}
  for name, image in made.items():
    same = [i for i, other in enumerate(stored) if np.array_equal(image, other)]
    places[name] = same[0] if same else len(stored)
    if not same:
      stored.append(image)
  for mode, ndim in (("rgb", 3), ("grey", 2)):
    chosen = [i for i, image in enumerate(stored) if image.ndim == ndim]
    arrays[f"images_{mode}"] = np.stack([stored[i] for i in chosen])
    mine = {name: i for name, i in places.items() if i in chosen}
    arrays[f"names_{mode}"] = np.array(list(mine))
    arrays[f"places_{mode}"] = np.array(
      [chosen.index(i) for i in mine.values()]
    )
  np.savez_compressed(pathlib.Path(out) / f"timm_{_VERSION}.npz", **arrays)


if __name__ == "__main__":
  main(*sys.argv[1:])
