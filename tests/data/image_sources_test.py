"""Images in folders, tables and shards: what is found, and what is refused."""

import dataclasses
import pickle
import struct
import zlib
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from absl.testing import parameterized
from PIL import Image

from moh_jax.config import Config, DataConfig, apply_overrides
from moh_jax.data import image_folders, image_shards, image_tables, infer
from moh_jax.data.decode import describe_image
from moh_jax.data.image_folders import ImageFolderSource, Selection
from moh_jax.data.image_tables import ParquetSource
from moh_jax.data.sources import (
  SPLITS,
  CheckedSource,
  listed_classes,
  make_source,
  match_classes,
  read_ahead,
)
from tests.data import tiny_sets
from tests.data.tiny_images import (
  CLASSES,
  IMAGE,
  LABEL,
  make_table,
  pixels,
  put,
  write,
)
from tests.folders import FolderTest

MODEL = dataclasses.replace(tiny_sets.VIT, image_size=(8, 12), num_classes=2)


class _ImagesTest(FolderTest):
  def _folders(self, split="train", **selection):
    return ImageFolderSource(str(self.root), split, 3, Selection(**selection))

  def _tables(self, split="train", **selection):
    return ParquetSource(str(self.root), split, 3, Selection(**selection))

  def _names(self, split, share=0.25):
    source = self._folders(split, val_share=share)
    return {source.name(i) for i in range(len(source))}

  def _config(self, source="image_folder", **data):
    data = DataConfig(source=source, path=str(self.root), **data)
    return Config(model=MODEL, data=data)


class FoldersTest(_ImagesTest):
  def test_what_is_no_image_is_left_out_with_one_warning(self):
    names = ("a/1.png", "a/2.HEIC", "a/labels.txt", "b/1.jpg", "3.png", "c.txt")
    for name in (*names, "a/._1.png", ".cache/2.png"):
      (self.root / name).parent.mkdir(exist_ok=True)
      (self.root / name).touch()
    (self.root / "a/below").mkdir()
    with self.assertLogs(level="WARNING") as logs:
      for _ in range(2):
        classes, files = image_folders.list_images(self.root)
    self.assertEqual(classes, ("a", "b"))
    self.assertEqual(files, [("a/1.png", 0), ("b/1.jpg", 1)])
    self.assertLen(logs.output, 1)
    self.assertIn("out 4 files or folders, 'a/2.HEIC' for", logs.output[0])

  def test_flat_folder_is_one_class(self):
    put(self.root, "b.png", "a.png")
    names, files = image_folders.list_images(self.root)
    self.assertLen(names, 1)
    self.assertEqual(files, [("a.png", 0), ("b.png", 0)])

  def test_share_cuts_the_images_in_two_and_further_ones_move_none(self):
    for prefix in ("", "train/"):
      names = [f"{prefix}{c}/{i}.png" for c in CLASSES for i in range(40)]
      put(self.root, *names)
      train, val = self._names("train"), self._names("val")
      self.assertEqual(train & val, set())
      self.assertLen(train | val, 120)
      self.assertBetween(len(val), 15, 45)
    put(self.root, *(f"train/{c}/{i}.png" for c in "xa" for i in range(40, 60)))
    self.assertLess(train, self._names("train"))
    self.assertLess(val, self._names("val"))

  @parameterized.parameters("test", "Test", "validation", "dev")
  def test_other_splits_are_no_classes(self, other):
    put(self.root, "train/1.png", "val/2.png", f"{other}/3.png")
    self.assertEqual(self._names("train", 0.0), {"1.png"})
    self.assertEqual(self._names("val", 0.0), {"2.png"})

  def test_classes_without_a_held_out_image_are_named(self):
    names = [f"{name}/{i}.png" for name in ("ant", "bee") for i in (1, 2)]
    classes = ("ant", "bee")
    with self.assertLogs(level="WARNING") as logs:
      image_folders.hold_out(names, (0, 0, 1, 1), "val", 0.5, classes, "PETS")
    self.assertEndsWith(
      logs.output[0],
      "PETS: data.val_share=0.5 holds out no image of 1 of 2 classes, such as "
      "'ant'",
    )

  def test_class_may_be_called_train(self):
    put(self.root, "bus/1.png", "train/1.png")
    self.assertEqual(image_folders.find_splits(self.root), {"train": self.root})

  @parameterized.parameters(
    ("train", {}, "class folder 'dog' holds no"),
    ("train", {"val_share": 1.0}, "val_share=1.0 .* class 'ant'"),
    ("val", {"val_share": 1e-6}, "val_share=1e-06 .* no image"),
    ("val", {}, "no directory 'val'.*or data.val_share above 0"),
    ("", {"class_names": ("cow",)}, "'ant' is none .* 1 classes .cow"),
  )
  def test_refused(self, split, selection, message):
    put(self.root, "ant/1.png", "bee/1.png")
    if "holds no" in message:
      (self.root / "dog").mkdir()
    with self.assertRaisesRegex((ValueError, FileNotFoundError), message):
      self._folders(split, **selection)

  def test_commands_find_more_formats_than_training(self):
    kinds = ("ppm", "apng", "jp2", "dib", "jfif", "PGM")
    put(self.root, *(f"1.{kind}" for kind in kinds))
    (self.root / "1.heic").touch()
    with self.assertLogs(level="WARNING"):
      found = image_folders.find_images([str(self.root)])
    self.assertLen(found, 6)


class ClassesTest(_ImagesTest):
  def test_folders_named_by_numbers_are_labels(self):
    put(self.root, *(f"val/{i}/1.png" for i in range(12)))
    names = tuple(f"n{i:02}" for i in range(12))
    for wanted in (names, ()):
      source = self._folders("val", class_names=wanted)
      labels = {source.name(i): source[i]["label"] for i in range(12)}
      self.assertEqual(labels, {f"{i}/1.png": i for i in range(12)})
    with self.assertRaisesRegex(ValueError, "'11' is none of .* 11 classes"):
      self._folders("val", class_names=names[:11])

  @parameterized.parameters(
    (("00", "01", "11"), tuple("abcdefghijkl"), [0, 1, 11]),
    (("00", "01", "10"), ("0", "1", "10", "2"), [0, 1, 2]),
    (("1", "02", "11"), tuple(map(str, range(12))), [1, 2, 11]),
    (("01", "7"), ("1", "dog", "7"), [0, 2]),
  )
  def test_zeros_before_numbers_do_not_matter(self, found, wanted, labels):
    self.assertEqual(match_classes(found, wanted, "x"), (wanted, labels))
    with self.assertRaisesRegex(ValueError, "'01', '1'.* have a number twice"):
      match_classes(("01", "1"), ("ant", "bee"), "x")

  @parameterized.parameters(
    (b"n02 tench, Tinca tinca\r\n\n  n01\nn03\tbee\n", ("n01",),
     (("n02", "n01", "n03"), [1])),
    (b"polar bear\nbrown bear\npolar fox, white\n",
     ("brown bear", "polar", "polar bear"),
     (("polar bear", "brown bear", "polar"), [1, 2, 0])),
    (b"\n \n", (), "names no class"),
    (b"ant\nbee\nant x\n", (), "class 'ant' is there twice"),
    (b"\xff\xfe", (), "not UTF-8"),
  )  # fmt: skip
  def test_list_names_the_classes(self, content, found, expected):
    file = self.root / "synsets.txt"
    file.write_bytes(content)
    if isinstance(expected, str):
      with self.assertRaisesRegex(ValueError, f"class_list=.*{expected}"):
        match_classes(found, listed_classes(str(file)), "x")
    else:
      listed = listed_classes(str(file))
      self.assertEqual(match_classes(found, listed, "x"), expected)


class BadImagesTest(_ImagesTest):
  @parameterized.parameters("train", "val")
  def test_are_named_before_the_first_step(self, split):
    for part in SPLITS:
      put(self.root / part, *(f"{c}/{i}.png" for c in "ab" for i in range(2)))
      (self.root / part / "a/0.png").write_text("no image")
      (self.root / part / "b/2.png").symlink_to(self.root / "gone.png")
    check = "check" if split == "train" else "skip"  # for training alone
    advice = {"train": ", or leave them out", "val": ": .*'skip' is for train"}
    with self.assertRaisesRegex(
      ValueError,
      "2 of 5 images .*a/0.png: not .*; .*b/2.png: a broken link; remove them"
      + advice[split],
    ):
      make_source(self._config(bad_images=check), split)
    train = make_source(self._config(bad_images="skip"), "train")
    np.testing.assert_array_equal(train[0]["image"], pixels(1))

  def test_centre_crop_needs_large_images(self):
    put(self.root, "train/ant/1.png")
    put(self.root, "train/cat/1.png", size=(8, 12))
    source = make_source(self._config(augment="crop_flip"), "train")
    self.assertEqual(source[0]["image"].shape, (6, 5, 3))
    source = make_source(self._config(augment="center_flip"), "train")
    with self.assertRaisesRegex(
      ValueError, "ant/1.png: 6 x 5 pixels .* at least 8 x 12 needed"
    ):
      source[0]
    self.assertEqual(source[1]["image"].shape, (8, 12, 3))

  def test_next_good_image_takes_the_place_of_a_bad_one(self):
    paths = put(self.root, *(f"{i}.png" for i in range(6)))
    for bad, expected in (((1, 2, 5), [0, 3, 3, 3, 4, 0]), (range(6), None)):
      for place in bad:
        paths[place].write_text("no image")
      source = CheckedSource(self._folders(""), skip=True)
      if expected is None:
        with self.assertRaisesRegex(ValueError, "none of the 6 images can be"):
          source[0]
        continue
      for i in (*range(6), *range(6)):
        seed = expected[i]
        np.testing.assert_array_equal(source[i]["image"], pixels(seed))


class OthersSourcesTest(parameterized.TestCase):
  def _source(self, image, label):
    source = mock.MagicMock(class_names=("a", "b"), channels=3)
    source.__len__.return_value = 1
    source.__getitem__.return_value = {"image": image, "label": label}
    source.name.side_effect = "image {}".format
    return CheckedSource(source, skip=False)

  @parameterized.parameters(
    ((4, 4), np.uint8, 0, r"example 0 .*\(4, 4\), must be uint8 \[.*, 3\]"),
    ((4, 4, 1), np.uint8, 0, r"example 0 .*\(4, 4, 1\), must be .*, 3\]"),
    ((4, 4, 3), np.float32, 0, "example 0 .*float32 .*, must be uint8"),
    ((4, 4, 3), np.uint8, 2, r"image 0: label=2 must be in \[0, 1\]"),
  )
  def test_refused(self, shape, dtype, label, message):
    with self.assertRaisesRegex(ValueError, message):
      self._source(np.zeros(shape, dtype), label)[0]

  def test_labels_of_any_integer_are_int32(self):
    for label in (1, True, np.uint8(1), np.array(1)):
      found = self._source(np.zeros((4, 4, 3), np.uint8), label)[0]["label"]
      self.assertEqual((found, found.dtype), (1, np.int32))


class ReadAheadTest(parameterized.TestCase):
  def test_few_results_wait_for_their_turn(self):
    begun = []
    results = read_ahead(
      lambda place: begun.append(place) or -place, range(99), 2, 4
    )
    self.assertEqual(next(results), 0)
    self.assertLess(len(begun), 12)
    self.assertEqual(list(results), [-place for place in range(1, 99)])


class ShardsTest(_ImagesTest):
  def _pack(self, out, **options):
    source = ImageFolderSource(str(self.root / "images"), "", 3)
    return image_shards.pack_images(
      source, self.root / out, packed_from="", shard_size=4, **options
    )

  def _turn_behind_the_pixels(self, file):
    exif = Image.Exif()
    exif[274] = 6
    chunk, end = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0"), 12
    noted = struct.pack(">I", len(chunk) - 4) + chunk
    noted += struct.pack(">I", zlib.crc32(chunk))
    content = file.read_bytes()
    file.write_bytes(content[:-end] + noted + content[-end:])

  def test_what_is_no_image_ends_or_is_left_out(self):
    put(self.root / "images", "ant/0.png", "ant/1.png")
    (self.root / "images/ant/0.png").write_text("no image")
    with self.assertRaisesRegex(ValueError, "ant/0.png: not an image"):
      self._pack("out")
    self.assertEqual(self._pack("out", bad_images="skip")["examples"], 1)

  def test_larger_images_become_smaller_and_bad_ones_end_or_are_left_out(self):
    ant, cat = (self.root / f"images/{name}" for name in ("ant", "cat"))
    put(ant, "3.png", "4.png", size=(11, 18))
    put(cat, "0.png", "1.png", size=(9, 20))
    Image.new("L", (40, 30)).save(ant / "0.png")
    Image.new("RGBA", (20, 44)).save(ant / "1.png")
    self._pack("packed/val", shorter_side=10)
    packed = image_shards.ArrayRecordSource(str(self.root / "packed"), "val", 3)
    described = [describe_image(packed.read(i).content, "") for i in range(3)]
    self.assertEqual(
      described, [((10, 13), True), ((22, 10), False), ((10, 16), False)]
    )
    self.assertTrue(packed.read(0).content.startswith(b"\xff\xd8"))
    self._turn_behind_the_pixels(ant / "0.png")
    self._pack("turned", shorter_side=10)
    turned = image_shards.ArrayRecordSource(str(self.root / "turned"), "", 3)
    self.assertEqual(turned[0]["image"].shape[:2], (13, 10))
    # Of 9 rows: unchanged.
    self.assertEqual(packed.read(4).content, (cat / "0.png").read_bytes())
    with self.assertRaisesRegex(ValueError, "images: '6 files.* there"):
      self._pack("packed/val", shorter_side=9)
    (ant / "1.png").write_text("no image")
    (cat / "0.png").unlink()
    (cat / "0.png").symlink_to(self.root / "gone.png")
    with self.assertRaisesRegex(ValueError, "ant/1.png: not an image"):
      self._pack("out", shorter_side=4)
    metadata = self._pack("out", shorter_side=4, bad_images="skip")
    self.assertEqual((metadata["examples"], metadata["skipped"]), (4, 2))
    lists = sorted(self.root.glob("out/skipped/*"))
    listed = "".join(path.read_text() for path in lists)
    self.assertIn("ant/1.png: unreadable: ", listed)
    self.assertIn("0.png: a broken link", listed)

  @parameterized.parameters(
    ("diffusion", {"latent_scale": 0.13}, "on.latent_scale: 0.13 here, 0.5 t"),
    ("model", {"input_size": (8, 8)},
     r"\(4, 4, 2\) .*, the model takes \(8, 8, 2\)"),
  )  # fmt: skip
  def test_latents_of_another_model(self, section, values, message):
    tiny_sets.write_latents(self.root / "train")
    config = tiny_sets.dit_config(path=self.root)
    config = apply_overrides(config, section, **values)
    with self.assertRaisesRegex(ValueError, message):
      make_source(config, "train")


class TablesTest(_ImagesTest):
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

  @parameterized.parameters(
    ((".cache/x.arrow", "ant/0.png", "bee/0.png"), False),
    (("metadata.parquet", "ant/0.png", "bee/0.png"), False),
    (("train/metadata.parquet", "train/ant/0.png", "train/bee/0.png"), False),
    (("data/train-0.parquet", "ant/0.png", "bee/0.png"), True),
  )
  def test_tables_beside_images(self, names, of_tables):
    write(self.root / names[0], make_table([0]))
    put(self.root, *names[1:])
    self.assertEqual(image_tables.is_tables(self.root), of_tables)
    (train,) = image_shards.open_splits(str(self.root), None).values()
    self.assertEqual(train.class_names, CLASSES[: 3 if of_tables else 2])
    found = infer.data_at(Config(model=MODEL), str(self.root))
    kinds = ("image_folder", "parquet")
    self.assertEqual(found["source"], kinds[of_tables])
    self.assertEqual(found["val_share"], 1.0)

  @parameterized.product(
    suffix=("parquet", "arrow"), kind=("struct", "binary", "large_binary")
  )
  def test_pixels_and_labels_of_every_row(self, suffix, kind):
    first = 0
    for number, labels in enumerate(([2, 0, 1], [1], [0, 0, 0, 2])):
      table = make_table(labels, first)
      if kind != "struct":
        column = table.column("image").combine_chunks().field("bytes")
        column = column.cast(getattr(pa, kind)())
        notes = table.schema.metadata
        table = table.set_column(0, "image", column)
        table = table.replace_schema_metadata(notes)
      write(self.root / f"train-{number}.{suffix}", table)
      first += len(labels)
    source = pickle.loads(pickle.dumps(self._tables()))
    self.assertEqual(source.class_names, CLASSES)
    labels = [2, 0, 1, 1, 0, 0, 0, 2]
    self.assertLen(source, 8)
    for i in (7, 3, 0, 5, 4, 1, 2, 6):
      example = source[i]
      np.testing.assert_array_equal(example["image"], pixels(i))
      self.assertEqual(example["label"], labels[i])
      self.assertEqual(example["label"].dtype, np.int32)
    self.assertEqual(source.name(4), f"train-2.{suffix}:1")

  def test_an_image_that_endless_rows_share_is_refused(self):
    large = pa.array([b"a" * (1 << 20)] * 300)
    table = pa.table({"image": large, "label": [0] * 300})
    pa.parquet.write_table(table, self.root / "train-0.parquet")
    source = self._tables(class_names=("a",))
    with self.assertRaisesRegex(ValueError, "0.parquet: unpacks to 268,4"):
      source[0]

  @parameterized.parameters(
    ([0, 2], {}, ("cat", "dog", "bee", "ant"), [3, 0]),
    (["dog", "ant", "dog"], {}, (), [1, 0, 1]),
    (pa.array(["b", "a"], pa.large_string()), {}, (), [1, 0]),
  )
  def test_labels_follow_the_classes(self, rows, features, names, labels):
    features = features if rows[0] != 0 else None
    write(self.root / "0.parquet", make_table(rows, features=features))
    source = self._tables(class_names=names)
    found = [int(source[i]["label"]) for i in range(len(source))]
    self.assertEqual(found, labels)
    expected = names or tuple(sorted(set(map(str, rows))))
    self.assertEqual(source.class_names, expected)

  def test_labels_without_names_are_labels_whatever_the_classes_are_called(
    self,
  ):
    table = make_table([2, 0, 1], features={"image": IMAGE})
    write(self.root / "0.parquet", table)
    source = self._tables(class_names=("1", "2", "0", "3"))
    self.assertEqual([int(source[i]["label"]) for i in range(3)], [2, 0, 1])
    with self.assertRaisesRegex(ValueError, "label 2 is none of the model's 2"):
      self._tables(class_names=("1", "2"))

  def test_classes_of_one_name_are_kept_apart(self):
    twice = {"_type": "ClassLabel", "names": ["crane", "ant", "crane"]}
    features = {"image": IMAGE, "label": twice}
    write(self.root / "0.parquet", make_table([2, 0, 1], features=features))
    names = ("crane", "ant", "crane")
    for known in ((), names):
      source = self._tables(class_names=known)
      self.assertEqual([int(source[i]["label"]) for i in range(3)], [2, 0, 1])
    for found, wanted in ((names, names[:2]), (names[:2], names)):
      with self.assertRaisesRegex(ValueError, "'crane' may be several of the"):
        match_classes(found, wanted, "x")

  def test_all_tables_name_the_same_classes(self):
    write(self.root / "0.parquet", make_table([0, 1]))
    turned = {"_type": "ClassLabel", "names": LABEL["names"][::-1]}
    features = {"image": IMAGE, "label": turned}
    write(self.root / "1.parquet", make_table([0, 1], features=features))
    with self.assertRaisesRegex(ValueError, "1.parquet: .* 0.parquet names"):
      self._tables()
    features = {"image": IMAGE}  # as another program wrote it
    write(self.root / "1.parquet", make_table([0, 1], features=features))
    self.assertLen(self._tables(), 4)

  def test_identity_changes_with_rows_labels_and_content(self):
    cases = (([0, 1], 0), ([0, 0], 0), ([0, 1], 5), ([0, 1, 1], 0), ([0, 1], 0))
    found = []
    for labels, first in cases:
      write(self.root / "0.parquet", make_table(labels, first))
      found.append(str(sorted(self._tables().identity().items())))
    self.assertLen(set(found), 4)
    self.assertEqual(found[-1], found[0])

  def test_row_without_an_image_is_named(self):
    table = make_table([0, 1, 2])
    rows = table.column("image").to_pylist()
    rows[1]["bytes"], rows[2]["bytes"] = None, b"no image"
    column = pa.array(rows, table.schema.field("image").type)
    write(self.root / "0.parquet", table.set_column(0, "image", column))
    source = self._tables()
    for place, message in ((1, "2: the row has no b"), (2, "3: not an image")):
      with self.assertRaisesRegex(ValueError, f"0.parquet:{message}"):
        source[place]
    config = self._config("parquet", bad_images="check")
    model = dataclasses.replace(MODEL, num_classes=3)
    with self.assertRaisesRegex(ValueError, "2 of 3 images cannot be used"):
      make_source(dataclasses.replace(config, model=model), "train")

  @parameterized.parameters(
    ([0, -1], {}, "label -1, must be at least 0"),
    ([0, 3], {}, "label 3, must be .* and below 3"),
    ([0, None], {}, "1 rows without a label"),
    ([0.5, 1.0], {}, "is of double"),
    ([0, 2], {"class_names": CLASSES[:2]}, "'cat' is none of the model's 2"),
    ([0, 2], {"label_column": "nope"}, "label_column='nope' must be one"),
  )
  def test_labels_without_a_class(self, labels, selection, message):
    write(self.root / "0.parquet", make_table(labels))
    with self.assertRaisesRegex(ValueError, message):
      self._tables(**selection)

  def test_columns_are_chosen_or_named(self):
    features = {"image": IMAGE, "fine": LABEL, "coarse": LABEL}
    table = make_table([0, 1], features=features, label="fine")
    table = table.append_column("coarse", pa.array([1, 1]))
    write(self.root / "0.parquet", table)
    with self.assertRaisesRegex(ValueError, r"\['fine', 'coarse'\]; choose"):
      self._tables()
    self.assertEqual(self._tables(label_column="coarse")[0]["label"], 1)
    write(self.root / "1.parquet", make_table([0], label="fine"))
    with self.assertRaisesRegex(ValueError, "1.parquet: column 'coarse' m"):
      self._tables(label_column="coarse")

  def test_damaged_file_is_named(self):
    for path in (self.root / "0.parquet", self.root / "0.arrow"):
      path.write_bytes(b"PAR1 and no more")
      with self.assertRaisesRegex(ValueError, f"{path.name}: damaged or "):
        self._tables()
      path.unlink()
