"""Flow matching: its path, its target, and its solvers against exact ones."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.dit import FLOW_METHODS
from moh_jax.models.diffusion import (
  even_times,
  make_process,
  q_sample,
  training_losses,
  training_target,
)
from moh_jax.models.samplers import sample

_SHAPE = (3, 2, 2, 1)
_Z = jax.random.normal(jax.random.key(1), _SHAPE)
_X0 = jax.random.normal(jax.random.key(2), _SHAPE) / 2
_MEAN, _DEVIATION = 2.0, 0.5


def _gaussian(x, t):
  """Velocity of examples from N(2, 0.5^2); the network reads t times 1000."""
  t = (t / 1000).reshape(-1, 1, 1, 1)
  signal, variance = 1 - t, _DEVIATION**2
  gain = signal * variance / (signal**2 * variance + t**2)
  x0 = _MEAN + gain * (x - signal * _MEAN)
  noise = (x - signal * x0) / t
  return noise - x0


def _sample(predict, method, steps, **options):
  process = even_times(steps, 1000)
  run = functools.partial(sample, predict, process=process, method=method)
  return jax.jit(functools.partial(run, **options))(_Z)


class PathTest(parameterized.TestCase):
  def test_path_is_straight_from_example_to_noise(self):
    process = make_process("flow", 4)
    np.testing.assert_allclose(process.timesteps, [1, 2, 3, 4])
    x = q_sample(process, _X0, jnp.array([0, 1, 3]), _Z)
    for row, part in enumerate((0.25, 0.5, 1.0)):
      expected = (1 - part) * _X0[row] + part * _Z[row]
      np.testing.assert_allclose(x[row], expected, atol=1e-6)

  def test_target_is_the_derivative_of_the_path(self):
    process, t = make_process("flow", 1000), jnp.array([0, 500, 998])
    ahead, here = (q_sample(process, _X0, t + i, _Z) for i in (1, 0))
    target = training_target(process, "velocity", _X0, t, _Z)
    np.testing.assert_allclose(target, (ahead - here) * 1000, atol=2e-3)

  def test_loss_of_the_right_velocity_is_0(self):
    process, t = make_process("flow", 10), jnp.array([0, 5, 9])
    x = q_sample(process, _X0, t, _Z)
    losses = functools.partial(
      training_losses, process, "velocity", x0=_X0, x=x, t=t, noise=_Z
    )
    chex.assert_trees_all_close(losses(_Z - _X0)["weighted_mse"], jnp.zeros(3))
    np.testing.assert_allclose(losses(_Z - _X0 + 2)["mse"], 4, rtol=1e-5)
    self.assertNotIn("vb", losses(_Z))


class SolverTest(parameterized.TestCase):
  @parameterized.product(method=FLOW_METHODS, steps=(1, 7))
  def test_straight_lines_are_exact(self, method, steps):
    out = _sample(lambda x, t: _Z - _X0, method, steps)
    np.testing.assert_allclose(out, _X0, atol=1e-5)

  @parameterized.parameters(("euler", 0.06), ("heun", 0.002))
  def test_error_of_a_gaussian_falls_with_the_order(self, method, most):
    exact = _MEAN + _DEVIATION * _Z
    errors = [
      float(jnp.abs(_sample(_gaussian, method, n) - exact).max())
      for n in (20, 40)
    ]
    self.assertLess(errors[1], most)
    ratio = {"euler": 1.7, "heun": 3.0}[method]
    self.assertGreater(errors[0] / errors[1], ratio)

  def test_heun_with_20_steps_beats_euler_with_50(self):
    exact = _MEAN + _DEVIATION * _Z
    heun, euler = (
      float(jnp.abs(_sample(_gaussian, method, steps) - exact).max())
      for method, steps in (("heun", 20), ("euler", 50))
    )
    self.assertLess(heun, euler)

  @parameterized.parameters(*FLOW_METHODS)
  def test_network_reads_times_scaled_noisiest_first(self, method):
    told = []

    def predict(x, t):
      chex.assert_shape(t, (3,))
      told.append(float(t[0]))
      return x

    with jax.disable_jit():
      sample(predict, _Z, even_times(4, 1000), method=method)
    expected = {
      "euler": [1000, 750, 500, 250],
      "heun": [1000, 750, 750, 500, 500, 250, 250],
    }
    self.assertEqual(told, expected[method])

  @parameterized.parameters(*FLOW_METHODS)
  def test_clips_the_example(self, method):
    out = _sample(lambda x, t: _Z - 4 * _X0, method, 5, clip=True)
    np.testing.assert_allclose(out, jnp.clip(4 * _X0, -1, 1), atol=1e-4)

  def test_trajectory_ends_at_the_example(self):
    path = _sample(_gaussian, "heun", 5, trajectory=True)
    self.assertEqual(path.shape, (5, *_SHAPE))
    np.testing.assert_array_equal(path[-1], _sample(_gaussian, "heun", 5))

  def test_other_methods_are_refused(self):
    with self.assertRaisesRegex(ValueError, "'ddim' must be one of .*euler"):
      sample(_gaussian, _Z, even_times(4, 1000), method="ddim")
    with self.assertRaisesRegex(ValueError, "'heun' must be one of .*ddpm"):
      process = make_process("linear", 100)
      sample(_gaussian, _Z, process, method="heun")


if __name__ == "__main__":
  absltest.main()
