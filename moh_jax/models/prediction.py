"""What a diffusion network predicts, and the reverse step derived from it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.dit import PREDICTIONS
from moh_jax.models.process import AnyProcess, Process, lookup


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reverse:
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

  Raises:
    ValueError: out has another number of channels.
  """
  if out.shape[-1] == channels:
    return out, None
  if out.shape[-1] != 2 * channels:
    raise ValueError(
      f"{out.shape[-1]} output channels must be {channels}, or {2 * channels} "
      "with a learned variance"
    )
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

  Raises:
    ValueError: an unknown prediction.
  """
  if prediction == "epsilon":
    return noise
  if prediction == "x0":
    return x0
  if prediction == "velocity":
    return noise - x0
  if prediction != "v":
    raise ValueError(f"prediction={prediction!r} must be one of {PREDICTIONS}")
  signal = lookup(process.signal, t, x0.ndim)
  spread = lookup(process.spread, t, x0.ndim)
  return signal * noise - spread * x0  # v, arXiv:2202.00512


def predict_x0(
  process: Process,
  prediction: str,
  output: jax.Array,
  x: jax.Array,
  t: jax.Array,
) -> jax.Array:
  """Computes the clean example from a prediction.

  Args:
    process: S steps.
    prediction: "epsilon", "x0" or "v".
    output: [B, ...] prediction of the network.
    x: [B, ...] x_t.
    t: [B] int steps of the process.

  Returns:
    [B, ...].

  Raises:
    ValueError: an unknown prediction.
  """
  level = process.alphas_cumprod
  if prediction == "x0":
    return output
  if prediction == "epsilon":
    scale = lookup(np.sqrt(1.0 / level), t, x.ndim)
    return scale * x - lookup(np.sqrt(1.0 / level - 1), t, x.ndim) * output
  if prediction == "v":
    signal = lookup(np.sqrt(level), t, x.ndim)
    return signal * x - lookup(np.sqrt(1.0 - level), t, x.ndim) * output
  raise ValueError(f"prediction={prediction!r} must be one of {PREDICTIONS}")


def implied_noise(
  process: Process, x0: jax.Array, x: jax.Array, t: jax.Array
) -> jax.Array:
  """The noise [B, ...] that turns x0 into x at step t."""
  level = process.alphas_cumprod
  scale = lookup(np.sqrt(1.0 / level), t, x.ndim)
  return (scale * x - x0) / lookup(np.sqrt(1.0 / level - 1), t, x.ndim)


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
  output, spread = split_output(out, x.shape[-1])
  x0 = predict_x0(process, prediction, output, x, t)
  if clip:
    x0 = jnp.clip(x0, -1.0, 1.0)
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
