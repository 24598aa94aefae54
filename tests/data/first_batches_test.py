"""What runs read first, and what identifies it, as recorded.

A change of an order, a draw or a hash would alter resumed runs, or refuse to
resume them. `python -m tests.data.first_batches_test` records the file anew.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
import pyarrow
from absl.testing import absltest
from PIL import Image

from moh_jax.config import Config, DataConfig, EvalConfig, TextDataConfig
from moh_jax.data import packed as packed_lib
from moh_jax.data import pipeline, sequences, stdlib
from moh_jax.data.sources import ImageFolderSource, Selection, make_source
from moh_jax.data.tokenizers import BytesTokenizer
from moh_jax.data.tokens import tokenize
from tests.data import tiny_images, tiny_sets, tiny_text

_RECORDED = pathlib.Path(__file__).parent / "recorded" / "first_batches.json"
_MODEL = tiny_sets.VIT
_CLASSES = ("ant", "bee", "cat")
_ALL_CHANGES = {"auto_augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.5}
_RECIPES = {
  "none": {},
  "shift": {"augment": "shift"},
  "crop_flip": {"augment": "crop_flip"},
  "center_flip": {"augment": "center_flip"},
  "eval_resize": {"augment": "crop_flip", "eval_resize": 20},
  "all changes": {"augment": "crop_flip", **_ALL_CHANGES},
  "other operations": {"auto_augment": "rand-m5-n3-p0.7-mmax8-inc1"},
  "repeats": {"augment": "crop_flip", "repeats": 3, "random_erasing": 0.5},
  "skip": {"augment": "crop_flip", "bad_images": "skip"},
}


def _digest(batches):
  """A hash of the names, dtypes, shapes and values of the first two batches."""
  found = hashlib.sha256()
  for batch in itertools.islice(batches, 2):
    for name, values in sorted(batch.items()):
      values = np.asarray(values)
      found.update(f"{name} {values.dtype} {values.shape}".encode())
      found.update(np.ascontiguousarray(values).tobytes())
  return found.hexdigest()[:16]


def _images(config, *, written=False):
  """Of a source of images or latents."""
  train = make_source(config, "train")
  val = make_source(config, "val", train.class_names)
  stream = tiny_sets.train_stream(config, train)
  found = {
    "train": _digest(stream),
    "val": _digest(tiny_sets.eval_stream(config, val)),
    "classes": list(train.class_names[:4]),
    "identity": {"train": train.identity(), "val": val.identity()},
  }
  stream.seek(700)
  found["train from batch 700"] = _digest(stream)
  stream.close()
  if written:  # by libraries, whose next versions may write other bytes
    for facts in found["identity"].values():
      facts["fingerprint"] = "written"
  return found


def _config(model=_MODEL, **data):
  usual = {"batch_size": 4, "mean": (0.5,) * 3, "std": (0.25,) * 3}
  usual |= {"num_threads": 2, "prefetch": 2}
  sections = {"data": DataConfig(**usual | data)}
  return Config(model=model, eval=EvalConfig(batch_size=4), **sections)


def _write_folders(root):
  """Photographs of some sizes as JPEG and noise as BMP, in class folders."""
  for label, name in enumerate(_CLASSES):
    folder = root / name
    folder.mkdir(parents=True)
    rng = np.random.RandomState(label)
    for i in range(5):
      noise = rng.randint(0, 256, (30 + 4 * i, 45 - i, 3), np.uint8)
      Image.fromarray(noise).save(folder / f"{i}.bmp")
    kind = ("china", "flower")[label % 2]
    for i, size in enumerate(((251, 167), (90, 140))):
      mode = "L" if i == 1 and label == 2 else "RGB"
      picture = tiny_images.photo(size, mode, kind)
      (folder / f"photo{i}.jpg").write_bytes(tiny_images.encode(picture))


def _write_parquet(file, folder, column):
  paths = sorted(folder.glob("*/*"))
  images = [{"bytes": x.read_bytes(), "path": x.name} for x in paths]
  labels = [_CLASSES.index(path.parent.name) for path in paths]
  table = pyarrow.table({"image": images, column: labels})
  tiny_images.write(file, table, 4)


def _of_images(root):
  folders = root / "folders"
  _write_folders(folders)
  of_folders = {"source": "image_folder", "path": str(folders)}
  of_folders["val_share"] = 0.4
  for name, recipe in _RECIPES.items():
    yield f"folders, {name}", _images(_config(**of_folders, **recipe))
  classes = root / "classes.txt"
  classes.write_text("cat a cat\nbee\nant\n")
  listed = _config(**of_folders, class_list=str(classes))
  yield "folders, class list", _images(listed)

  packed = root / "packed"
  for split in ("train", "val"):
    source = ImageFolderSource(str(folders), split, 3, Selection(0.4))
    packed_lib.pack_images(source, packed / split, packed_from="", shard_size=5)
  of_shards = {"source": "array_record", "path": str(packed)}
  config = _config(**of_shards, augment="crop_flip")
  yield "shards", _images(config, written=True)

  tables = root / "tables"
  _write_parquet(tables / "data/train-0.parquet", folders, "fine_label")
  of_tables = {"source": "parquet", "path": str(tables), "val_share": 0.3}
  of_tables["label_column"] = "fine_label"
  yield "tables", _images(_config(**of_tables, augment="shift"), written=True)

  grey = {"mean": (0.3,), "std": (0.37,)}
  model = dataclasses.replace(
    _MODEL, image_size=(8, 8), channels=1, num_classes=10
  )
  digits = _config(model, source="digits", augment="shift", **grey)
  yield "digits", _images(digits)
  yield "random images", _images(_config(source="fake", fake_examples=9))
  config = tiny_sets.dit_config(source="fake", fake_examples=9)
  yield "random latents", _images(config)
  for split, examples in (("train", 10), ("val", 5)):
    tiny_sets.write_latents(root / "latents" / split, examples)
  config = tiny_sets.dit_config(path=root / "latents")
  yield "latents", _images(config, written=True)
  config = tiny_sets.dit_config(
    "pixel", "image_folder", folders, (16, 16), 3, val_share=0.4
  )
  model = dataclasses.replace(config.model, num_classes=3)
  config = dataclasses.replace(config, model=model)
  yield "folders, diffusion", _images(config)


def _text(data, vocab_size=300):
  """Of a source of text."""
  train = sequences.Text(data, vocab_size, "train").stream(3)
  val = sequences.Text(data, vocab_size, "val")
  found = {
    "train": _digest(_batches(train, data)),
    "train from batch 700": _digest(_batches(train, data, 700)),
    "val": _digest([val[i] for i in range(min(len(val), 8))]),
    "val bytes": val.bytes_of(np.arange(len(val))),
    "identity": sequences.Text(data, vocab_size, "train").identity(),
  }
  for facts in found["identity"].values():
    if "fingerprint" in facts:
      facts["fingerprint"] = "written"
  return found


def _batches(dataset, data, start=0):
  stream = pipeline.TrainBatches(dataset, data, range(data.batch_size))
  stream.seek(start)
  yield next(stream)
  yield next(stream)
  stream.close()


def _of_text(root):
  short = {"sequence_length": 16, "batch_size": 4}
  for name, seed in (("web", 0), ("code", 1)):
    for split, shards in (("train", 3), ("val", 1)):
      documents = tiny_text.random_documents(shards, 9, 60, seed=seed)
      tiny_text.write(root / "sets" / name / split, documents)
  data = TextDataConfig(source="tokens", path=str(root / "sets/web"), **short)
  yield "tokens", _text(data)
  joined = dataclasses.replace(data, separate_documents=False)
  yield "tokens, documents not kept apart", _text(joined)
  mixed = dataclasses.replace(
    data, path=str(root / "sets"), mix=("web", "code"), ratios=(70.0, 30.0)
  )
  yield "mixture", _text(mixed)
  yield "random tokens", _text(TextDataConfig(fake_examples=9, **short))

  files = [root / f"texts/{i}.py" for i in range(6)]
  files[0].parent.mkdir()
  for i, file in enumerate(files):
    file.write_text(f"text {i} of seven words and numbers\n" * (i + 1))
  of_library = {"source": "stdlib", "path": str(root / "stdlib")}
  data = TextDataConfig(**of_library, tokenizer="bytes", **short)
  parts = files[:4], files[4:]
  with mock.patch.object(stdlib, "list_sources", return_value=parts):
    yield "standard library", _text(data)

  lines = [json.dumps({"text": f"a text of number {i}"}) for i in range(40)]
  lines.insert(7, "no JSON")
  (root / "lines.jsonl").write_text("\n".join(lines) + "\n")
  sets = tokenize(
    [str(root / "lines.jsonl"), *map(str, files)],
    BytesTokenizer(),
    root / "tokenized",
    held_out=0.25,
    shard_bytes=400,
    on_error="skip",
  )
  for metadata in sets.values():
    for shard in metadata["shards"]:
      del shard["bytes"]
    del metadata["fingerprint"]
  yield "set of files", {"metadata": sets}
  data = TextDataConfig(source="tokens", path=str(root / "tokenized"), **short)
  yield "tokens of files", _text(data)


def _found():
  """Everything that is recorded, by name."""
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    parts = (_of_images(root), _of_text(root))
    return json.loads(json.dumps(dict(itertools.chain(*parts))))


class FirstBatchesTest(absltest.TestCase):
  def test_are_as_recorded(self):
    recorded, found = json.loads(_RECORDED.read_text()), _found()
    self.assertEqual(found.keys(), recorded.keys())
    for name, expected in recorded.items():
      with self.subTest(name):
        self.assertEqual(found[name], expected)


if __name__ == "__main__":
  lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in _found().items()]
  _RECORDED.parent.mkdir(exist_ok=True)
  _RECORDED.write_text("{{\n{}\n}}\n".format(",\n".join(lines)))
