"""The photographs that scikit-learn ships, at any size."""

import io
import pathlib

import sklearn
from PIL import Image

_PHOTOS = pathlib.Path(sklearn.__file__).parent / "datasets/images"


def encode(picture, **options):
  file = io.BytesIO()
  picture.save(file, "JPEG", **options)
  return file.getvalue()


def photo(size=(251, 167), mode="RGB", name="china"):
  with Image.open(_PHOTOS / f"{name}.jpg") as opened:
    return opened.resize(size).convert(mode)
