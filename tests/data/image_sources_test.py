"""Images in folders, tables and shards: what is found, and what is refused."""

import dataclasses
import pickle
from unittest import mock

import numpy as np
import pyarrow as pa
from absl.testing import parameterized
from PIL import Image

from moh_jax.config import Config, DataConfig, apply_overrides
from moh_jax.config.registry import SPLITS
from moh_jax.data import infer, packed, sources, tables
from moh_jax.data.decode import describe_image
from moh_jax.data.sources import CheckedSource, ImageFolderSource, Selection
from moh_jax.data.tables import TableSource
from tests.data import tiny_images, tiny_sets
from tests.data.tiny_images import CLASSES, make_table, pixels, put, write
from tests.folders import FolderTest

MODEL = dataclasses.replace(tiny_sets.VIT, image_size=(8, 12), num_classes=2)


class _ImagesTest(FolderTest):
  def _folders(self, split="train", **selection):
    return ImageFolderSource(str(self.root), split, 3, Selection(**selection))

  def _tables(self, split="train", **selection):
    return TableSource(str(self.root), split, 3, Selection(**selection))

  def _names(self, split, share=0.25):
    source = self._folders(split, val_share=share)
    return {source.name(i) for i in range(len(source))}

  def _config(self, source="image_folder", **data):
    data = DataConfig(source=source, path=str(self.root), **data)
    return Config(model=MODEL, data=data)

  def _labels(self, source):
    return [int(source[i]["label"]) for i in range(len(source))]


class FoldersTest(_ImagesTest):
  def test_what_is_hidden_or_no_image_is_left_out(self):
    names = ("a/1.png", "a/2.HEIC", "a/labels.txt", "b/1.JPG", "3.png")
    for name in (*names, "a/._1.png", ".cache/2.png"):
      (self.root / name).parent.mkdir(exist_ok=True)
      (self.root / name).touch()
    (self.root / "a/below").mkdir()
    classes, files = sources.list_images(self.root)
    self.assertEqual(classes, ("a", "b"))
    self.assertEqual(files, [("a/1.png", 0), ("b/1.JPG", 1)])
    _, files = sources.list_images(self.root / "b")  # is one class
    self.assertEqual(files, [("1.JPG", 0)])
    found = sources.find_images([str(self.root), "x.raw"])
    names = ("3.png", "a/1.png", "b/1.JPG")
    self.assertEqual(found, [*(str(self.root / n) for n in names), "x.raw"])

  def test_folders_named_by_numbers_are_labels(self):
    put(self.root, *(f"{i}/1.png" for i in range(12)))
    names = tuple(f"n{i:02}" for i in range(12))
    for wanted in (names, ()):
      source = self._folders(class_names=wanted)
      self.assertEqual(source.class_names, wanted or tuple(map(str, range(12))))
      self.assertEqual(self._labels(source), list(range(12)))
    with self.assertRaisesRegex(ValueError, "'11' is none of 11 classes"):
      self._folders(class_names=names[:11])

  def test_share_is_that_of_each_class_and_further_images_move_few(self):
    for prefix in ("", "train/"):
      names = [f"{prefix}{c}/{i}.png" for c in CLASSES for i in range(40)]
      put(self.root, *names)
      train, val = self._names("train"), self._names("val")
      self.assertEqual(train & val, set())
      self.assertLen(train | val, 120)
      self.assertEqual(
        {sum(x.startswith(c) for x in val) for c in CLASSES}, {10}
      )
    put(self.root, *(f"train/{c}/{i}.png" for c in "xa" for i in range(40, 60)))
    self.assertLen(self._names("val"), 40)
    self.assertLess(len(val - self._names("val")), 4)

  def test_a_share_of_few_images_is_as_near_as_whole_ones_allow(self):
    put(self.root, *(f"{c}/{i}.png" for c in CLASSES for i in range(5)))
    with self.assertLogs("moh_jax", "WARNING") as logs:
      self.assertLen(self._names("val", 0.14), 2)
    self.assertIn("only 2 images are held out", logs.output[0])

  def test_identity_changes_with_names_and_sizes(self):
    first, second = put(self.root, "a/1.png", "b/2.png")
    found = [self._folders().identity()]
    second.write_bytes(second.read_bytes() + b"more")
    found.append(self._folders().identity())
    first.rename(self.root / "a/3.png")
    found.append(self._folders().identity())
    self.assertLen({str(one) for one in found}, 3)
    self.assertEqual(self._folders().identity(), found[-1])

  @parameterized.parameters(
    ("train", {}, "dog holds no image"),
    ("train", {"val_share": 1.0}, "val_share=1.0 .* of a class"),
    ("val", {"val_share": 1e-6}, "val_share=1e-06 .* no image"),
    ("val", {}, "no directory 'val'.*or data.val_share above 0"),
    ("train", {"class_names": ("cow",)}, "'ant' is none of 1 classes .cow"),
  )
  def test_refused(self, split, selection, message):
    put(self.root, "ant/1.png", "bee/1.png")
    if "holds no" in message:
      (self.root / "dog").mkdir()
    with self.assertRaisesRegex((ValueError, FileNotFoundError), message):
      self._folders(split, **selection)

  def test_splits_of_other_names_are_no_classes(self):
    put(self.root, "test/1.png", "validation/2.png")
    with self.assertRaisesRegex(ValueError, "'validation'. are splits"):
      self._folders()

  @parameterized.parameters(
    ("n02 tench, Tinca tinca\n\n  n01\nn03\tbee\n", "n02 n01 n03"),
    ("n02 a\nn01\nn02 x\n", "one of 3 classes .n02.* is there twice"),
    ("n02\nant\n", "'n01' is none of 2 classes .n02, ant."),
  )
  def test_list_names_the_classes(self, content, expected):
    file = self.root / "synsets.txt"
    file.write_text(content)
    listed = sources.listed_classes(file)
    if " is " in expected:
      with self.assertRaisesRegex(ValueError, expected):
        sources.match_classes(("n01", "n02"), listed, "x")
    else:
      matched = sources.match_classes(("n01", "n02"), listed, "x")
      self.assertEqual(matched, (tuple(expected.split()), [1, 0]))


class BadImagesTest(_ImagesTest):
  @parameterized.parameters("train", "val")
  def test_are_named_before_the_first_step(self, split):
    for part in SPLITS:
      put(self.root / part, *(f"{c}/{i}.png" for c in "ab" for i in range(2)))
      (self.root / part / "a/0.png").write_text("no image")
      (self.root / part / "b/2.png").symlink_to(self.root / "gone.png")
    check = "check" if split == "train" else "skip"  # for training alone
    todo = "'skip' trains" if split == "train" else "held-out images must all"
    with self.assertRaisesRegex(
      ValueError, f"2 of 5 images .*{todo} .*a/0.png: not an .*; .*b/2.png"
    ):
      sources.make_source(self._config(bad_images=check), split)
    train = sources.make_source(self._config(bad_images="skip"), "train")
    np.testing.assert_array_equal(train[0]["image"], pixels(1))

  def test_next_good_image_takes_the_place_of_a_bad_one(self):
    paths = put(self.root, *(f"{i}.png" for i in range(6)))
    for place in (1, 2, 5):
      paths[place].write_text("no image")
    source = CheckedSource(self._folders(), skip=True)
    for _ in range(2):
      for i, seed in enumerate((0, 3, 3, 3, 4, 0)):
        np.testing.assert_array_equal(source[i]["image"], pixels(seed))
    for path in paths:
      path.write_text("no image")
    with self.assertRaisesRegex(ValueError, "none of the 6 images can be"):
      source[0]

  def test_images_that_do_not_fit_the_model(self):
    put(self.root, "train/ant/1.png")
    with self.assertRaisesRegex(
      ValueError, "1 classes .ant., .* must be model.num_classes=2"
    ):
      sources.make_source(self._config(), "train")

  def test_a_label_without_a_class_is_named(self):
    source = mock.MagicMock(class_names=("ant",), __len__=lambda _: 1)
    source.__getitem__.return_value = {"label": 3}
    source.name.return_value = "1.png"
    with self.assertRaisesRegex(
      ValueError, r"1.png: label=3 must be in \[0, 0"
    ):
      CheckedSource(source, skip=False)[0]


class PackedTest(_ImagesTest):
  def _pack(self, out, **options):
    source = ImageFolderSource(str(self.root / "images"), "train", 3)
    return packed.pack_images(
      source, self.root / out, packed_from="", shard_size=4, **options
    )

  def test_larger_images_become_smaller_and_bad_ones_end_or_are_left_out(self):
    ant, cat = (self.root / f"images/{name}" for name in ("ant", "cat"))
    put(ant, "3.png", "4.png", size=(11, 18))
    put(cat, "0.png", "1.png", size=(9, 20))
    Image.new("L", (40, 30)).save(ant / "0.png")
    Image.new("RGBA", (20, 44)).save(ant / "1.png")
    self._pack("packed/val", shorter_side=10)
    found = packed.PackedImages(str(self.root / "packed"), "val", 3)
    described = [describe_image(found.read(i).content, "") for i in range(3)]
    sizes = [((10, 13), True), ((22, 10), False), ((10, 16), False)]
    self.assertEqual(described, sizes)
    self.assertTrue(found.read(0).content.startswith(b"\xff\xd8"))
    # Of 9 rows: unchanged.
    self.assertEqual(found.read(4).content, (cat / "0.png").read_bytes())
    (ant / "1.png").write_text("no image")
    (cat / "0.png").unlink()
    (cat / "0.png").symlink_to(self.root / "gone.png")
    with self.assertRaisesRegex(ValueError, "ant/1.png: not an image"):
      self._pack("out", shorter_side=4)
    metadata = self._pack("out", shorter_side=4, bad_images="skip")
    self.assertEqual((metadata["examples"], metadata["skipped"]), (4, 2))
    listed = (self.root / "out/skipped.txt").read_text()
    self.assertRegex(listed, "ant/1.png: not an image.*\n.*cat/0.png")

  @parameterized.parameters(
    ("diffusion", {"latent_scale": 0.13}, "on.latent_scale: 0.13 here, 0.5 t"),
    ("model", {"input_size": (8, 8)},
     r"\(4, 4, 2\), the model takes \(8, 8, 2\)"),
  )  # fmt: skip
  def test_latents_of_another_model(self, section, values, message):
    tiny_sets.write_latents(self.root / "train")
    config = tiny_sets.dit_config(path=self.root)
    config = apply_overrides(config, section, **values)
    with self.assertRaisesRegex(ValueError, message):
      sources.make_source(config, "train")


class TablesTest(_ImagesTest):
  @parameterized.parameters(
    ("data/train-0-of-1.parquet data/validation-0-of-1.parquet", [1, 1]),
    ("train/0.parquet default/Train/1.parquet test/0.parquet", [2, 1]),
    ("a_train.parquet a_test.parquet a_val.parquet", [1, 1]),
    ("0.parquet 1.arrow cache-2.arrow", [2]),
    ("constrain/0.parquet .cache/test.parquet", [1]),
    ("0.parquet training_notes/1.parquet", None),
  )
  def test_names_tell_the_split(self, names, counts):
    for path in map(self.root.joinpath, names.split()):
      path.parent.mkdir(parents=True, exist_ok=True)
      path.touch()
    if counts is None:
      with self.assertRaisesRegex(ValueError, "'0.parquet' names no split"):
        tables.find_tables(self.root)
    else:
      found = tables.find_tables(self.root)
      self.assertEqual(list(found), ["train", "val"][: len(counts)])
      self.assertEqual(list(map(len, found.values())), counts)

  @parameterized.parameters(
    ("metadata.parquet", False), ("data/train-0.parquet", True)
  )
  def test_commands_tell_what_a_folder_holds(self, name, of_tables):
    write(self.root / name, make_table([0]))
    put(self.root, "ant/0.png", "bee/0.png")
    (train,) = packed.open_splits(str(self.root), None).values()
    self.assertEqual(train.class_names, CLASSES[: 3 if of_tables else 2])
    found = infer.data_at(Config(model=MODEL), str(self.root))
    self.assertEqual(found["source"] == "parquet", of_tables)
    self.assertEqual(found["val_share"], 1.0)

  @parameterized.product(
    suffix=("parquet", "arrow"), kind=("struct", "large_binary")
  )
  def test_pixels_and_labels_of_every_row(self, suffix, kind):
    first = 0
    for number, labels in enumerate(([2, 0, 1], [1], [0, 0, 0, 2])):
      features = {"label": tiny_images.LABEL, "boxes": [tiny_images.LABEL]}
      image = {"image": tiny_images.IMAGE}
      table = make_table(labels, first, features | image)
      if kind != "struct":
        column = table.column("image").combine_chunks().field("bytes")
        table = make_table(labels, first, features)
        table = table.set_column(0, "image", column.cast(pa.large_binary()))
      write(self.root / f"train-{number}.{suffix}", table)
      first += len(labels)
    source = pickle.loads(pickle.dumps(self._tables()))
    self.assertEqual(source.class_names, CLASSES)
    labels = [2, 0, 1, 1, 0, 0, 0, 2]
    self.assertLen(source, 8)
    for i in (7, 3, 0, 5, 4, 1, 2, 6):
      np.testing.assert_array_equal(source[i]["image"], pixels(i))
      self.assertEqual(source[i]["label"], labels[i])
    self.assertEqual(source.name(4), f"train-2.{suffix}:1")

  @parameterized.parameters(
    ([0, 2], None, ("cat", "dog", "bee", "ant"), [3, 0]),
    (["dog", "ant", "dog"], {}, (), [1, 0, 1]),
  )
  def test_labels_follow_the_classes(self, rows, features, names, labels):
    write(self.root / "0.parquet", make_table(rows, features=features))
    source = self._tables(class_names=names)
    self.assertEqual(self._labels(source), labels)
    self.assertEqual(source.class_names, names or ("ant", "dog"))

  def test_identity_changes_with_rows_and_labels(self):
    found = []
    for labels in ([0, 1], [0, 0], [0, 1, 1], [0, 1]):
      write(self.root / "0.parquet", make_table(labels))
      found.append(str(self._tables().identity()))
    self.assertLen(set(found), 3)
    self.assertEqual(found[-1], found[0])

  def test_row_without_an_image_is_named(self):
    table = make_table([0, 1, 2])
    rows = table.column("image").to_pylist()
    rows[1]["bytes"], rows[2]["bytes"] = None, b"no image"
    write(self.root / "0.parquet", table.set_column(0, "image", [rows]))
    source = self._tables()
    for place, message in ((1, "2: the row has no b"), (2, "3: not an image")):
      with self.assertRaisesRegex(ValueError, f"0.parquet:{message}"):
        source[place]

  @parameterized.parameters(
    ([0, -1], {}, r"below 3, in every row: \[ 0 -1\]"),
    ([0, 3], {}, "below 3"),
    ([0, None], {}, "in every row"),
    ([0.5, 1.0], {}, "must be text, or from 0"),
    ([0, 2], {"class_names": CLASSES[:2]}, "'cat' is none of 2 classes"),
    ([0, 2], {"label_column": "nope"}, r"\['nope'\] among"),
  )
  def test_labels_without_a_class(self, labels, selection, message):
    write(self.root / "0.parquet", make_table(labels))
    with self.assertRaisesRegex(ValueError, message):
      self._tables(**selection)

  def test_columns_are_chosen_or_named(self):
    features = dict.fromkeys(("fine", "coarse"), tiny_images.LABEL)
    features["image"] = tiny_images.IMAGE
    table = make_table([0, 1], features=features, label="fine")
    table = table.append_column("coarse", pa.array([1, 1]))
    write(self.root / "0.parquet", table)
    with self.assertRaisesRegex(ValueError, r"\['fine', 'coarse'\] among"):
      self._tables()
    self.assertEqual(self._tables(label_column="coarse")[0]["label"], 1)

  def test_damaged_file_is_named(self):
    for path in (self.root / "0.parquet", self.root / "0.arrow"):
      path.write_bytes(b"PAR1 and no more")
      with self.assertRaisesRegex(ValueError, f"{path.name}: damaged or "):
        self._tables()
      path.unlink()
