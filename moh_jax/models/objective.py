"""The training objective: squared error, and a bound for the variance."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.dit import LOSS_WEIGHTS
from moh_jax.models.prediction import (
  posterior_mean,
  reverse_step,
  split_output,
  training_target,
)
from moh_jax.models.process import AnyProcess, Process, lookup

_HALF_BIN = 1.0 / 255  # half the distance of 8-bit pixels in [-1, 1]
_EDGE = 0.999  # the bins of pixels beyond it reach to infinity
_FLOOR = 1e-12  # lowest probability, so that its logarithm is finite


def training_losses(
  process: AnyProcess,
  prediction: str,
  out: jax.Array,
  *,
  x0: jax.Array,
  x: jax.Array,
  t: jax.Array,
  noise: jax.Array,
  loss_weight: str = "uniform",
  snr_gamma: float = 5.0,
) -> dict[str, jax.Array]:
  """Computes the losses of each example.

  Args:
    process: the training process.
    prediction: "epsilon", "x0", "v" or "velocity".
    out: [B, X, Y, channels or 2 * channels], the network's output at (x, t).
    x0: [B, X, Y, channels] clean examples.
    x: [B, X, Y, channels] noised examples.
    t: [B] int steps.
    noise: [B, X, Y, channels] noise that was added.
    loss_weight: "uniform", or "min_snr" (arXiv:2303.09556): the squared error
      of the clean example has the weight min(SNR, gamma) for all predictions.
    snr_gamma: gamma of "min_snr".

  Returns:
    Arrays [B] float32: "mse", unweighted; "weighted_mse"; and with a learned
    variance "vb", the variational bound in bits per dimension, whose gradient
    does not reach the prediction (arXiv:2102.09672).

  Raises:
    ValueError: an unknown prediction or weight.
  """
  output, spread = split_output(out.astype(jnp.float32), x.shape[-1])
  target = training_target(process, prediction, x0, t, noise)
  mse = _mean(jnp.square(target - output))
  weights = _weights(process, prediction, loss_weight, snr_gamma)
  losses = {"mse": mse, "weighted_mse": lookup(weights, t, 1) * mse}
  if spread is not None:
    frozen = jnp.concatenate([jax.lax.stop_gradient(output), spread], axis=-1)
    losses["vb"] = variational_bound(process, prediction, frozen, x0, x, t)
  return losses


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


def _weights(
  process: AnyProcess, prediction: str, loss_weight: str, gamma: float
) -> np.ndarray:
  """Weight of the squared error of the prediction at each step, [S]."""
  if loss_weight == "uniform":
    return np.ones(process.num_steps)
  if loss_weight != "min_snr":
    raise ValueError(
      f"loss_weight={loss_weight!r} must be one of {LOSS_WEIGHTS}"
    )
  snr = process.snr
  # Squared error of x_0 that a squared error of 1 in the prediction causes.
  to_x0 = {"x0": np.ones_like(snr), "epsilon": 1 / snr, "v": 1 / (snr + 1)}
  return np.minimum(snr, gamma) * to_x0[prediction]


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
