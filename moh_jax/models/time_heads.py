"""Sampling with a router that reads the diffusion step: no other heads exist.

Where the step alone decides which heads a layer uses, a sampler knows them for
all its steps before the first one. At each step it takes their part of the
projections' weights, and the network is a smaller one with plain attention:
nothing is masked, and projections and attention are as cheap as their share of
the heads (arXiv:2410.03456 calls it dynamic width). The result is that of the
whole network, to rounding.

Shapes: S steps, L layers of a stack, H heads, A active heads, D head dim.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from moh_jax.config import DiTConfig, without_router
from moh_jax.config.layers import LayerGroup
from moh_jax.layers.linear import KERNEL_SCALE, LORA_A, LORA_B
from moh_jax.layers.router import HeadRouter
from moh_jax.models.dit import DiT, Embedding
from moh_jax.models.registry import restack
from moh_jax.models.samplers import LabelledPredict

# The axis of the heads in the parameters of a layer's attention, from the end.
_HEADS = {
  ("qkv", "kernel"): -2,
  ("qkv", KERNEL_SCALE): -2,
  ("qkv", "bias"): -2,
  ("qkv", LORA_B): -2,
  ("out", "kernel"): -3,
  ("out", LORA_A): -3,
}

# By stack of layers: the active heads of each layer [S, L, A] int32, ascending,
# and their gates, float32.
Plan = Mapping[str, tuple[jax.Array, jax.Array]]


def with_active_heads(
  network: DiT, params: Any, timesteps: np.ndarray
) -> LabelledPredict:
  """A network that computes, at each step, only the heads that it uses.

  Args:
    network: the whole network; its router reads the step alone.
    params: its parameters.
    timesteps: [S] ascending, all that the result is called with.

  Returns:
    (x [B, X, Y, channels], t [B], all of them one timestep, labels [B]) -> the
    network's output, to rounding.
  """
  times, model = jnp.asarray(timesteps), network.config
  smaller = network.clone(config=active_model(model))
  plan = plan_heads(model, params, times)

  def predict(x: jax.Array, t: jax.Array, labels: jax.Array) -> jax.Array:
    taken = take_heads(model, params, plan, jnp.searchsorted(times, t[0]))
    out, _ = smaller.apply({"params": taken}, x, t, labels)
    return out

  return predict


def active_model(model: DiTConfig) -> DiTConfig:
  """The section of a network that has the active heads alone."""
  heads = tuple(budget.active for budget in model.budgets())
  return without_router(dataclasses.replace(model, num_heads=heads))


def plan_heads(model: DiTConfig, params: Any, timesteps: jax.Array) -> Plan:
  """Finds the heads that each layer uses at each step.

  Args:
    model: the section of the whole network.
    params: its parameters.
    timesteps: [S], as the network gets them.
  """
  labels = jnp.zeros(len(timesteps), jnp.int32)
  embed = Embedding(model)
  time, _ = embed.apply({"params": params["embed"]}, timesteps, labels)
  tokens = jnp.zeros((len(time), 1, 1))  # the router does not read them

  def of_stack(name: str, group: LayerGroup) -> tuple[jax.Array, jax.Array]:
    router, active = HeadRouter(group.budget, model.router), group.budget.active

    def of_layer(params: Any) -> jax.Array:
      gates, _ = router.apply({"params": params}, tokens, time=time)
      return gates[:, 0]

    every = jax.vmap(of_layer, out_axes=1, axis_size=group.depth)
    gates = every(params[name]["attn"].get("router", {}))
    # Of equal values the first are first: active heads stay in their order.
    heads = jnp.argsort(gates == 0, axis=-1, stable=True)[..., :active]
    return heads, jnp.take_along_axis(gates, heads, axis=-1)

  stacks = zip(model.stack_names(), model.layer_groups())
  return {name: of_stack(name, group) for name, group in stacks}


def take_heads(model: DiTConfig, params: Any, plan: Plan, step: Any) -> Any:
  """Parameters of `active_model` at one step.

  Args:
    model: the section of the whole network.
    params: its parameters.
    plan: of `plan_heads`.
    step: [] int32, which of the plan's steps.
  """

  def part(path: tuple[str, ...], leaf: jax.Array) -> jax.Array:
    if "attn" not in path:
      return leaf
    heads, gates = (each[step] for each in plan[path[0]])
    if axis := _HEADS.get(path[-2:]):
      take = functools.partial(jnp.take, axis=axis, mode="clip")
      leaf = jax.vmap(take)(leaf, heads)
    if path[-2:] in gated:
      leaf = (leaf * gates[..., None, None]).astype(leaf.dtype)
    return leaf

  flat = traverse_util.flatten_dict(params)
  is_int8 = any(path[-2:] == ("out", KERNEL_SCALE) for path in flat)
  gated = {("out", LORA_A), ("out", KERNEL_SCALE if is_int8 else "kernel")}
  taken = {p: part(p, x) for p, x in flat.items() if "router" not in p}
  tree = traverse_util.unflatten_dict(taken)
  return restack(tree, model, active_model(model))
