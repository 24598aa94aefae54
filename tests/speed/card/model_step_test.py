"""Batches that fill the card, and what is reported of a step."""

import types
from unittest import mock

import jax
from absl.testing import absltest, parameterized

from moh_jax.speed.card import model_step
from moh_jax.speed.card.scale import scale_for

_CASE = scale_for("cpu").models[0]


class BatchTest(parameterized.TestCase):
  @parameterized.parameters(
    (None, 128), (80e9, 128), (140e9, 128), (79e9, 64), (16e9, 16), (1e9, 1)
  )
  def test_begins_in_proportion_to_the_memory(self, memory, expected):
    with mock.patch.object(model_step, "stated_bytes", lambda _: memory):
      self.assertEqual(model_step._first_batch(128), expected)

  def test_steps_down_until_it_fits(self):
    tried = []

    def measure(case, batch, peak):
      tried.append(batch)
      if batch > 16:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 90 GB")
      return {"batch": batch}

    case = types.SimpleNamespace(batch=64)
    with mock.patch.object(model_step, "_measure", measure):
      self.assertEqual(model_step.measure(case, 1.0), {"batch": 16})
    self.assertEqual(tried, [64, 32, 16])

  @parameterized.parameters(("RESOURCE_EXHAUSTED", 3), ("INTERNAL: ptxas", 1))
  def test_other_errors_and_one_example_are_errors(self, message, calls):
    error = jax.errors.JaxRuntimeError(message)
    case = types.SimpleNamespace(batch=4)
    with mock.patch.object(
      model_step, "_measure", side_effect=error
    ) as measure:
      with self.assertRaisesRegex(jax.errors.JaxRuntimeError, message):
        model_step.measure(case, 1.0)
    self.assertEqual(measure.call_count, calls)

  @parameterized.parameters((600, None), (1200, 16), (4000, 4), (100_000, 1))
  def test_the_compiler_s_figures_tell_the_next_batch(self, temporary, batch):
    memory = types.SimpleNamespace(
      argument_size_in_bytes=150, temp_size_in_bytes=temporary
    )
    with mock.patch.object(model_step, "stated_bytes", lambda _: 1000):
      if batch is None:
        model_step._check_memory(memory, 32)
        return
      with self.assertRaises(model_step._TooLargeError) as raised:
        model_step._check_memory(memory, 32)
    self.assertEqual(raised.exception.args, (batch,))


class StepTest(absltest.TestCase):
  def test_step_has_its_figures(self):
    with (
      mock.patch.object(model_step, "_SECONDS", 0.0),
      mock.patch.object(model_step, "published_peak", lambda kind: 4e9),
    ):
      result = model_step.measure(_CASE, 1e15)
      slow = model_step.measure(_CASE, 1.0)
    self.assertEqual((result["batch"], result["unit"]), (2, "tokens"))
    seconds = result["step_ms"] / 1e3
    self.assertAlmostEqual(result["units_per_second"] * seconds, 2 * 16)
    rate = result["flops"] / seconds
    self.assertAlmostEqual(result["peak_share"], rate / 1e15)
    self.assertEqual(slow["peak_share"], 1.0)  # of a peak that was measured low
    self.assertAlmostEqual(result["mfu"], rate / 4e9)
    self.assertIsNone(result["fault"])


if __name__ == "__main__":
  absltest.main()
