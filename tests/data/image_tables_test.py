"""Images in Parquet and Arrow files, written as the library `datasets` does."""

import dataclasses
import io
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.config import Config, DataConfig
from moh_jax.data import image_shards, image_tables, infer, sources
from moh_jax.data.image_folders import Selection
from moh_jax.data.image_tables import ParquetSource
from tests.data.folder import FolderTest
from tests.data.sources_test import _MODEL

CLASSES = ("ant", "bee", "cat")
_IMAGE = {"_type": "Image"}
_LABEL = {"_type": "ClassLabel", "names": list(CLASSES)}


def png(seed, size=(6, 5)):
  pixels = np.random.RandomState(seed).randint(0, 256, (*size, 3), np.uint8)
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, "PNG")
  return file.getvalue(), pixels


def make_table(labels, first=0, features=None, image="image", label="label"):
  """Rows `first`, `first` + 1, ... with the pixels of `png`."""
  rows = [
    {"bytes": png(first + i)[0], "path": f"{first + i}.png"}
    for i in range(len(labels))
  ]
  struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
  table = pa.table({image: pa.array(rows, struct), label: labels})
  if features is None:
    features = {image: _IMAGE, label: _LABEL}
  if not features:
    return table
  notes = json.dumps({"info": {"features": features}})
  return table.replace_schema_metadata({"huggingface": notes})


def write(path, table, group=2):
  path.parent.mkdir(parents=True, exist_ok=True)
  if path.suffix == ".parquet":
    pq.write_table(table, path, row_group_size=group)
    return
  with pa.OSFile(str(path), "wb") as file:
    with pa.ipc.new_stream(file, table.schema) as stream:
      for batch in table.to_batches(max_chunksize=group):
        stream.write_batch(batch)


class _TempDirTest(FolderTest):
  def _open(self, split="train", **options):
    return ParquetSource(str(self.root), split, 3, Selection(**options))


class SplitsTest(_TempDirTest):
  @parameterized.parameters(
    (("data/train-0-of-1.parquet", "data/validation-0-of-1.parquet"), 1, 1),
    (("train/0.parquet", "train/1.parquet", "test/0.parquet"), 2, 1),
    (("a_train.parquet", "a_test.parquet", "a_val.parquet"), 1, 1),
    (("0.parquet", "training_notes/1.parquet"), None, None),
    (("0.parquet", "1.arrow"), 2, 0),
    (("constrain/0.parquet", ".cache/test.parquet"), 1, 0),
    (("Train-00000.parquet", "dev-00000.parquet"), 1, 1),
    (("default/train/0.parquet", "default/test/0.parquet"), 1, 1),
  )
  def test_names_tell_the_split(self, names, train, val):
    for name in names:
      write(self.root / name, make_table([0]))
    if train is None:
      with self.assertRaisesRegex(ValueError, "'0.parquet' names no split"):
        image_tables.find_tables(self.root)
      return
    found = image_tables.find_tables(self.root)
    counts = {split: len(files) for split, files in found.items()}
    expected = {"train": train, "val": val}
    self.assertEqual(counts, {k: n for k, n in expected.items() if n})
    self.assertTrue(image_tables.is_tables(self.root))

  @parameterized.parameters(
    (".cache/x.arrow", False),
    ("metadata.parquet", False),
    ("train/metadata.parquet", False),
    ("data/train-0.parquet", True),
  )
  def test_tables_beside_images(self, name, expected):
    below = "train/" if name.startswith("train") else ""
    for folder in ("ant", "bee"):
      path = self.root / f"{below}{folder}/0.png"
      path.parent.mkdir(parents=True)
      path.write_bytes(png(0)[0])
    write(self.root / name, make_table([0]))
    self.assertEqual(image_tables.is_tables(self.root), expected)
    (train,) = image_shards.open_splits(str(self.root), None).values()
    self.assertEqual(train.class_names, CLASSES if expected else ("ant", "bee"))


class RowsTest(_TempDirTest):
  @parameterized.product(
    suffix=("parquet", "arrow"), kind=("struct", "binary", "large_binary")
  )
  def test_pixels_and_labels_of_every_row(self, suffix, kind):
    first = 0
    for number, labels in enumerate(([2, 0, 1], [1], [0, 0, 0, 2])):
      table = make_table(labels, first)
      if kind != "struct":
        column = table.column("image").combine_chunks().field("bytes")
        table = table.set_column(
          0, "image", column.cast(getattr(pa, kind)())
        ).replace_schema_metadata(table.schema.metadata)
      write(self.root / f"train-{number}.{suffix}", table)
      first += len(labels)
    source = pickle.loads(pickle.dumps(self._open()))
    self.assertEqual(source.class_names, CLASSES)
    labels = [2, 0, 1, 1, 0, 0, 0, 2]
    self.assertLen(source, 8)
    for i in (7, 3, 0, 5, 4, 1, 2, 6):
      example = source[i]
      np.testing.assert_array_equal(example["image"], png(i)[1])
      self.assertEqual(example["label"], labels[i])
      self.assertEqual(example["label"].dtype, np.int32)
    self.assertEqual(source.name(4), f"train-2.{suffix}:1")

  def test_labels_follow_the_models_classes(self):
    write(self.root / "0.parquet", make_table([0, 2]))
    names = ("cat", "dog", "bee", "ant")
    source = self._open(class_names=names)
    self.assertEqual(source.class_names, names)
    self.assertEqual([int(source[i]["label"]) for i in range(2)], [3, 0])
    with self.assertRaisesRegex(ValueError, "'cat' is none of the model's 2"):
      self._open(class_names=("ant", "bee"))

  @parameterized.parameters("string", "large_string")
  def test_labels_of_text_are_sorted(self, kind):
    labels = pa.array(["dog", "ant", "dog"], getattr(pa, kind)())
    table = make_table(labels, features={})
    write(self.root / "0.parquet", table)
    source = self._open()
    self.assertEqual(source.class_names, ("ant", "dog"))
    self.assertEqual([int(source[i]["label"]) for i in range(3)], [1, 0, 1])


class IdentityTest(_TempDirTest):
  def test_changes_with_rows_labels_and_content(self):
    found = []
    for labels, first in (
      ([0, 1], 0),
      ([0, 0], 0),
      ([0, 1], 5),
      ([0, 1, 1], 0),
    ):
      write(self.root / "0.parquet", make_table(labels, first))
      found.append(str(sorted(self._open().identity().items())))
    self.assertLen(set(found), 4)
    write(self.root / "0.parquet", make_table([0, 1]))
    self.assertEqual(str(sorted(self._open().identity().items())), found[0])


class BadInputTest(_TempDirTest):
  def test_row_without_an_image_is_named(self):
    table = make_table([0, 1, 2])
    rows = table.column("image").to_pylist()
    rows[1]["bytes"] = None
    rows[2]["bytes"] = b"no image"
    column = pa.array(rows, table.schema.field("image").type)
    table = table.set_column(0, "image", column)
    write(self.root / "0.parquet", table)
    source = self._open()
    with self.assertRaisesRegex(ValueError, r"0.parquet:2: the row has no b"):
      source[1]
    with self.assertRaisesRegex(ValueError, r"0.parquet:3: not an image"):
      source[2]
    model = {"model": _MODEL}
    data = DataConfig(source="parquet", path=str(self.root), bad_images="check")
    config = infer.resolve(Config(**model | {"model": _model(3)}, data=data))
    with self.assertRaisesRegex(ValueError, "2 of 3 images cannot be used"):
      sources.make_source(config, "train")

  @parameterized.parameters(
    ([0, -1], "label -1, must be at least 0"),
    ([0, 3], "label 3, must be .* and below 3"),
    ([0, None], "1 rows without a label"),
    ([0.5, 1.0], "is of double"),
  )
  def test_labels_without_a_class(self, labels, message):
    write(self.root / "0.parquet", make_table(labels))
    with self.assertRaisesRegex(ValueError, message):
      self._open()

  def test_columns_are_chosen_or_named(self):
    features = {"image": _IMAGE, "fine": _LABEL, "coarse": _LABEL}
    table = make_table([0, 1], features=features, label="fine")
    table = table.append_column("coarse", pa.array([1, 1]))
    write(self.root / "0.parquet", table)
    with self.assertRaisesRegex(ValueError, r"\['fine', 'coarse'\]; choose"):
      self._open()
    with self.assertRaisesRegex(ValueError, "label_column='nope' must be one"):
      self._open(label_column="nope")
    self.assertEqual(self._open(label_column="coarse")[0]["label"], 1)

  def test_files_must_have_the_same_columns(self):
    write(self.root / "0.parquet", make_table([0]))
    write(self.root / "1.parquet", make_table([0], label="other"))
    with self.assertRaisesRegex(ValueError, "1.parquet: column 'label' m"):
      self._open()

  @parameterized.parameters("parquet", "arrow")
  def test_damaged_file_is_named(self, suffix):
    path = self.root / f"0.{suffix}"
    path.write_bytes(b"PAR1 and no more")
    with self.assertRaisesRegex(ValueError, f"0.{suffix}: damaged or no "):
      self._open()


def _model(classes):
  return dataclasses.replace(_MODEL, num_classes=classes)


class MakeSourceTest(_TempDirTest):
  def test_evaluation_finds_what_a_folder_holds(self):
    config = Config(model=_MODEL)
    for name, source in (("0.parquet", "parquet"), ("0.png", "image_folder")):
      folder = self.root / source
      folder.mkdir()
      (folder / name).touch()
      found = infer.data_at(config, str(folder))
      self.assertEqual(found["source"], source)
      self.assertEqual(found["val_share"], 1.0)


if __name__ == "__main__":
  absltest.main()
