import itertools
import pathlib
import pickle
import tempfile

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import apply_overrides
from moh_jax.config.autoencoder import LatentScaling
from moh_jax.data import latents, sources
from tests.data.text import tiny_sets

_SCALING = LatentScaling(0.5)


class _LatentsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    for split in sources.SPLITS:
      tiny_sets.write_latents(self.root / split)
    self.config = tiny_sets.dit_config(path=self.root)

  def _batches(self, count, position=0, rows=None):
    source = sources.make_source(self.config, "train")
    stream = tiny_sets.train_stream(self.config, source, rows)
    stream.seek(position)
    return list(itertools.islice(stream, count))


class SourceTest(_LatentsTest):
  def test_records_hold_both_posteriors(self):
    source = latents.LatentSource(str(self.root), "train")
    self.assertLen(source, 10)
    for i in range(10):
      np.testing.assert_array_equal(source[i]["image"], tiny_sets.moments(i))
      self.assertEqual(source[i]["label"], i % 2)

  def test_pickles(self):
    source = latents.LatentSource(str(self.root), "train")
    copy = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(copy[3]["image"], source[3]["image"])

  @parameterized.parameters(np.inf, np.nan, 1e6)
  def test_what_float16_cannot_hold_is_refused(self, value):
    moments = tiny_sets.moments(0)
    moments[0, 0, 1, 2, 0] = value
    with self.assertRaisesRegex(ValueError, "not finite in float16"):
      latents.encode_moments(moments)


class RefusalTest(_LatentsTest):
  def _refused(self, message, config=None):
    with self.assertRaisesRegex((ValueError, FileNotFoundError), message):
      sources.make_source(config or self.config, "train")

  def test_another_scale(self):
    config = apply_overrides(self.config, "diffusion", latent_scale=0.13)
    self._refused(
      "the model has diffusion.latent_scale 0.13, not 0.5 as the latents",
      config,
    )

  def test_another_size(self):
    config = apply_overrides(self.config, "model", input_size=(8, 8))
    self._refused(
      r"\(4, 4, 2\) \(images of 16 pixels\), the model takes \(8, 8, 2\)",
      config,
    )

  def test_other_channels(self):
    config = apply_overrides(self.config, "model", channels=4)
    self._refused(r"the model takes \(4, 4, 4\)", config)

  def test_another_number_of_classes(self):
    config = apply_overrides(self.config, "model", num_classes=3)
    self._refused(r"2 classes \(.*\), must be model.num_classes=3", config)

  def test_missing_split(self):
    config = apply_overrides(self.config, "data", path=str(self.root / "train"))
    self._refused(
      "train/train: no such directory; `python -m moh_jax enc",
      config,
    )

  def test_missing_shard(self):
    (self.root / "train" / "00001-of-00003.array_record").unlink()
    self._refused("lacks 1 of its 3 shards: 00001-of-00003.array_record")

  def test_truncated_shard(self):
    path = self.root / "train" / "00001-of-00003.array_record"
    path.write_bytes(path.read_bytes()[:-1])
    self._refused("truncated.*00001-of-00003.array_record")


class TransformTest(absltest.TestCase):
  def _sample(self, count=2000):
    element = {"image": tiny_sets.moments(3).astype(np.float16), "label": 1}
    transform = latents.SampleLatent(_SCALING)
    rngs = (np.random.default_rng(seed) for seed in range(count))
    return np.stack([transform.random_map(element, r)["image"] for r in rngs])

  def test_half_are_mirrored(self):
    samples = self._sample()
    signs = np.sign(samples)
    self.assertTrue((signs == signs[:, :1, :1, :1]).all())
    self.assertBetween((signs[:, 0, 0, 0] < 0).mean(), 0.46, 0.54)

  def test_samples_have_the_posteriors_mean_and_variance(self):
    samples = self._sample()
    noise = samples - np.sign(samples) * 30 * 0.5
    std = 0.5 * np.exp(-2)
    self.assertEqual(samples.dtype, np.float32)
    np.testing.assert_allclose(noise.mean(0), 0, atol=5 * std / 2000**0.5)
    np.testing.assert_allclose(noise.std(0), std, rtol=0.1)
    self.assertAlmostEqual(noise.std(), std, delta=0.01 * std)

  def test_noise_of_positions_is_independent(self):
    noise = (self._sample() % 1).reshape(2000, -1)
    correlation = np.corrcoef(noise.T) - np.eye(noise.shape[1])
    self.assertLess(np.abs(correlation).max(), 0.15)

  def test_evaluation_takes_the_mean(self):
    element = {"image": tiny_sets.moments(3).astype(np.float16), "label": 1}
    out = latents.MeanLatent(_SCALING).map(element)
    np.testing.assert_array_equal(out["image"], np.full(tiny_sets.SHAPE, 15))
    self.assertEqual(out["image"].dtype, np.float32)
    self.assertEqual(out["label"], 1)

  def test_shift_and_statistics_of_channels(self):
    moments = np.zeros((2, 2, 1, 1, 2), np.float16)
    moments[0, 0] = (5.0, -1.0)
    scaling = LatentScaling(0.5, shift=0.25, mean=(1.0, 2.0), std=(2.0, 4.0))
    out = latents.MeanLatent(scaling).map({"image": moments, "label": 0})
    # ((5 - 1) / 2 - 0.25) * 0.5 and ((-1 - 2) / 4 - 0.25) * 0.5.
    np.testing.assert_allclose(out["image"][0, 0], (0.875, -0.5))

  def test_pickle(self):
    for transform in (
      latents.SampleLatent(_SCALING),
      latents.MeanLatent(_SCALING),
    ):
      self.assertEqual(pickle.loads(pickle.dumps(transform)), transform)


class StreamTest(_LatentsTest):
  def test_batches_are_scaled_latents(self):
    (batch,) = self._batches(1)
    self.assertEqual(batch["image"].shape, (4, *tiny_sets.SHAPE))
    self.assertEqual(batch["image"].dtype, np.float32)
    self.assertEqual(batch["label"].dtype, np.int32)
    for latent, label in zip(batch["image"], batch["label"]):
      item = abs(latent.mean()) / 5
      self.assertAlmostEqual(item, round(item), delta=0.05)
      self.assertEqual(round(item) % 2, label)

  def test_seek_continues_with_the_same_samples(self):
    whole = self._batches(7)
    for ours, theirs in zip(self._batches(4, position=3), whole[3:]):
      np.testing.assert_array_equal(ours["image"], theirs["image"])
      np.testing.assert_array_equal(ours["label"], theirs["label"])

  def test_processes_share_each_global_batch(self):
    whole = self._batches(5)
    parts = [self._batches(5, rows=rows) for rows in ((0, 1), (2, 3))]
    for step, batch in enumerate(whole):
      for name in batch:
        joined = np.concatenate([part[step][name] for part in parts])
        np.testing.assert_array_equal(joined, batch[name])

  def test_an_epoch_is_read_once(self):
    config = apply_overrides(self.config, "data", batch_size=5)
    self.config = config
    images = np.concatenate([b["image"] for b in self._batches(2)])
    items = np.round(np.abs(images.mean((1, 2, 3))) / 5)
    self.assertCountEqual(items, range(10))

  def test_evaluation_is_not_random(self):
    source = sources.make_source(self.config, "val")
    batches = list(tiny_sets.eval_stream(self.config, source))
    images = np.concatenate([batch["image"] for batch in batches])
    self.assertLen(images, 12)
    for item in range(10):
      np.testing.assert_array_equal(images[item], 5 * item)

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

  def test_random_latents_pass_as_they_are(self):
    config = tiny_sets.dit_config(source="fake", fake_examples=4)
    source = sources.make_source(config, "train")
    batch = next(tiny_sets.train_stream(config, source))
    stored = np.stack([source[i]["image"] for i in range(4)])
    self.assertCountEqual(batch["image"].tolist(), stored.tolist())
    (held_out,) = tiny_sets.eval_stream(config, source)
    np.testing.assert_array_equal(held_out["image"], stored)


class PosteriorTest(absltest.TestCase):
  def test_noise_is_scaled_by_the_deviation_and_shifted_by_the_mean(self):
    mean, log_variance = np.ones(2), 2 * np.log(np.full(2, 3.0))
    drawn = latents.sample_posterior(mean, log_variance, np.array([1.0, -2.0]))
    np.testing.assert_allclose(drawn, [4.0, -5.0], rtol=1e-12)


if __name__ == "__main__":
  absltest.main()
