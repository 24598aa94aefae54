"""Makes tasks of photographs that ship with Python packages.

  pip install scikit-image
  python -m benchmarks.photos --out PHOTOS            # small tasks
  python -m benchmarks.photos --out PHOTOS --imagenet # files like ImageNet's

PHOTOS/many holds 200 crops of each of eleven photographs, to train a first
model; PHOTOS/own holds 12 training crops of each of eight others, as few as
one has of one's own. A crop's class is its photograph. Training crops come from
the left 60 % of a photograph, held-out ones from the rest, so none overlap. All
are grey, 32 x 32 pixels, of photographs that were made 256 pixels high: without
colour the classes are not told apart at a glance.

With --imagenet PHOTOS/train and PHOTOS/val hold JPEG files of 500 x 375 pixels,
the usual size in ImageNet, of eight photographs. The training set of ImageNet
has 1,281,167 files in 138 GB (image-net.org), 108 KB each; the quality here is
chosen for files of about that size, since most of the time of decoding depends
on the bytes.
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
IMAGENET = (
  *("astronaut", "chelsea", "china", "coffee", "flower", "ihc"),
  *("motorcycle_left", "rocket"),
)
_SIDE, _HEIGHT, _LEFT = 32, 256, 0.6
_VAL_CROPS = 50  # of each class
_COLUMNS, _ROWS, _QUALITY, _PER_CLASS = 500, 375, 98, 8


def main(argv: list[str] | None = None) -> int:
  """Writes the folders; see the docstring of the module."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--out", required=True, type=pathlib.Path)
  parser.add_argument("--imagenet", action="store_true")
  args = parser.parse_args(argv)
  if args.imagenet:
    for label, photo in enumerate(IMAGENET):
      _write_large(args.out, label, photo)
  else:
    for name, photos, crops in (("many", MANY, 200), ("own", OWN, 12)):
      for label, photo in enumerate(photos):
        _write_small(args.out / name, label, photo, crops)
  sizes = [path.stat().st_size for path in args.out.rglob("*.??g")]
  print(f"{args.out}: {len(sizes)} files of {np.mean(sizes) / 1e3:.0f} KB")
  return 0


def _write_small(root: pathlib.Path, label: int, photo: str, crops: int):
  """Grey crops of a photograph of 256 rows."""
  picture = _open(photo).convert("L")
  width = round(picture.width * _HEIGHT / picture.height)
  pixels = np.asarray(picture.resize((width, _HEIGHT)))
  edge = round(width * _LEFT)
  for split, part, count in (
    ("train", pixels[:, :edge], crops),
    ("val", pixels[:, edge:], _VAL_CROPS),
  ):
    rng, folder = _begin(root, label, split, photo)
    for i in range(count):
      rows, columns = (rng.integers(n - _SIDE + 1) for n in part.shape)
      crop = part[rows : rows + _SIDE, columns : columns + _SIDE]
      Image.fromarray(crop).save(folder / f"{i}.png")


def _write_large(root: pathlib.Path, label: int, photo: str):
  """Crops of 60 to 100 % of the largest part of ImageNet's usual shape."""
  picture = _open(photo).convert("RGB")
  largest = min(picture.width / _COLUMNS, picture.height / _ROWS)
  for split in ("train", "val"):
    rng, folder = _begin(root, label, split, photo)
    for i in range(_PER_CLASS):
      scale = largest * rng.uniform(0.6, 1)
      width, height = int(_COLUMNS * scale), int(_ROWS * scale)
      left = int(rng.integers(picture.width - width + 1))
      top = int(rng.integers(picture.height - height + 1))
      box = left, top, left + width, top + height
      size = _COLUMNS, _ROWS
      crop = picture.resize(size, Image.Resampling.LANCZOS, box=box)
      crop.save(folder / f"{i}.jpg", quality=_QUALITY, subsampling="4:2:0")


def _begin(root: pathlib.Path, label: int, split: str, photo: str):
  """Random numbers and the folder of a class."""
  folder = root / split / photo
  folder.mkdir(parents=True, exist_ok=True)
  return np.random.default_rng((label, split == "val")), folder


def _open(photo: str) -> Image.Image:
  """A photograph of scikit-image or scikit-learn."""
  try:
    import skimage
  except ImportError:
    sys.exit("error: pip install scikit-image, whose photographs are used")
  import sklearn

  for module, inside in ((skimage, "data"), (sklearn, "datasets/images")):
    folder = pathlib.Path(module.__file__).parent / inside
    for path in sorted(folder.glob(f"{photo}.*")):
      return Image.open(path)
  sys.exit(f"error: no photograph {photo} in scikit-image and scikit-learn")


if __name__ == "__main__":
  sys.exit(main())
