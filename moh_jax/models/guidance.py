"""Classifier-free guidance (arXiv:2207.12598)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from moh_jax.config.dit import GUIDED_CHANNELS

# (x [B, X, Y, channels], t [B]) -> the network's output [B, X, Y, ...].
Predict = Callable[[jax.Array, jax.Array], jax.Array]
LabelledPredict = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def drop_labels(
  rng: jax.Array, labels: jax.Array, no_label: int, rate: float
) -> jax.Array:
  """Replaces labels [B] by `no_label` with probability `rate`."""
  if not rate:
    return labels
  return jnp.where(
    jax.random.bernoulli(rng, rate, labels.shape), no_label, labels
  )


def guide(
  predict: LabelledPredict,
  labels: jax.Array,
  no_label: int,
  *,
  scale: float,
  channels: str = "three",
  interval: tuple[int, int] | None = None,
) -> Predict:
  """Makes a function of (x, t) from a network, labels and a guidance scale.

  Args:
    predict: (x, t, labels) -> output; with guidance it is called with batches
      of 2 B.
    labels: [B] int.
    no_label: the label that stands for "no label".
    scale: w in labelled + (w - 1) (labelled - unlabelled). 1 skips the
      unlabelled evaluation, 0 the labelled one.
    channels: guides the first "three" channels of the prediction, as released,
      or "all". A learned variance is always the labelled one.
    interval: guides only timesteps t with low <= t < high (arXiv:2404.07724).
      Other steps evaluate the labelled batch alone, so all t of a batch must
      be equal. None guides always.

  Returns:
    (x, t) -> output [B, X, Y, channels or 2 * channels].

  Raises:
    ValueError: unknown channels.
  """
  if channels not in GUIDED_CHANNELS:
    raise ValueError(f"channels={channels!r} must be one of {GUIDED_CHANNELS}")

  if scale == 0:
    labels = jnp.full_like(labels, no_label)

  def plain(x: jax.Array, t: jax.Array) -> jax.Array:
    return predict(x, t, labels)

  def guided(x: jax.Array, t: jax.Array) -> jax.Array:
    both = [jnp.concatenate([part, part]) for part in (x, t)]
    none = jnp.full_like(labels, no_label)
    out = predict(*both, jnp.concatenate([labels, none]))
    labelled, free = jnp.split(out, 2)
    count = x.shape[-1] if channels == "all" else min(3, x.shape[-1])
    moved = jnp.arange(out.shape[-1]) < count
    move = (scale - 1) * (labelled - free)
    return labelled + jnp.where(moved, move, 0.0)

  if scale in (0, 1):
    return plain
  if interval is None:
    return guided
  low, high = interval

  def on_interval(x: jax.Array, t: jax.Array) -> jax.Array:
    inside = (t[0] >= low) & (t[0] < high)
    return jax.lax.cond(inside, guided, plain, x, t)

  return on_interval
