"""The noising processes and their tables.

A process has S steps, the least noisy first. At step t an example becomes
x_t = signal_t x_0 + spread_t noise. Tables are float64 NumPy arrays; `lookup`
rounds values to float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.dit import FLOW, SCHEDULES, spaced_timesteps
from moh_jax.models.flow import Flow, even_times

# At a lower log-SNR examples are noise alone. A cosine schedule goes down to
# -20, where a solver's steps would be wasted.
_LOWEST_LOG_SNR = -10.2


@dataclasses.dataclass(frozen=True, eq=False)
class Process:
  """A diffusion process, the one of training or one with fewer steps.

  signal_t = sqrt(a_t) and spread_t = sqrt(1 - a_t) with a_t the cumulative
  product of 1 - beta (arXiv:2006.11239).

  Attributes:
    timesteps: [S] the network's input t at each step, ascending: int32 steps of
      the training process, or float32 times between two of them.
    alphas_cumprod: [S] float64 a_t, descending.
  """

  timesteps: np.ndarray
  alphas_cumprod: np.ndarray

  @property
  def num_steps(self) -> int:
    """S."""
    return len(self.timesteps)

  def first(self, steps: int) -> "Process":
    """The least noisy steps alone."""
    return Process(self.timesteps[:steps], self.alphas_cumprod[:steps])

  @functools.cached_property
  def signal(self) -> np.ndarray:
    """Weight of the clean example, [S]."""
    return np.sqrt(self.alphas_cumprod)

  @functools.cached_property
  def spread(self) -> np.ndarray:
    """Weight of the noise, [S]."""
    return np.sqrt(1.0 - self.alphas_cumprod)

  @functools.cached_property
  def alphas_cumprod_prev(self) -> np.ndarray:
    """The a_t of the step before, [S]; 1 before the first."""
    return np.append(1.0, self.alphas_cumprod[:-1])

  @functools.cached_property
  def betas(self) -> np.ndarray:
    """Noise variance that each step adds, [S]."""
    return 1.0 - self.alphas_cumprod / self.alphas_cumprod_prev

  @functools.cached_property
  def posterior_variance(self) -> np.ndarray:
    """Variance of q(x_{t-1} | x_t, x_0), [S]; 0 at the first step."""
    shrink = (1.0 - self.alphas_cumprod_prev) / (1.0 - self.alphas_cumprod)
    return self.betas * shrink

  @functools.cached_property
  def posterior_log_variance(self) -> np.ndarray:
    """Logarithm of the posterior variance, [S].

    At the first step it would be -inf: the second step's stands in.
    """
    variance = self.posterior_variance
    if self.num_steps == 1:
      return np.log(self.betas)
    return np.log(np.append(variance[1], variance[1:]))

  @functools.cached_property
  def posterior_mean_x0(self) -> np.ndarray:
    """Weight of x_0 in the posterior's mean, [S]."""
    shrink = np.sqrt(self.alphas_cumprod_prev) / (1.0 - self.alphas_cumprod)
    return self.betas * shrink

  @functools.cached_property
  def posterior_mean_xt(self) -> np.ndarray:
    """Weight of x_t in the posterior's mean, [S]."""
    left = (1.0 - self.alphas_cumprod_prev) / (1.0 - self.alphas_cumprod)
    return left * np.sqrt(1.0 - self.betas)

  @functools.cached_property
  def snr(self) -> np.ndarray:
    """Signal-to-noise ratio a / (1 - a), [S]."""
    return self.alphas_cumprod / (1.0 - self.alphas_cumprod)


AnyProcess = Process | Flow


def make_process(schedule: str, steps: int) -> AnyProcess:
  """Makes the training process.

  Args:
    schedule: "linear", betas from 1e-4 to 0.02 over 1000 steps, scaled for
      other numbers (arXiv:2006.11239); "cosine" (arXiv:2102.09672); or "flow",
      with the times 1/S, 2/S, ..., 1.
    steps: S.

  Raises:
    ValueError: an unknown schedule.
  """
  if schedule == FLOW:
    return even_times(steps, steps)
  if schedule == "linear":
    scale = 1000 / steps
    betas = np.linspace(scale * 1e-4, scale * 0.02, steps)
  elif schedule == "cosine":
    times = np.arange(steps + 1) / steps
    level = np.cos((times + 0.008) / 1.008 * np.pi / 2) ** 2
    betas = np.minimum(1 - level[1:] / level[:-1], 0.999)
  else:
    raise ValueError(f"schedule={schedule!r} must be one of {SCHEDULES}")
  return Process(np.arange(steps, dtype=np.int32), np.cumprod(1.0 - betas))


def respace(process: Process, spacing: str | int) -> Process:
  """Makes a process of some of the steps of another.

  Args:
    process: the training process.
    spacing: "N", N steps spread evenly from the first to the last; "ddimN",
      N steps at a fixed stride from the first (arXiv:2010.02502); or
      "N,M,...", that many from each of equal sections.

  Raises:
    ValueError: more steps than the process (or a section) has, or a stride
      that no integer gives.
  """
  kept = np.array(spaced_timesteps(process.num_steps, str(spacing)))
  return Process(process.timesteps[kept], process.alphas_cumprod[kept])


def even_log_snr(process: Process, steps: int) -> Process:
  """Makes a process whose steps have equal distances in log-SNR.

  These suit a multistep solver, whose error grows with the distance
  (arXiv:2211.01095). The noise levels lie between timesteps of training.

  Args:
    process: the training process.
    steps: number of steps, from the noisiest level of the process, but not
      below a log-SNR of -10.2, to the cleanest.
  """
  log_snr = np.log(process.snr)  # descending
  lowest = max(log_snr[-1], _LOWEST_LOG_SNR)
  levels = np.linspace(lowest, log_snr[0], steps)[::-1]
  times = np.interp(-levels, -log_snr, process.timesteps)
  return Process(times.astype(np.float32), 1.0 / (1.0 + np.exp(-levels)))


def lookup(table: np.ndarray, t: jax.Array, ndim: int) -> jax.Array:
  """Looks up steps t [B] in a table [S]: float32 [B, 1, ...] of rank ndim."""
  values = jnp.asarray(table, jnp.float32)[t]
  return values.reshape(values.shape + (1,) * (ndim - values.ndim))


def q_sample(
  process: AnyProcess, x0: jax.Array, t: jax.Array, noise: jax.Array
) -> jax.Array:
  """Adds noise to clean examples.

  Args:
    process: S steps.
    x0: [B, ...] clean examples.
    t: [B] int steps.
    noise: [B, ...] standard normal noise.

  Returns:
    x_t [B, ...].
  """
  signal = lookup(process.signal, t, x0.ndim)
  spread = lookup(process.spread, t, x0.ndim)
  return signal * x0 + spread * noise
