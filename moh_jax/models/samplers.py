"""Samplers: from noise to examples, all steps in one compiled scan."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.dit import DIFFUSION_METHODS, FLOW_METHODS, GUIDED_CHANNELS
from moh_jax.models.diffusion import (
  AnyProcess,
  Flow,
  Process,
  implied_noise,
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

  Raises:
    ValueError: an unknown method, or noise is missing.
  """
  is_flow = isinstance(process, Flow)
  methods = FLOW_METHODS if is_flow else DIFFUSION_METHODS
  if method not in methods:
    raise ValueError(f"method={method!r} must be one of {methods}")
  if noise is None and (method == "ddpm" or eta):
    raise ValueError(f"method={method!r} needs noise (eta={eta})")
  if is_flow:
    step_of_flow = flow_step(predict, process, method, clip)

    def advance(x: jax.Array, previous: None, step: jax.Array) -> tuple:
      return step_of_flow(x, step), previous

  else:
    make = {"ddpm": _ddpm, "ddim": _ddim, "dpm": _dpm}[method]
    network = _Network(predict, process, prediction, clip)
    advance = make(network, noise, eta)

  def body(carry: tuple, step: jax.Array) -> tuple:
    carry = advance(*carry, step)
    return carry, carry[0] if trajectory else None

  # Only the multistep method reads the step before's x0; its first step weighs
  # it by 0.
  previous = jnp.zeros_like(x) if method == "dpm" else None
  steps = jnp.arange(process.num_steps - 1, -1, -1)
  (x, _), path = jax.lax.scan(body, (x, previous), steps)
  return path if trajectory else x


@dataclasses.dataclass(frozen=True, eq=False)
class _Network:
  """A network and what its output at a step means."""

  predict: Predict
  process: Process
  prediction: str
  clip: bool

  def output(
    self, x: jax.Array, step: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The network's output at a step, and the step of each example, [B]."""
    timesteps, batch = jnp.asarray(self.process.timesteps), x.shape[:1]
    out = self.predict(x, jnp.broadcast_to(timesteps[step], batch))
    return out, jnp.broadcast_to(step, batch)

  def clean(self, x: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The predicted clean example, and the step of each example, [B]."""
    out, t = self.output(x, step)
    value, _ = split_output(out, x.shape[-1])
    x0 = predict_x0(self.process, self.prediction, value, x, t)
    return (jnp.clip(x0, -1.0, 1.0) if self.clip else x0), t


# Every method maps x, the step before's x0 and the step to the first two.
_Advance = Callable[[jax.Array, jax.Array | None, jax.Array], tuple]


def _ddpm(network: _Network, noise: Noise, eta: float) -> _Advance:
  del eta
  process, last = network.process, network.process.num_steps - 1

  def advance(x: jax.Array, previous: None, step: jax.Array) -> tuple:
    out, t = network.output(x, step)
    reverse = reverse_step(
      process, network.prediction, out, x, t, clip=network.clip
    )
    added = jnp.exp(0.5 * reverse.log_variance) * noise(last - step)
    return reverse.mean + jnp.where(step > 0, added, 0.0), previous

  return advance


def _ddim(network: _Network, noise: Noise | None, eta: float) -> _Advance:
  process, last = network.process, network.process.num_steps - 1
  before = process.alphas_cumprod_prev
  variance = eta**2 * process.posterior_variance

  def advance(x: jax.Array, previous: None, step: jax.Array) -> tuple:
    x0, t = network.clean(x, step)
    direction = implied_noise(process, x0, x, t)
    signal, spread = (
      lookup(np.sqrt(level), t, x.ndim)
      for level in (before, 1.0 - before - variance)
    )
    x = signal * x0 + spread * direction
    if eta:
      x += lookup(np.sqrt(variance), t, x.ndim) * noise(last - step)
    return x, previous

  return advance


def _dpm(network: _Network, noise: Noise | None, eta: float) -> _Advance:
  del noise, eta
  solver = _solver_tables(network.process)

  def advance(x: jax.Array, previous: jax.Array, step: jax.Array) -> tuple:
    x0, t = network.clean(x, step)
    keep, move, history = (lookup(table, t, x.ndim) for table in solver)
    blend = x0 + history * (x0 - previous)
    return keep * x + move * blend, x0

  return advance


def _solver_tables(process: Process) -> tuple[np.ndarray, ...]:
  """Coefficients (keep, move, history) of DPM-Solver++ 2M, each [S].

  Lambda is half the log-SNR and h = lambda_t - lambda_s. A step from s to t is
  x_t = keep x_s + move (x0 + history (x0 - x0 of the step before)), where
  keep = sigma_t / sigma_s, move = alpha_t (1 - exp(-h)) and history is
  h / (2 h of the step before), but at most 1/2. The first step has history 0;
  the last one, to no noise at all, gives x0 itself.
  """
  alpha, sigma = process.signal, process.spread
  log_snr = np.log(alpha / sigma)
  size = process.num_steps
  keep, move, history = np.zeros(size), np.ones(size), np.zeros(size)
  for step in range(1, size):
    h = log_snr[step - 1] - log_snr[step]
    keep[step] = sigma[step - 1] / sigma[step]
    move[step] = alpha[step - 1] * -np.expm1(-h)
    if step < size - 1:
      # At most its value for equal steps: a step much longer than the one
      # before, such as the last of steps evenly spaced in t, would overshoot.
      ratio = h / (log_snr[step] - log_snr[step + 1])
      history[step] = min(ratio, 1.0) / 2
  return keep, move, history


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
