"""Training streams that decode and resize less (`data.decode`)."""

import dataclasses
import pathlib
import tempfile

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax.config import Config, DataConfig
from moh_jax.data import decode, pipeline, sources
from tests.data.images.photos import encode, photo
from tests.data.images.sources_test import _MODEL

_SIZES = ((400, 300), (150, 200), (60, 40))


class DecodeTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    for name in ("china", "flower"):
      for i, size in enumerate(_SIZES):
        path = self.root / "train" / name / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(photo(size, name=name)))

  def _config(self, mode, **data):
    if mode == "fast":
      pytest.importorskip("cykooz_resizer")
    model = dataclasses.replace(_MODEL, image_size=(32, 24))
    values = {"augment": "crop_flip", "mean": (0.5,) * 3, "std": (0.5,) * 3}
    section = DataConfig(
      source="image_folder",
      path=str(self.root),
      decode=mode,
      batch_size=4,
      num_threads=2,
      **values | data,
    )
    return Config(model=model, data=section)

  def _batches(self, config, count, start=0):
    source = sources.make_source(config, "train")
    dataset = pipeline.train_images(config, source)
    stream = pipeline.TrainBatches(dataset, config.data, range(4))
    stream.seek(start)
    batches = [next(stream) for _ in range(count)]
    stream.close()
    return batches

  def test_crops_are_about_those_of_all_pixels(self):
    exact = self._batches(self._config("exact"), 12)
    ours = self._batches(self._config("fast"), 12)
    differences = []
    for batch, expected in zip(ours, exact):
      np.testing.assert_array_equal(batch["label"], expected["label"])
      self.assertEqual(batch["image"].dtype, np.uint8)
      differences.append(
        np.abs(batch["image"].astype(int) - expected["image"]).mean()
      )
    self.assertBetween(np.mean(differences), 0.01, 1)

  def test_stream_goes_on_from_any_place(self):
    config = self._config("fast")
    whole, rest = self._batches(config, 6), self._batches(config, 2, start=4)
    for batch, expected in zip(rest, whole[4:]):
      np.testing.assert_array_equal(batch["image"], expected["image"])

  def test_damaged_images_are_replaced_or_named(self):
    path = self.root / "train/flower/0.jpg"
    path.write_bytes(path.read_bytes()[:3000])
    batches = self._batches(self._config("fast", bad_images="skip"), 6)
    self.assertLen(batches, 6)
    with self.assertRaisesRegex(ValueError, "flower/0.jpg: damaged or trunc"):
      self._batches(self._config("fast"), 6)

  @parameterized.parameters("exact", "fast")
  def test_evaluation_is_that_of_all_pixels(self, mode):
    config = self._config(mode, eval_resize=40)
    source = sources.make_source(config, "train")
    crop, *_ = pipeline.eval_recipe(config)
    ready = pipeline.held_out_images(config, source)
    self.assertLen(ready, len(source))
    for index in range(len(source)):
      content = source.read(index).content
      image = decode.decode_image(content, 3, "x", fast=mode == "fast")
      expected = crop.map({"image": image})
      np.testing.assert_array_equal(ready[index]["image"], expected["image"])
      self.assertEqual(ready[index]["label"], source[index]["label"])

  def test_identity_knows_what_changes_pixels(self):
    identities = [
      sources.make_source(self._config(mode), "train").identity()
      for mode in ("exact", "fast")
    ]
    self.assertNotIn("decode", identities[0])
    self.assertEqual(identities[1], identities[0] | {"decode": "fast"})


if __name__ == "__main__":
  absltest.main()
