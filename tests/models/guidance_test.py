"""Classifier-free guidance: what is evaluated, and what is moved."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.models import samplers

_B, _NO_LABEL = 2, 5
_LABELS = jnp.array([3, 1])


@jax.jit
def _predict(x, t, labels):
  """Depends on every input; the last channel tells an example's label."""
  number = labels.astype(jnp.float32)[:, None, None, None]
  time = t.astype(jnp.float32)[:, None, None, None]
  told = 0 * x[..., :1] + number
  return jnp.concatenate([x + number * x**2 + time, told], -1)


class Counter:
  """A network that keeps the batch sizes it was evaluated with."""

  def __init__(self):
    self.batches = []

  def __call__(self, x, t, labels):
    chex.assert_equal_shape_prefix((x, t, labels), 1)
    self.batches.append(len(x))
    return _predict(x, t, labels)


def _x(channels: int = 4) -> jax.Array:
  return jax.random.normal(jax.random.key(0), (_B, 2, 3, channels))


def _t(step: int) -> jax.Array:
  return jnp.full(_B, step)


def _guide(predict=_predict, **options):
  return samplers.guide(predict, _LABELS, _NO_LABEL, **options)


@functools.partial(jax.jit, static_argnames=("scale", "count"))
def _expected(x, t, scale, count):
  """Guided by hand, two evaluations; only the first `count` channels."""
  labelled = _predict(x, t, _LABELS)
  free = _predict(x, t, jnp.full(_B, _NO_LABEL))
  moved = free + scale * (labelled - free)
  return jnp.concatenate([moved[..., :count], labelled[..., count:]], -1)


class GuideTest(parameterized.TestCase):
  @parameterized.parameters(
    ("three", 4, 3), ("all", 4, 4), ("three", 2, 2), ("all", 1, 1)
  )
  def test_moves_these_channels_and_no_other(self, channels, size, count):
    x, t = _x(size), _t(7)
    out = jax.jit(_guide(scale=2.5, channels=channels))(x, t)
    expected = _expected(x, t, 2.5, count)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    # The variance, after the prediction, is the labelled one.
    labelled = _predict(x, t, _LABELS)
    chex.assert_trees_all_close(out[..., count:], labelled[..., count:])

  def test_three_channels_are_the_default(self):
    x, t = _x(), _t(0)
    chex.assert_trees_all_equal(
      _guide(scale=3.0)(x, t), _guide(scale=3.0, channels="three")(x, t)
    )

  @parameterized.parameters(None, ((0, 5),))
  def test_scale_one_is_the_labelled_network_evaluated_once(self, interval):
    network = Counter()
    out = _guide(network, scale=1, interval=interval)(_x(), _t(2))
    chex.assert_trees_all_equal(out, _predict(_x(), _t(2), _LABELS))
    self.assertEqual(network.batches, [_B])

  def test_guidance_is_one_evaluation_of_twice_the_batch(self):
    network = Counter()
    jax.eval_shape(_guide(network, scale=1.5), _x(), _t(2))
    self.assertEqual(network.batches, [2 * _B])

  def test_unknown_channels_list_the_known(self):
    with self.assertRaisesRegex(
      ValueError, r"channels='four' must be one of \('three', 'all'\)"
    ):
      _guide(scale=2.0, channels="four")


class IntervalTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, False), (9, False), (10, True), (19, True), (20, False), (99, False)
  )
  def test_guides_from_low_to_before_high(self, step, guided):
    x, t = _x(), _t(step)
    out = jax.jit(_guide(scale=4.0, interval=(10, 20)))(x, t)
    expected = _expected(x, t, 4.0, 3) if guided else _predict(x, t, _LABELS)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)

  def test_both_ways_are_branches_of_one_conditional(self):
    network = Counter()
    predict = _guide(network, scale=4.0, interval=(10, 20))
    program = str(jax.make_jaxpr(predict)(_x(), _t(0)))
    self.assertEqual(program.count("cond["), 1)
    self.assertCountEqual(set(network.batches), {_B, 2 * _B})

  def test_without_an_interval_there_is_no_conditional(self):
    program = str(jax.make_jaxpr(_guide(scale=4.0))(_x(), _t(0)))
    self.assertNotIn("cond[", program)


class DropLabelsTest(parameterized.TestCase):
  @parameterized.parameters(0.1, 0.5)
  def test_drops_this_share(self, rate):
    labels = jnp.arange(20_000) % _NO_LABEL
    kept = samplers.drop_labels(jax.random.key(0), labels, _NO_LABEL, rate)
    chex.assert_type(kept, labels.dtype)
    dropped = np.asarray(kept == _NO_LABEL)
    self.assertAlmostEqual(dropped.mean(), rate, delta=0.015)
    chex.assert_trees_all_equal(kept[~dropped], labels[~dropped])

  def test_rate_zero_keeps_all(self):
    kept = samplers.drop_labels(jax.random.key(0), _LABELS, _NO_LABEL, 0.0)
    chex.assert_trees_all_equal(kept, _LABELS)

  def test_key_decides_what_is_dropped(self):
    labels = jnp.zeros(100, jnp.int32)

    def drop(seed):
      return samplers.drop_labels(jax.random.key(seed), labels, _NO_LABEL, 0.5)

    chex.assert_trees_all_equal(drop(0), drop(0))
    self.assertGreater(int((drop(0) != drop(1)).sum()), 10)


if __name__ == "__main__":
  absltest.main()
