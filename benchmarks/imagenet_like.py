"""Makes a folder of JPEG files like ImageNet's of photographs from packages.

  pip install scikit-image
  python -m benchmarks.imagenet_like --out PHOTOS

PHOTOS/train and PHOTOS/val hold 500 x 375 pixels, the usual size in ImageNet,
of eight photographs, which are the classes. The training set of ImageNet has
1,281,167 files in 138 GB (image-net.org), 108 KB each; the quality here is
chosen for files of about that size, since most of the time of decoding depends
on the bytes.
"""

import argparse
import pathlib
import sys

import numpy as np
from PIL import Image

from benchmarks.own_images import find_photo, photo_folders

PHOTOS = (
  *("astronaut", "chelsea", "china", "coffee", "flower", "ihc"),
  *("motorcycle_left", "rocket"),
)
_COLUMNS, _ROWS, _QUALITY = 500, 375, 98


def main(argv: list[str] | None = None) -> int:
  """Writes the folders; see the docstring of the module."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--out", required=True, type=pathlib.Path)
  parser.add_argument("--per-class", type=int, default=8)
  args = parser.parse_args(argv)
  folders, sizes = photo_folders(), []
  for label, photo in enumerate(PHOTOS):
    with Image.open(find_photo(folders, photo)) as opened:
      picture = opened.convert("RGB")
    for split in ("train", "val"):
      rng = np.random.default_rng((label, split == "val"))
      folder = args.out / split / photo
      folder.mkdir(parents=True, exist_ok=True)
      for i in range(args.per_class):
        path = folder / f"{i}.jpg"
        _crop(picture, rng).save(path, quality=_QUALITY, subsampling="4:2:0")
        sizes.append(path.stat().st_size)
  print(f"{args.out}: {len(sizes)} files of {np.mean(sizes) / 1e3:.0f} KB")
  return 0


def _crop(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
  """A part of 60 to 100 % of the largest one with this shape."""
  largest = min(picture.width / _COLUMNS, picture.height / _ROWS)
  scale = largest * rng.uniform(0.6, 1)
  width, height = int(_COLUMNS * scale), int(_ROWS * scale)
  left = int(rng.integers(picture.width - width + 1))
  top = int(rng.integers(picture.height - height + 1))
  box = left, top, left + width, top + height
  return picture.resize((_COLUMNS, _ROWS), Image.Resampling.LANCZOS, box=box)


if __name__ == "__main__":
  sys.exit(main())
