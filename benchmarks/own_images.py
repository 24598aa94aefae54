"""Makes two small tasks of photographs that ship with Python packages.

  pip install scikit-image
  python -m benchmarks.own_images --out PHOTOS

PHOTOS/many holds 200 crops of each of eleven photographs, to train a first
model; PHOTOS/own holds 12 training crops of each of eight others, as few as
one has of one's own. A crop's class is its photograph. Training crops come from
the left 60 % of a photograph, held-out ones from the rest, so none overlap. All
are grey, 32 x 32 pixels, of photographs that were made 256 pixels high: without
colour the classes are not told apart at a glance.
"""

import argparse
import pathlib
import sys

import numpy as np
from PIL import Image

# Photographs of scikit-image's data folder, and scikit-learn's two.
MANY = (
  *("astronaut", "cell", "clock_motion", "coins", "hubble_deep_field", "ihc"),
  *("moon", "motorcycle_left", "page", "retina", "rocket"),
)
OWN = (
  *("brick", "camera", "chelsea", "china", "coffee", "flower", "grass"),
  "gravel",
)
_SIDE, _HEIGHT, _LEFT = 32, 256, 0.6
_VAL_CROPS = 50  # of each class


def main(argv: list[str] | None = None) -> int:
  """Writes the folders; see the docstring of the module."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--out", required=True, type=pathlib.Path)
  args = parser.parse_args(argv)
  folders = photo_folders()
  for name, photos, crops in (("many", MANY, 200), ("own", OWN, 12)):
    for label, photo in enumerate(photos):
      pixels = _read(folders, photo)
      edge = round(pixels.shape[1] * _LEFT)
      parts = {"train": (pixels[:, :edge], crops)}
      parts["val"] = (pixels[:, edge:], _VAL_CROPS)
      for split, (part, count) in parts.items():
        rng = np.random.default_rng((label, split == "val"))
        folder = args.out / name / split / photo
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(count):
          rows, columns = (rng.integers(n - _SIDE + 1) for n in part.shape)
          crop = part[rows : rows + _SIDE, columns : columns + _SIDE]
          Image.fromarray(crop).save(folder / f"{i}.png")
    print(f"{args.out / name}: {len(photos)} classes")
  return 0


def photo_folders() -> list[pathlib.Path]:
  """The folders of photographs of scikit-image and scikit-learn."""
  try:
    import skimage
  except ImportError:
    sys.exit("error: pip install scikit-image, whose photographs are used")
  import sklearn

  return [
    pathlib.Path(skimage.__file__).parent / "data",
    pathlib.Path(sklearn.__file__).parent / "datasets" / "images",
  ]


def _read(folders: list[pathlib.Path], name: str) -> np.ndarray:
  """A photograph in grey, 256 rows."""
  with Image.open(find_photo(folders, name)) as image:
    width = round(image.width * _HEIGHT / image.height)
    return np.asarray(image.convert("L").resize((width, _HEIGHT)))


def find_photo(folders: list[pathlib.Path], name: str) -> pathlib.Path:
  """The file of a photograph."""
  for folder in folders:
    for path in sorted(folder.glob(f"{name}.*")):
      return path
  sys.exit(f"error: no photograph {name} in {', '.join(map(str, folders))}")


if __name__ == "__main__":
  sys.exit(main())
