"""Flow matching: the straight path from examples to noise, and its solvers."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.models.guidance import Predict


@dataclasses.dataclass(frozen=True, eq=False)
class Flow:
  """The straight path from an example to noise: signal 1 - t, spread t.

  Its velocity, noise - x_0, is what flow matching learns (arXiv:2210.02747).

  Attributes:
    times: [S] float64 t of each step, ascending, in (0, 1].
    scale: the network reads t times this.
  """

  times: np.ndarray
  scale: int

  @property
  def num_steps(self) -> int:
    """S."""
    return len(self.times)

  def first(self, steps: int) -> "Flow":
    """The least noisy steps alone."""
    return Flow(self.times[:steps], self.scale)

  @property
  def timesteps(self) -> np.ndarray:
    """[S] float32, the network's input t at each step."""
    return (self.times * self.scale).astype(np.float32)

  @property
  def signal(self) -> np.ndarray:
    """Weight of the clean example, [S]."""
    return 1.0 - self.times

  @property
  def spread(self) -> np.ndarray:
    """Weight of the noise, [S]."""
    return self.times


def even_times(steps: int, scale: int) -> Flow:
  """Makes a straight path of `steps` equal steps from noise to example."""
  return Flow(np.arange(1, steps + 1) / steps, scale)


def flow_step(
  predict: Predict, process: Flow, method: str, clip: bool
) -> Callable[[jax.Array, jax.Array], jax.Array]:
  """Makes a step of a solver of dx/dt = velocity(x, t), from noise to example.

  Args:
    predict: (x [B, ...], t [B]) -> velocity [B, ...].
    process: the steps.
    method: "euler", or "heun": the mean of the velocities at both ends, where
      the last step, to the example, has that of its beginning alone.
    clip: whether to clip the clean example that a velocity leads to.

  Returns:
    (x, number of the step) -> x of the step before.
  """
  times = jnp.asarray(process.times, jnp.float32)
  gaps = jnp.asarray(np.diff(process.times, prepend=0.0), jnp.float32)
  inputs = jnp.asarray(process.timesteps)

  def velocity(x: jax.Array, step: jax.Array) -> jax.Array:
    value = predict(x, jnp.broadcast_to(inputs[step], x.shape[:1]))
    if not clip:
      return value
    clean = jnp.clip(x - times[step] * value, -1.0, 1.0)
    return (x - clean) / times[step]

  def euler(x: jax.Array, step: jax.Array) -> jax.Array:
    return x - gaps[step] * velocity(x, step)

  def heun(x: jax.Array, step: jax.Array) -> jax.Array:
    first = velocity(x, step)
    reached = x - gaps[step] * first

    def corrected() -> jax.Array:
      second = velocity(reached, step - 1)
      return x - gaps[step] * (first + second) / 2

    return jax.lax.cond(step > 0, corrected, lambda: reached)

  return {"euler": euler, "heun": heun}[method]
