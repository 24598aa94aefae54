import dataclasses
import functools

import jax
import numpy as np
from absl.testing import parameterized

from moh_jax.config.dit import LatentScaling
from moh_jax.data.packed import LatentSource, open_splits
from moh_jax.data.transforms import center_crop
from moh_jax.inference import encode
from moh_jax.models.vae import VAE, encoder_sha256, weights_sha256
from tests.folders import FolderTest
from tests.inference import tiny_vae

_OPTIONS = {"image_size": 8, "batch_size": 2, "shard_size": 4}


_params = functools.cache(tiny_vae.params)


class EncodeTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.images = self.root / "images"
    tiny_vae.save_images(self.images)

  def _source(self):
    return open_splits(self.images, None)["train"]

  def _encode(self, name="out", source=None, devices=1, **kw):
    config = kw.pop("config", tiny_vae.CONFIG)
    params = _params(kw.pop("seed", 0))
    return encode.encode_latents(
      *(source or self._source(), self.root / name, config, params),
      **{**_OPTIONS, **kw},
      notes={"vae": "tiny", "encoded_from": "here"},
      devices=jax.devices()[:devices],
    )

  def _read(self, name="out"):
    source = LatentSource(str(self.root), name)
    return [source[i] for i in range(len(source))]

  def _files(self, name):
    return {
      path.name: path.read_bytes()
      for path in (self.root / name).glob("*.array_record")
    }

  def test_holds_the_posteriors_of_image_and_mirror_and_says_how(self):
    scaling = LatentScaling(0.25, shift=0.5, mean=(1.0, 2.0), std=(3.0, 4.0))
    config = dataclasses.replace(tiny_vae.CONFIG, scaling=scaling)
    metadata = self._encode(config=config, devices=8, batch_size=8)
    expected = {
      "class_names": ["ant", "cat"],
      "image_size": 8,
      "latent_shape": [4, 4, 2],
      "vae_sha256": weights_sha256(config, _params()),
      "encoder_sha256": encoder_sha256(config, _params()),
      "vae": "tiny",
      "encoded_from": "here",
    }
    self.assertContainsSubset(expected, metadata)
    self.assertEqual(LatentSource(str(self.root), "out").scaling, scaling)
    source, read = self._source(), self._read()
    crops = np.stack(
      [center_crop(source[i]["image"], (8, 8)) for i in range(10)]
    )
    pixels = np.float32(crops) / 127.5 - 1
    apply = jax.jit(VAE(tiny_vae.CONFIG).apply, static_argnames="method")
    for view, images in enumerate((pixels, pixels[:, :, ::-1])):
      moments = apply({"params": _params()}, images, method="encode")
      for part, expected in enumerate(moments):
        stored = np.stack([example["image"][view, part] for example in read])
        np.testing.assert_allclose(stored, expected, rtol=2e-3, atol=2e-3)
    self.assertEqual([int(e["label"]) for e in read], [0] * 5 + [1] * 5)

  @parameterized.parameters(0, 9)
  def test_killed_and_continued_gives_the_same_bytes(self, reached):
    self._encode("whole")
    source = self._source()

    class Killed(type(source)):
      def read(self, index):
        if index == reached:
          raise KeyboardInterrupt
        return super().read(index)

    killed = Killed(str(self.images), "train", 3)
    with self.assertRaises(KeyboardInterrupt):
      self._encode("killed", source=killed)
    # Reading is two batches ahead, so the shard before may be lost as well.
    done = len(list((self.root / "killed").glob("*.array_record")))
    self.assertBetween(done, max(reached // 4 - 1, 0), reached // 4)
    for _ in range(2):  # a finished set is left alone
      self._encode("killed")
      self.assertEqual(self._files("killed"), self._files("whole"))

  def test_bad_images_are_skipped_and_listed(self):
    (self.images / "ant" / "1.png").write_text("no image")
    with self.assertRaisesRegex(ValueError, "ant/1.png: not an image.*skip"):
      self._encode()
    metadata = self._encode(bad_images="skip")
    self.assertEqual((metadata["examples"], metadata["skipped"]), (9, 1))
    listing = (self.root / "out" / "skipped.txt").read_text()
    self.assertRegex(listing, "ant/1.png: not an image")
    labels = [int(example["label"]) for example in self._read()]
    self.assertEqual(labels, [0] * 4 + [1] * 5)

  @parameterized.parameters(
    ({"image_size": 9}, {}, "image_size=9 must be a multiple"),
    ({"batch_size": 6}, {"devices": 8}, "batch_size=6 must be a multiple"),
    ({}, {"seed": 1}, "vae_sha256: '.*' here, '.*' there"),
    (
      {},
      {"config": dataclasses.replace(tiny_vae.CONFIG, dtype="bfloat16")},
      "compute_dtype: 'bfloat16' here, 'float32' there",
    ),
  )
  def test_other_settings_are_refused(self, options, others, message):
    self._encode()
    with self.assertRaisesRegex(ValueError, message):
      self._encode(**options, **others)

  def test_the_encoders_hash_is_not_of_the_decoder(self):
    mixed = {**_params(), "decoder": tiny_vae.params(1)["decoder"]}
    for hashed, same in ((encoder_sha256, True), (weights_sha256, False)):
      found = {hashed(tiny_vae.CONFIG, x) for x in (_params(), mixed)}
      self.assertEqual(len(found) == 1, same)
