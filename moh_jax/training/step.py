"""One optimizer step, pure and jitted once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from moh_jax.layers.partitioning import constrain
from moh_jax.training.state import TrainState

Metrics = dict[str, jax.Array]
# (params, batch, rng, [] int32 steps done before) -> ([] loss, metrics).
LossFn = Callable[[Any, Any, jax.Array, jax.Array], tuple[jax.Array, Metrics]]


def train_step(
  state: TrainState,
  batch: Any,
  *,
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  accumulation: int = 1,
  ema_decay: float = 0.0,
) -> tuple[TrainState, Metrics]:
  """Updates the state with one global batch.

  Args:
    state: before the step; its buffers are donated.
    batch: tree of [B, ...] arrays.
    loss_fn: (params, batch, rng, step) -> ([] loss, {name: [] metric}).
    optimizer: the gradient transformation.
    schedule: step -> learning rate, for the metrics.
    accumulation: microbatches that the batch is cut into; gradients and
      metrics are their means. The balance loss is then a mean over
      microbatches of products of means, not of the whole batch.
    ema_decay: decay of the averaged parameters; 0 leaves them.

  Returns:
    The state after the step and float32 scalars.
  """
  rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
  loss_fn = functools.partial(_at_step, loss_fn, state.step)
  grads, metrics = _gradients(state.params, batch, rng, loss_fn, accumulation)
  metrics["grad_norm"] = optax.tree.norm(grads)
  metrics["lr"] = jnp.asarray(schedule(state.step), jnp.float32)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  ema = state.ema
  if ema_decay:
    ema = optax.incremental_update(params, ema, 1.0 - ema_decay)
  new_state = TrainState(state.step + 1, params, opt_state, ema, state.rng)
  return new_state, metrics


def _at_step(
  loss_fn: LossFn, step: jax.Array, params: Any, batch: Any, rng: jax.Array
) -> tuple[jax.Array, Metrics]:
  return loss_fn(params, batch, rng, step)


def _gradients(
  params: Any, batch: Any, rng: jax.Array, loss_fn: Callable, parts: int
) -> tuple[Any, Metrics]:
  """Mean gradients and metrics over `parts` microbatches."""

  def one(batch: Any, rng: jax.Array) -> tuple[Any, Metrics]:
    grads, metrics = jax.grad(loss_fn, has_aux=True)(params, batch, rng)
    return grads, metrics

  if parts == 1:
    return one(batch, rng)

  def split(x: jax.Array) -> jax.Array:
    # Example i goes to microbatch i % parts: each microbatch keeps the batch's
    # spread over the devices, so nothing moves between them.
    x = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
    return constrain(x, None, "batch", *[None] * (x.ndim - 2))

  def add(total: Any, inputs: Any) -> tuple[Any, Metrics]:
    microbatch, index = inputs
    grads, metrics = one(microbatch, jax.random.fold_in(rng, index))
    return jax.tree.map(jnp.add, total, grads), metrics

  inputs = (jax.tree.map(split, batch), jnp.arange(parts))
  first = jax.tree.map(lambda x: x[0], inputs)
  shapes, _ = jax.eval_shape(lambda b: one(b, rng), first[0])
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  total, metrics = jax.lax.scan(add, zeros, inputs)
  # A metric may have no value in some microbatch; a loss always has one.
  means = {
    name: values.mean() if name == "loss" else jnp.nanmean(values)
    for name, values in metrics.items()
  }
  return jax.tree.map(lambda x: x / parts, total), means


def jit_train_step(*, state_shardings: Any = None, **options: Any) -> Callable:
  """`train_step` with its options bound, jitted, the state donated.

  Args:
    state_shardings: shardings that the state keeps from step to step; None
      leaves them to the compiler.
    **options: keyword arguments of `train_step`.
  """

  def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
    return train_step(state, batch, **options)

  return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, None))
