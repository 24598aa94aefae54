"""Files of small images, in folders and in tables."""

import io
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sklearn
from PIL import Image

CLASSES = ("ant", "bee", "cat")
IMAGE = {"_type": "Image"}
LABEL = {"_type": "ClassLabel", "names": list(CLASSES)}
_PHOTOS = pathlib.Path(sklearn.__file__).parent / "datasets/images"


def encode(picture, kind="JPEG", **options):
  file = io.BytesIO()
  picture.save(file, kind, **options)
  return file.getvalue()


def photo(size=(251, 167), mode="RGB", name="china"):
  """A photograph that scikit-learn ships."""
  with Image.open(_PHOTOS / f"{name}.jpg") as opened:
    return opened.resize(size).convert(mode)


def pixels(seed=0, size=(6, 5)):
  return np.random.RandomState(seed).randint(0, 256, (*size, 3), np.uint8)


def put(root, *names, size=(6, 5)):
  """Writes image i with the pixels of seed i; returns the paths."""
  paths = [root / name for name in names]
  for seed, path in enumerate(paths):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, size)).save(path)
  return paths


def make_table(labels, first=0, features=None, image="image", label="label"):
  """Rows with the pixels of the seeds `first`, `first` + 1, ..."""
  seeds = range(first, first + len(labels))
  rows = [
    {"bytes": encode(Image.fromarray(pixels(i)), "PNG"), "path": f"{i}.png"}
    for i in seeds
  ]
  struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
  table = pa.table({image: pa.array(rows, struct), label: labels})
  if features is None:
    features = {image: IMAGE, label: LABEL}
  notes = json.dumps({"info": {"features": features}})
  return table.replace_schema_metadata({"huggingface": notes})


def write(path, table, group=2):
  path.parent.mkdir(parents=True, exist_ok=True)
  if path.suffix == ".parquet":
    pq.write_table(table, path, row_group_size=group)
    return
  with pa.OSFile(str(path), "wb") as file:
    with pa.ipc.new_stream(file, table.schema) as stream:
      stream.write_table(table, max_chunksize=group)
