"""Samplers: from noise to examples, all steps in one compiled scan.

With classifier-free guidance (arXiv:2207.12598) where it is asked for.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.layers.partitioning import draw_examples
from moh_jax.models.diffusion import (
  AnyProcess,
  Flow,
  Process,
  lookup,
  predict_x0,
  reverse_step,
  split_output,
)

# (x [B, X, Y, channels], t [B]) -> the network's output [B, X, Y, ...].
Predict = Callable[[jax.Array, jax.Array], jax.Array]
LabelledPredict = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# From the number of a step, 0 the noisiest, to standard normal noise [B, ...].
Noise = Callable[[jax.Array], jax.Array]


def sample(
  predict: Predict,
  x: jax.Array,
  process: AnyProcess,
  *,
  method: str,
  prediction: str = "epsilon",
  noise: Noise | None = None,
  eta: float = 0.0,
  clip: bool = False,
  trajectory: bool = False,
) -> jax.Array:
  """Samples examples.

  Args:
    predict: the network as a function of x and t alone, see `guide`.
    x: [B, ...] standard normal noise to start from.
    process: the S steps to take, see `respace`.
    method: "ddpm", ancestral (arXiv:2006.11239); "ddim" (arXiv:2010.02502); or
      "dpm", DPM-Solver++ 2M (arXiv:2211.01095). For a `Flow` "euler" or "heun"
      (second order, two evaluations a step but for the last). All but the first
      are deterministic.
    prediction: what the network predicts: "epsilon", "x0" or "v"; that of a
      `Flow` is the velocity.
    noise: noise of each step; only "ddpm", and "ddim" with `eta`, need it.
    eta: share of the ancestral sampler's noise that "ddim" adds.
    clip: whether to clip predicted clean examples to [-1, 1].
    trajectory: whether to return x after every step.

  Returns:
    x_0 [B, ...], or with `trajectory` [S, B, ...].
  """
  timesteps, last = jnp.asarray(process.timesteps), len(process.timesteps) - 1

  def output(x: jax.Array, step: jax.Array) -> jax.Array:
    return predict(x, jnp.broadcast_to(timesteps[step], x.shape[:1]))

  def clean(x: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The predicted clean example, and the step of each example, [B]."""
    out, t = output(x, step), jnp.broadcast_to(step, x.shape[:1])
    return predict_x0(process, prediction, out, x, t, clip=clip)[0], t

  # Each method maps (x, x0 of the step before, step) to the next x and x0.
  def ddpm(x: jax.Array, previous: None, step: jax.Array) -> tuple:
    out, t = output(x, step), jnp.broadcast_to(step, x.shape[:1])
    reverse = reverse_step(process, prediction, out, x, t, clip=clip)
    added = jnp.exp(0.5 * reverse.log_variance) * noise(last - step)
    return reverse.mean + jnp.where(step > 0, added, 0.0), previous

  def ddim(x: jax.Array, previous: None, step: jax.Array) -> tuple:
    """Noise that x0 implies, at the level of the next step."""
    x0, t = clean(x, step)
    of_x, of_noise = (
      lookup(np.sqrt(table), t, x.ndim)
      for table in (1 / process.alphas_cumprod, 1 / process.alphas_cumprod - 1)
    )
    direction = (of_x * x - x0) / of_noise
    before = process.alphas_cumprod_prev
    variance = eta**2 * process.posterior_variance
    signal, spread = (
      lookup(np.sqrt(level), t, x.ndim)
      for level in (before, 1.0 - before - variance)
    )
    x = signal * x0 + spread * direction
    if eta:
      x += lookup(np.sqrt(variance), t, x.ndim) * noise(last - step)
    return x, previous

  def dpm(x: jax.Array, previous: jax.Array, step: jax.Array) -> tuple:
    x0, t = clean(x, step)
    keep, move, history = (
      lookup(table, t, x.ndim) for table in _solver_tables(process)
    )
    blend = x0 + history * (x0 - previous)
    return keep * x + move * blend, x0

  methods = {"ddpm": ddpm, "ddim": ddim, "dpm": dpm}
  if isinstance(process, Flow):
    methods = _flow_methods(output, process, clip)

  def body(carry: tuple, step: jax.Array) -> tuple:
    carry = methods[method](*carry, step)
    return carry, carry[0] if trajectory else None

  # Only the multistep method reads the step before's x0; its first step weighs
  # it by 0.
  previous = jnp.zeros_like(x) if method == "dpm" else None
  (x, _), path = jax.lax.scan(body, (x, previous), jnp.arange(last, -1, -1))
  return path if trajectory else x


def _flow_methods(
  output: Predict, process: Flow, clip: bool
) -> dict[str, Callable[..., tuple]]:
  """The methods that follow dx/dt = velocity(x, t).

  Args:
    output: (x, step) -> the network's output.
    process: the steps.
    clip: whether to clip examples, as of `sample`.
  """
  times = jnp.asarray(process.times, jnp.float32)
  gaps = jnp.asarray(np.diff(process.times, prepend=0.0), jnp.float32)

  def velocity(x: jax.Array, step: jax.Array) -> jax.Array:
    """The velocity, that to the clipped example if examples are clipped."""
    value, _ = split_output(output(x, step), x.shape[-1])
    if not clip:
      return value
    clean = jnp.clip(x - times[step] * value, -1.0, 1.0)
    return (x - clean) / times[step]

  def euler(x: jax.Array, previous: None, step: jax.Array) -> tuple:
    """First order."""
    return x - gaps[step] * velocity(x, step), previous

  def heun(x: jax.Array, previous: None, step: jax.Array) -> tuple:
    """Second order: the mean of the velocities at both ends of a step.

    The last step, to the example, has the velocity of its beginning alone.
    """
    first = velocity(x, step)
    reached = x - gaps[step] * first

    def corrected() -> jax.Array:
      return x - gaps[step] * (first + velocity(reached, step - 1)) / 2

    return jax.lax.cond(step > 0, corrected, lambda: reached), previous

  return {"euler": euler, "heun": heun}


def _solver_tables(process: Process) -> tuple[np.ndarray, ...]:
  """Coefficients (keep, move, history) of DPM-Solver++ 2M, each [S].

  Lambda is half the log-SNR and h = lambda_t - lambda_s. A step from s to t is
  x_t = keep x_s + move (x0 + history (x0 - x0 of the step before)), where
  keep = sigma_t / sigma_s, move = alpha_t (1 - exp(-h)) and history is
  h / (2 h of the step before), but at most 1/2. The first step has history 0;
  the last one, to no noise at all, gives x0 itself.
  """
  alpha, sigma = process.signal, process.spread
  lambdas = np.log(alpha / sigma)
  size = len(process.timesteps)
  keep, move, history = np.zeros(size), np.ones(size), np.zeros(size)
  for step in range(1, size):
    h = lambdas[step - 1] - lambdas[step]
    keep[step] = sigma[step - 1] / sigma[step]
    move[step] = alpha[step - 1] * -np.expm1(-h)
    if step < size - 1:
      # At most its value for equal steps: a step much longer than the one
      # before, such as the last of steps evenly spaced in t, would overshoot.
      ratio = h / (lambdas[step] - lambdas[step + 1])
      history[step] = min(ratio, 1.0) / 2
  return keep, move, history


def drop_labels(
  rng: jax.Array, labels: jax.Array, no_label: int, rate: float
) -> jax.Array:
  """Replaces labels [B] by `no_label` with probability `rate`."""
  if not rate:
    return labels
  draw = functools.partial(jax.random.bernoulli, p=rate)
  return jnp.where(draw_examples(draw, rng, labels.shape), no_label, labels)


def guide(
  predict: LabelledPredict,
  labels: jax.Array,
  no_label: int,
  *,
  scale: float,
  channels: str = "three",
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
      or "all". With guidance a learned variance is the labelled one.

  Returns:
    (x, t) -> output [B, X, Y, channels or 2 * channels].
  """
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

  return plain if scale in (0, 1) else guided
