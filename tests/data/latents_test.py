import itertools

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import apply_overrides
from moh_jax.config.dit import LatentScaling
from moh_jax.data import latents, sources
from tests.data import tiny_sets
from tests.data.folder import FolderTest

_SCALING = LatentScaling(0.5)


class _LatentsTest(FolderTest):
  def setUp(self):
    super().setUp()
    for split in sources.SPLITS:
      tiny_sets.write_latents(self.root / split)
    self.config = tiny_sets.dit_config(path=self.root)

  def _batches(self, count):
    source = sources.make_source(self.config, "train")
    stream = tiny_sets.train_stream(self.config, source)
    return list(itertools.islice(stream, count))


class RefusalTest(_LatentsTest):
  @parameterized.parameters(np.inf, np.nan, 1e6)
  def test_what_float16_cannot_hold_is_refused(self, value):
    moments = tiny_sets.moments(0)
    moments[0, 0, 1, 2, 0] = value
    with self.assertRaisesRegex(ValueError, "not finite in float16"):
      latents.encode_moments(moments)

  @parameterized.parameters(
    ("diffusion", {"latent_scale": 0.13}, "latent_scale 0.13, not 0.5 as the"),
    (
      "model",
      {"input_size": (8, 8)},
      r"\(4, 4, 2\) \(images of 16 pixels\), the model takes \(8, 8, 2\)",
    ),
  )
  def test_latents_of_another_model(self, section, values, message):
    config = apply_overrides(self.config, section, **values)
    with self.assertRaisesRegex(ValueError, message):
      sources.make_source(config, "train")


class TransformTest(absltest.TestCase):
  def test_samples_have_the_posteriors_mean_and_variance(self):
    element = {"image": tiny_sets.moments(3).astype(np.float16), "label": 1}
    transform = latents.SampleLatent(_SCALING)
    rngs = map(np.random.default_rng, range(2000))
    samples = [transform.random_map(element, r)["image"] for r in rngs]
    samples = np.stack(samples)
    noise = samples - np.sign(samples) * 30 * 0.5
    std = 0.5 * np.exp(-2)
    self.assertEqual(samples.dtype, np.float32)
    np.testing.assert_allclose(noise.mean(0), 0, atol=5 * std / 2000**0.5)
    np.testing.assert_allclose(noise.std(0), std, rtol=0.1)
    self.assertAlmostEqual(noise.std(), std, delta=0.01 * std)

  def test_shift_and_statistics_of_channels(self):
    moments = np.zeros((2, 2, 1, 1, 2), np.float16)
    moments[0, 0] = (5.0, -1.0)
    scaling = LatentScaling(0.5, shift=0.25, mean=(1.0, 2.0), std=(2.0, 4.0))
    out = latents.MeanLatent(scaling).map({"image": moments, "label": 0})
    # ((5 - 1) / 2 - 0.25) * 0.5 and ((-1 - 2) / 4 - 0.25) * 0.5.
    np.testing.assert_allclose(out["image"][0, 0], (0.875, -0.5))


class StreamTest(_LatentsTest):
  def test_damaged_record_is_skipped_or_named(self):
    path = self.root / "train" / "00001-of-00003.array_record"
    content = path.read_bytes()
    value = np.float16(50).tobytes() * 32  # the means of example 5
    self.assertEqual(content.count(value), 1)
    path.write_bytes(content.replace(value, b"\0" * len(value)))
    with self.assertRaisesRegex(ValueError, r"array_record\[1\]: damaged"):
      self._batches(3)
    self.config = apply_overrides(self.config, "data", bad_images="skip")
    images = np.concatenate([b["image"] for b in self._batches(5)])
    items = np.round(np.abs(images.mean((1, 2, 3))) / 5).astype(int)
    self.assertEqual((items == 6).sum(), 4)
    self.assertEqual((items == 5).sum(), 0)


if __name__ == "__main__":
  absltest.main()
