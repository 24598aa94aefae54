import dataclasses
import json
import re

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax import config as config_lib
from moh_jax.config import Config, DataConfig, TextDataConfig
from moh_jax.config.dit import LatentScaling
from moh_jax.data import image_shards
from moh_jax.data.image_folders import ImageFolderSource
from moh_jax.data.infer import resolve, resolve_without_data
from tests.data import tiny_sets, tiny_text
from tests.data.folder import FolderTest

_VIT = config_lib.ViTConfig()
_DIT = config_lib.DiTConfig(input_size=(8, 8))
_PIXELS = config_lib.DiffusionConfig(space="pixel")
_IMAGENET = (0.485, 0.456, 0.406)


class ImagesTest(FolderTest):
  def _pack(self, folder, out):
    source = ImageFolderSource(str(folder), "", 3)
    image_shards.pack_images(source, out, packed_from=folder)

  def _write_images(self):
    for name in ("ant", "bee", "cat"):
      path = self.root / "images/train" / name / "0.png"
      path.parent.mkdir(parents=True)
      Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path)
    return str(self.root / "images")

  def test_classes_are_the_folders(self):
    data = DataConfig(source="image_folder", path=self._write_images())
    config = resolve(Config(_VIT, data=data))
    self.assertEqual((config.model.channels, config.model.num_classes), (3, 3))
    self.assertEqual(config.data.mean, _IMAGENET)

  @parameterized.parameters(
    ((100, 70), 64), ((20, 30), 32), ((500, 400), 224), ((96, 96), 96)
  )
  def test_image_size_follows_the_shorter_sides(self, stored, side):
    folder = self.root / "train/ant"
    folder.mkdir(parents=True)
    for i, size in enumerate([stored, stored, (9, 9), (4000, 8)]):
      Image.new("RGB", size).save(folder / f"{i}.png")
    Image.new("RGB", stored).save(folder / "5.png")
    (folder / "4.png").write_text("no image, for data.bad_images to decide on")
    data = DataConfig(source="image_folder", path=str(self.root))
    model = dataclasses.replace(_VIT, image_size=None)
    sizes = {resolve(Config(model, data=data)).model.image_size}
    self._pack(self.root / "train", self.root / "packed/train")
    data = DataConfig(source="array_record", path=str(self.root / "packed"))
    sizes |= {resolve(Config(model, data=data)).model.image_size}
    self.assertEqual(sizes, {(side, side)})

  def test_latents_tell_their_scaling(self):
    tiny_sets.write_latents(self.root / "train", latent_shift=0.25)
    data = DataConfig(source="latents", path=str(self.root))
    scaling = resolve(Config(_DIT, data=data)).diffusion.scaling
    self.assertEqual(scaling, LatentScaling(0.5, 0.25))
    data = DataConfig(source="fake")
    scaling = resolve(Config(_DIT, data=data)).diffusion.scaling
    self.assertEqual(scaling, LatentScaling(0.18215))

  @parameterized.parameters(("digits", 1), ("fake", 3))
  def test_pixels_of_diffusion_models_are_normalized_by_halves(
    self, source, channels
  ):
    config = Config(_DIT, data=DataConfig(source=source), diffusion=_PIXELS)
    config = resolve(config)
    self.assertEqual(config.model.channels, channels)
    self.assertEqual(config.data.mean, (0.5,) * channels)
    self.assertEqual(config.data.std, (0.5,) * channels)

  def test_what_is_stated_needs_no_data(self):
    model = dataclasses.replace(_VIT, channels=1, num_classes=7)
    data = DataConfig(
      source="image_folder", path="/nowhere", mean=(0.1,), std=(0.2,)
    )
    config = Config(model, data=data)
    resolved = resolve(config)
    self.assertEqual((resolved.model, resolved.data), (model, data))


class WithoutDataTest(absltest.TestCase):
  def test_settings_of_missing_files_stay(self):
    data = DataConfig(
      source="parquet",
      path="nowhere",
      class_list="classes.txt",
      label_column="fine",
      decode="fast",
    )
    config, _ = resolve_without_data(Config(_VIT, data=data))
    for name in ("source", "class_list", "label_column", "decode"):
      self.assertEqual(getattr(config.data, name), getattr(data, name))

  def test_what_the_data_would_tell_has_the_values_of_random_data(self):
    data = DataConfig(source="image_folder", path="/nowhere")
    config, assumed = resolve_without_data(Config(_VIT, data=data))
    self.assertEqual(assumed, {"channels": 3, "num_classes": 1000})
    self.assertEqual(config.data.mean, _IMAGENET)
    self.assertEqual(config.data.source, "image_folder")
    self.assertEqual(config, resolve(config))


class TextTest(FolderTest):
  def _vocab_size(self, **data):
    config = Config(config_lib.LLMConfig(), data=TextDataConfig(**data))
    return resolve(config).model.vocab_size

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


class WarmupTest(parameterized.TestCase):
  @parameterized.parameters(
    (None, 100, 5), (None, 10, 0), (None, 10**6, 2000), (0, 100, 0), (7, 9, 7)
  )
  def test_is_a_twentieth_of_the_run_unless_stated(self, stated, steps, warmup):
    config = Config(
      _VIT,
      optim=config_lib.OptimConfig(warmup_steps=stated),
      train=config_lib.TrainConfig(steps=steps),
    )
    self.assertEqual(resolve(config).optim.warmup_steps, warmup)


class ResolveTest(absltest.TestCase):
  def test_resolved_values_are_stored(self):
    config = resolve(Config(_VIT, data=DataConfig(source="digits")))
    text = config_lib.to_json(config)
    # These follow from the host, and from the schedule that is asked for.
    unset = re.findall(r'"(\w+)": null', text)
    self.assertCountEqual(unset, ["workers", "decay_steps"])
    self.assertEqual(config_lib.from_config_dict(json.loads(text)), config)


if __name__ == "__main__":
  absltest.main()
