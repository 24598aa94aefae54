"""A recorded case in memory, and the steps that several kinds of case share."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.heads import HeadBudget
from moh_jax.convert import rules
from moh_jax.ops.routing import RouterAux
from moh_jax.runtime.params import abstract_params, unbox

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
  """A recorded case, read into memory; `compare.py` describes its files.

  Attributes:
    hyper: hyper-parameters of the recorded module, as meta.json states them.
    arrays: the arrays of io.npz, inputs and expected outputs, by name.
    weights: the recorded weights by public name; empty where a case has none.
    meta: the whole of meta.json.
    directory: the case's directory, for cases with further files.
  """

  hyper: Mapping[str, Any]
  arrays: Arrays
  weights: Arrays
  meta: Mapping[str, Any]
  directory: pathlib.Path


def channels_last(x: np.ndarray) -> jax.Array:
  """Recorded images [..., channels, X, Y] as ours, [..., X, Y, channels]."""
  return jnp.moveaxis(jnp.asarray(x), -3, -1)


def channels_first(x: jax.Array) -> jax.Array:
  """Our images [..., X, Y, channels] in the recorded [..., channels, X, Y]."""
  return jnp.moveaxis(x, -1, -3)


def load_weights(
  model: nn.Module, inputs: tuple, table: list[rules.Rule], weights: Arrays
) -> Any:
  """Converts the recorded weights to the parameters of our module.

  Args:
    model: the module.
    inputs: its positional arguments, arrays or ShapeDtypeStructs.
    table: conversion rules between its parameters and the public names.
    weights: the recorded weights.

  Raises:
    ValueError: the weights do not fit the module.
  """
  abstract = unbox(abstract_params(model, inputs))
  return rules.load_params(table, weights, abstract, source="weights")


def named_grads(
  prefix: str, table: list[rules.Rule], grads: Any
) -> dict[str, Any]:
  """Gradients of our parameters as "PREFIX/NAME", NAME the public name."""
  named = rules.dump_params(table, jax.device_get(grads))
  return {f"{prefix}/{name}": grad for name, grad in named.items()}


def head_budget(hyper: Mapping[str, Any]) -> HeadBudget:
  """The head split of a recorded attention module."""
  return HeadBudget(
    hyper["num_heads"],
    hyper["shared_head"],
    hyper["routed_head"],
    hyper["head_dim"],
  )


def routed_losses(layers: Mapping[str, RouterAux]) -> jax.Array:
  """Balance losses [layers with a router] in the network's order."""
  losses = [aux.balance_loss for aux in layers.values() if aux.routed]
  return jnp.concatenate(losses) if losses else jnp.zeros(0)


def attention_results(
  case: Case, module: nn.Module, table: list[rules.Rule], *inputs: Any
) -> dict[str, Any]:
  """Runs one attention module of a case.

  Args:
    case: its arrays hold the input "x" and the cotangent "r" of the output.
    module: maps (x, *inputs) to (y, RouterAux) and records its routing.
    table: conversion rules of the module's parameters.
    *inputs: inputs of the module after x.

  Returns:
    Output, routing, and the gradients of sum(y * r) + balance loss.
  """
  x = jnp.asarray(case.arrays["x"])
  params = load_weights(module, (x, *inputs), table, case.weights)

  def objective(params, x):
    (y, aux), recorded = module.apply(
      {"params": params}, x, *inputs, mutable=["intermediates"]
    )
    (routing,) = recorded["intermediates"]["router"]["routing"]
    loss = jnp.sum(y * case.arrays["r"]) + aux.balance_loss
    return loss, (y, aux.balance_loss, routing)

  differentiate = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
  (_, (y, l_aux, routing)), (grads, grad_x) = jax.jit(differentiate)(params, x)
  return {
    "y": y,
    "gates": routing.gates,
    "l_aux": l_aux,
    "grad_x": grad_x,
    "router_probs": routing.probs,
    "router_mask": routing.selected,
    **named_grads("grads", table, grads),
  }
