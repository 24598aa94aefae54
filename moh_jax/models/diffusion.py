"""Diffusion: noising processes, what a network predicts, and its losses.

A process has S steps, the least noisy first. At step t an example becomes
x_t = signal_t x_0 + spread_t noise. Tables are float64 NumPy arrays; `lookup`
rounds values to float32.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import DiffusionConfig
from moh_jax.config.dit import FLOW, spaced_timesteps

# At a lower log-SNR examples are noise alone. A cosine schedule goes down to
# -20, where a solver's steps would be wasted.
_LOWEST_LOG_SNR = -10.2


@dataclasses.dataclass(frozen=True, eq=False)
class Process:
  """A diffusion process, the one of training or one with fewer steps.

  signal_t = sqrt(a_t) and spread_t = sqrt(1 - a_t) with a_t the cumulative
  product of 1 - beta (arXiv:2006.11239).

  Attributes:
    timesteps: [S] int32 steps of the training process, or float32 times between
      two of them.
    alphas_cumprod: [S] float64 a_t, descending.
  """

  timesteps: np.ndarray
  alphas_cumprod: np.ndarray

  # Weights of the clean example and of the noise, and the a_t of the step
  # before (1 before the first), [S].
  signal = functools.cached_property(lambda self: np.sqrt(self.alphas_cumprod))
  spread = functools.cached_property(
    lambda self: np.sqrt(1.0 - self.alphas_cumprod)
  )
  alphas_cumprod_prev = functools.cached_property(
    lambda self: np.append(1.0, self.alphas_cumprod[:-1])
  )

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
    if len(variance) == 1:
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

  @property
  def log_snr(self) -> np.ndarray:
    """Logarithm of the signal-to-noise ratio a / (1 - a), [S], descending."""
    return np.log(self.alphas_cumprod / (1.0 - self.alphas_cumprod))


@dataclasses.dataclass(frozen=True, eq=False)
class Flow:
  """The straight path from an example to noise: signal 1 - t, spread t.

  Its velocity, noise - x_0, is what flow matching learns (arXiv:2210.02747).

  Attributes:
    timesteps: [S] float32, the network's input, a multiple of t.
    times: [S] float64 t of each step, ascending, in (0, 1].
  """

  timesteps: np.ndarray
  times: np.ndarray

  signal = property(lambda self: 1.0 - self.times)  # weight of the example, [S]
  spread = property(lambda self: self.times)  # weight of the noise, [S]


# Steps between an example and noise: `timesteps` [S] are the network's input t
# at each step, ascending; `signal` and `spread` [S] the weights of both.
AnyProcess = Process | Flow


def even_times(steps: int, scale: int) -> Flow:
  """Makes a straight path of equal steps; the network reads t times `scale`."""
  times = np.arange(1, steps + 1) / steps
  return Flow((times * scale).astype(np.float32), times)


def make_process(schedule: str, steps: int) -> AnyProcess:
  """Makes the training process.

  Args:
    schedule: "linear", betas from 1e-4 to 0.02 over 1000 steps, scaled for
      other numbers (arXiv:2006.11239); "cosine" (arXiv:2102.09672); or "flow",
      with the times 1/S, 2/S, ..., 1.
    steps: S.
  """
  if schedule == FLOW:
    return even_times(steps, steps)
  if schedule == "linear":
    scale = 1000 / steps
    betas = np.linspace(scale * 1e-4, scale * 0.02, steps)
  else:
    times = np.arange(steps + 1) / steps
    level = np.cos((times + 0.008) / 1.008 * np.pi / 2) ** 2
    betas = np.minimum(1 - level[1:] / level[:-1], 0.999)
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
  kept = np.array(spaced_timesteps(len(process.timesteps), str(spacing)))
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
  log_snr = process.log_snr
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


class Reverse(NamedTuple):
  """The Gaussian p(x_{t-1} | x_t) and the clean example that it is based on.

  Attributes:
    mean: [B, ...] mean of the Gaussian.
    log_variance: logarithm of its variance, broadcastable to the mean.
    x0: [B, ...] predicted clean example, after clipping.
  """

  mean: jax.Array
  log_variance: jax.Array
  x0: jax.Array


def split_output(out: jax.Array, channels: int) -> tuple:
  """Splits a network's output into the prediction and the variance output.

  Args:
    out: [B, X, Y, channels or 2 * channels].
    channels: channels of an example.

  Returns:
    The first [B, X, Y, channels]; and the rest, or None if nothing is left.
  """
  if out.shape[-1] == channels:
    return out, None
  return out[..., :channels], out[..., channels:]


def training_target(
  process: AnyProcess,
  prediction: str,
  x0: jax.Array,
  t: jax.Array,
  noise: jax.Array,
) -> jax.Array:
  """What the network should predict at step t.

  Args:
    process: S steps.
    prediction: "epsilon", "x0", "v" or "velocity".
    x0: [B, ...] clean examples.
    t: [B] int steps.
    noise: [B, ...] noise that was added.

  Returns:
    [B, ...].
  """
  if prediction == "epsilon":
    return noise
  if prediction == "x0":
    return x0
  if prediction == "velocity":
    return noise - x0
  signal = lookup(process.signal, t, x0.ndim)
  spread = lookup(process.spread, t, x0.ndim)
  return signal * noise - spread * x0  # v, arXiv:2202.00512


def predict_x0(
  process: Process,
  prediction: str,
  out: jax.Array,
  x: jax.Array,
  t: jax.Array,
  *,
  clip: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """Computes the clean example from a network's output.

  Args:
    process: S steps.
    prediction: "epsilon", "x0" or "v".
    out: [B, ..., channels or 2 * channels], the network's output.
    x: [B, ..., channels] x_t.
    t: [B] int steps of the process.
    clip: whether to clip the example to [-1, 1].

  Returns:
    [B, ..., channels]; and the output for the variance, None without one.
  """
  x0, spread = split_output(out, x.shape[-1])
  if prediction != "x0":
    of_x, of_output = process.signal, process.spread
    if prediction == "epsilon":
      level = process.alphas_cumprod
      of_x, of_output = np.sqrt(1.0 / level), np.sqrt(1.0 / level - 1)
    x0 = lookup(of_x, t, x.ndim) * x - lookup(of_output, t, x.ndim) * x0
  return (jnp.clip(x0, -1.0, 1.0) if clip else x0), spread


def reverse_step(
  process: Process,
  prediction: str,
  out: jax.Array,
  x: jax.Array,
  t: jax.Array,
  *,
  clip: bool = False,
) -> Reverse:
  """Computes the Gaussian p(x_{t-1} | x_t) from a network's output.

  The logarithm of a learned variance interpolates between those of the
  posterior variance and beta (arXiv:2102.09672). Without a learned variance it
  is beta.

  Args:
    process: S steps.
    prediction: "epsilon", "x0" or "v".
    out: [B, X, Y, channels or 2 * channels], the network's output.
    x: [B, X, Y, channels] x_t.
    t: [B] int steps of the process.
    clip: whether to clip the predicted clean example to [-1, 1].

  Returns:
    The Gaussian.
  """
  x0, spread = predict_x0(process, prediction, out, x, t, clip=clip)
  mean = posterior_mean(process, x0, x, t)
  low = process.posterior_log_variance
  if spread is None:
    # Beta; at the first step, as released, the posterior variance.
    table = np.append(low[0], np.log(process.betas[1:]))
    return Reverse(mean, lookup(table, t, x.ndim), x0)
  share = (spread + 1.0) / 2.0
  high = lookup(np.log(process.betas), t, x.ndim)
  return Reverse(mean, share * high + (1 - share) * lookup(low, t, x.ndim), x0)


def posterior_mean(
  process: Process, x0: jax.Array, x: jax.Array, t: jax.Array
) -> jax.Array:
  """Mean [B, ...] of the posterior q(x_{t-1} | x_t, x_0)."""
  weights = (process.posterior_mean_x0, process.posterior_mean_xt)
  first, second = (lookup(table, t, x.ndim) for table in weights)
  return first * x0 + second * x


_HALF_BIN = 1.0 / 255  # half the distance of 8-bit pixels in [-1, 1]
_EDGE = 0.999  # the bins of pixels beyond it reach to infinity
_FLOOR = 1e-12  # lowest probability, so that its logarithm is finite


def training_losses(
  process: AnyProcess,
  objective: DiffusionConfig,
  out: jax.Array,
  x0: jax.Array,
  x: jax.Array,
  t: jax.Array,
  noise: jax.Array,
) -> dict[str, jax.Array]:
  """Computes the losses of each example.

  Args:
    process: the training process.
    objective: what the network predicts, and the bound's weight.
    out: [B, X, Y, channels or 2 * channels], the network's output at (x, t).
    x0: [B, X, Y, channels] clean examples.
    x: [B, X, Y, channels] noised examples.
    t: [B] int steps.
    noise: [B, X, Y, channels] noise that was added.

  Returns:
    Arrays [B] float32: "loss", which is trained; "mse", unweighted; and with a
    learned variance "vb", the variational bound in bits per dimension, whose
    gradient does not reach the prediction (arXiv:2102.09672).
  """
  prediction = objective.prediction
  output, spread = split_output(out.astype(jnp.float32), x.shape[-1])
  target = training_target(process, prediction, x0, t, noise)
  mse = _mean(jnp.square(target - output))
  if spread is None:
    return {"loss": mse, "mse": mse}
  frozen = jnp.concatenate([jax.lax.stop_gradient(output), spread], axis=-1)
  bound = variational_bound(process, prediction, frozen, x0, x, t)
  loss = mse + objective.vb_weight * bound
  return {"loss": loss, "mse": mse, "vb": bound}


def variational_bound(
  process: Process,
  prediction: str,
  out: jax.Array,
  x0: jax.Array,
  x: jax.Array,
  t: jax.Array,
) -> jax.Array:
  """Computes one term of the variational bound, in bits per dimension.

  It is the KL divergence of p(x_{t-1} | x_t) from the posterior; at step 0 the
  negative log-likelihood of 8-bit pixels in [-1, 1].

  Args:
    process: S steps.
    prediction: "epsilon", "x0" or "v".
    out: [B, X, Y, channels or 2 * channels], the network's output at (x, t).
    x0: [B, X, Y, channels] clean examples.
    x: [B, X, Y, channels] noised examples.
    t: [B] int steps.

  Returns:
    [B] float32.
  """
  reverse = reverse_step(process, prediction, out, x, t)
  true_mean = posterior_mean(process, x0, x, t)
  true_log_variance = lookup(process.posterior_log_variance, t, x.ndim)
  divergence = 0.5 * (
    reverse.log_variance
    - true_log_variance
    - 1.0
    + jnp.exp(true_log_variance - reverse.log_variance)
    + jnp.square(true_mean - reverse.mean) * jnp.exp(-reverse.log_variance)
  )
  log_scale = 0.5 * reverse.log_variance
  likelihood = _pixel_log_likelihood(x0, reverse.mean, log_scale)
  bits = jnp.where(t == 0, -_mean(likelihood), _mean(divergence))
  return bits / math.log(2.0)


def _pixel_log_likelihood(
  x: jax.Array, mean: jax.Array, log_scale: jax.Array
) -> jax.Array:
  """Log-probability of each pixel's bin under a Gaussian, [B, ...]."""
  inverse = jnp.exp(-log_scale)
  above = _normal_cdf(inverse * (x - mean + _HALF_BIN))
  below = _normal_cdf(inverse * (x - mean - _HALF_BIN))

  def log(probability: jax.Array) -> jax.Array:
    return jnp.log(jnp.maximum(probability, _FLOOR))

  inside = jnp.where(x > _EDGE, log(1.0 - below), log(above - below))
  return jnp.where(x < -_EDGE, log(above), inside)


def _normal_cdf(x: jax.Array) -> jax.Array:
  """Normal distribution function, in the tanh approximation, as released."""
  inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
  return 0.5 * (1.0 + jnp.tanh(inner))


def _mean(x: jax.Array) -> jax.Array:
  """Mean over all axes but the first."""
  return x.mean(axis=tuple(range(1, x.ndim)))
