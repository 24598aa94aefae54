import dataclasses
import json
import math
import re
from unittest import mock

from absl.testing import parameterized
from PIL import Image

from moh_jax import config as config_lib
from moh_jax.config import Config, DataConfig, TextDataConfig
from moh_jax.config.dit import LatentScaling
from moh_jax.data import sources
from moh_jax.data.infer import resolve, resolve_without_data
from tests.data import tiny_sets, tiny_text
from tests.data.tiny_images import put
from tests.folders import FolderTest

_VIT = config_lib.ViTConfig()
_DIT = config_lib.DiTConfig(input_size=(8, 8))
_PIXELS = config_lib.DiffusionConfig(space="pixel")
_IMAGENET = (0.485, 0.456, 0.406)


def _resolved(model, data=None, **sections):
  sections |= {} if data is None else {"data": data}
  return resolve(Config(model, **sections))


class ImagesTest(FolderTest):
  @parameterized.parameters(
    ((100, 70), 64, 9), ((20, 30), 32, 9), ((500, 400), 224, 1),
    ((500, 400), 64, 7), ((500, 400), 128, 6), ((96, 96), 96, 6),
  )  # fmt: skip
  def test_size_and_classes_are_those_of_the_files(self, stored, side, few):
    most = ((few, 64), (few + 1, 128), (math.inf, 224))  # six images
    self.enterContext(mock.patch.object(sources, "_MOST_SIDE", most))
    put(self.root, "train/bee/0.png", size=stored[::-1])
    folder = self.root / "train/ant"
    folder.mkdir()
    for i, size in enumerate([stored, stored, (9, 9), (4000, 8)]):
      Image.new("RGB", size).save(folder / f"{i}.png")
    (folder / "4.png").write_text("no image, for data.bad_images to decide on")
    model = dataclasses.replace(_VIT, image_size=None)
    data = DataConfig(source="image_folder", path=str(self.root))
    config = _resolved(model, data)
    self.assertEqual(config.model.image_size, (side, side))
    self.assertEqual(config.model.num_classes, 2)
    self.assertEqual(config.model.channels, 3)
    self.assertEqual(config.data.mean, _IMAGENET)

  def test_latents_tell_their_scaling(self):
    tiny_sets.write_latents(
      self.root / "train", scaling={"scale": 0.5, "shift": 0.25}
    )
    data = DataConfig(source="latents", path=str(self.root))
    scaling = _resolved(_DIT, data).diffusion.scaling
    self.assertEqual(scaling, LatentScaling(0.5, 0.25))
    train = config_lib.TrainConfig(epochs=1)  # counts the latents, too
    model = dataclasses.replace(_DIT, input_size=(4, 4))
    scaling = _resolved(model, data, train=train).diffusion.scaling
    self.assertEqual(scaling, LatentScaling(0.5, 0.25))
    scaling = _resolved(_DIT, DataConfig()).diffusion.scaling  # random ones
    self.assertEqual(scaling, LatentScaling(0.18215))

  @parameterized.parameters(("digits", 1), ("fake", 3))
  def test_pixels_of_diffusion_models_are_normalized_by_halves(
    self, source, channels
  ):
    config = _resolved(_DIT, DataConfig(source=source), diffusion=_PIXELS)
    self.assertEqual(config.model.channels, channels)
    self.assertEqual(config.data.mean, (0.5,) * channels)
    self.assertEqual(config.data.std, (0.5,) * channels)

  def test_what_is_stated_needs_no_data(self):
    model = dataclasses.replace(_VIT, channels=1, num_classes=7)
    known = {"source": "image_folder", "path": "/nowhere"}
    data = DataConfig(**known, mean=(0.1,), std=(0.2,))
    config = _resolved(model, data)
    self.assertEqual((config.model, config.data), (model, data))

  def test_what_missing_data_would_tell_has_the_values_of_random_data(self):
    named = {"class_list": "classes.txt", "label_column": "fine"}
    data = DataConfig(source="parquet", path="nowhere", **named)
    config, assumed = resolve_without_data(Config(_VIT, data=data))
    self.assertEqual(assumed, {"channels": 3, "num_classes": 1000})
    self.assertEqual(config.data.mean, _IMAGENET)
    known = {"mean": None, "std": None, "eval_resize": data.eval_resize}
    self.assertEqual(dataclasses.replace(config.data, **known), data)
    self.assertEqual(config, resolve(config))

  def test_passes_over_the_examples_become_steps(self):
    data = DataConfig(batch_size=64, fake_examples=100)
    for epochs, steps in ((3, 5), (0.5, 1), (64, 100)):
      train = config_lib.TrainConfig(epochs=epochs)
      config = _resolved(_VIT, data, train=train).train
      self.assertEqual((config.steps, config.epochs), (steps, 0))
    run = Config(_VIT, data=data, train=config_lib.TrainConfig(epochs=2))
    missing = DataConfig("image_folder", "nowhere")
    with self.assertRaisesRegex(FileNotFoundError, "nowhere"):
      resolve_without_data(dataclasses.replace(run, data=missing))


class TextTest(FolderTest):
  def _vocab_size(self, **data):
    data = TextDataConfig(**data)
    return _resolved(config_lib.LLMConfig(), data).model.vocab_size

  def test_largest_vocabulary_of_the_sets(self):
    for name, size in (("web", 300), ("code", 280)):
      folder = self.root / name / "train"
      tiny_text.write(folder, [[[1, 2]]], tiny_text.tokenizer(size))
    data = {"source": "tokens", "path": str(self.root)}
    mix = {"mix": ("code", "web"), "ratios": (50.0, 50.0)}
    self.assertEqual(self._vocab_size(**data, **mix), 300)
    data["path"] += "/code"
    self.assertEqual(self._vocab_size(**data), 280)

  @parameterized.parameters(("bytes", 257), ("bpe", 2048))
  def test_standard_library(self, tokenizer, size):
    data = {"source": "stdlib", "path": str(self.root)}
    self.assertEqual(self._vocab_size(tokenizer=tokenizer, **data), size)


class RunTest(parameterized.TestCase):
  def test_resolved_values_are_stored(self):
    config = _resolved(_VIT, DataConfig(source="digits"))
    text = config_lib.to_json(config)
    # These follow from the host, and from the schedule that is asked for.
    unset = re.findall(r'"(\w+)": null', text)
    self.assertCountEqual(unset, ["workers", "decay_steps", "profile"])
    self.assertEqual(config_lib.from_config_dict(json.loads(text)), config)
