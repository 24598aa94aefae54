import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.evaluation.means import mean_metrics

_VALUES = np.float32([1, 2, 3, 10, 20, 30, -4])


def _step(params, batch):
  """Sums of the values and of their squares, times the parameter."""
  mask, value = batch["mask"], batch["value"] * params
  return {
    "examples": mask.sum(),
    "value": (value * mask).sum(),
    "square": (value**2 * mask).sum(),
  }


def _batches(size, values=_VALUES, filler=0.0):
  """Batches of `size`, the last one filled up with masked examples."""
  count = -(-len(values) // size) * size
  padded = np.full(count, filler, np.float32)
  padded[: len(values)] = values
  mask = np.float32(np.arange(count) < len(values))
  for start in range(0, count, size):
    part = slice(start, start + size)
    yield {"value": jnp.array(padded[part]), "mask": jnp.array(mask[part])}


class MeanMetricsTest(parameterized.TestCase):
  @parameterized.parameters(1, 2, 3, 7, 16)
  def test_are_means_over_the_examples_in_batches_of_any_size(self, size):
    metrics = mean_metrics(_step, 2.0, _batches(size))
    expected = {
      "value": 2 * _VALUES.mean(),
      "square": 4 * np.square(_VALUES).mean(),
      "examples": 7,
    }
    self.assertEqual(metrics.keys(), expected.keys())
    for name, value in expected.items():
      self.assertAlmostEqual(metrics[name], value, places=4, msg=name)

  def test_padding_counts_nothing(self):
    quiet, loud = (
      mean_metrics(_step, 1.0, _batches(4, filler=filler))
      for filler in (0.0, 1e6)
    )
    self.assertEqual(quiet, loud)

  def test_are_plain_numbers(self):
    metrics = mean_metrics(_step, 1.0, _batches(4))
    self.assertIsInstance(metrics["examples"], int)
    self.assertIsInstance(metrics["value"], float)

  def test_are_summed_in_double_precision(self):
    ones = np.float32([2**25, 1, 1, 1, 1])  # 2**25 + 1 is no float32
    metrics = mean_metrics(_step, 1.0, _batches(1, ones))
    self.assertEqual(metrics["value"], (2**25 + 4) / 5)

  def test_empty_split_is_refused(self):
    with self.assertRaisesRegex(ValueError, "split to evaluate is empty"):
      mean_metrics(_step, 1.0, [])


if __name__ == "__main__":
  absltest.main()
