"""A recorded case: its files, and the steps that several kinds share."""

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
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.ops.routing import RouterAux
from moh_jax.runtime.files import read_json
from moh_jax.runtime.parameters import abstract_params, unbox


@dataclasses.dataclass(frozen=True)
class Case:
  """A recorded case, read into memory; `__main__.py` describes its files.

  Attributes:
    directory: where it lies, for cases with further files.
    meta: the whole of meta.json.
    arrays: the arrays of io.npz, inputs and expected outputs, by name.
    weights: the recorded weights by public name; empty where a case has none.
    grads: the recorded gradients, likewise.
  """

  directory: pathlib.Path
  meta: Mapping[str, Any]
  arrays: Mapping[str, np.ndarray]
  weights: Mapping[str, np.ndarray]
  grads: Mapping[str, np.ndarray]

  @property
  def hyper(self) -> Mapping[str, Any]:
    """Hyper-parameters of the recorded module."""
    return self.meta["hyper_parameters"]

  def images(self, name: str) -> jax.Array:
    """Recorded images [..., channels, X, Y] as ours, [..., X, Y, channels]."""
    return jnp.moveaxis(jnp.asarray(self.arrays[name]), -3, -1)

  def load(
    self, model: nn.Module, table: list[rules.Rule], *inputs: Any
  ) -> Any:
    """Converts the recorded weights to the parameters of our module.

    Args:
      model: the module.
      table: conversion rules between its parameters and the public names.
      *inputs: of the module, arrays or ShapeDtypeStructs.

    Raises:
      ValueError: the weights do not fit the module.
    """
    abstract = unbox(abstract_params(model, inputs))
    return rules.load_params(table, self.weights, abstract, source="weights")


def read_case(directory: pathlib.Path) -> Case:
  """Reads a case."""
  meta = read_json(directory / "meta.json")
  arrays = dict(np.load(directory / "io.npz"))
  tensors = (
    read_tensors(directory / name) if name in meta["files"] else {}
    for name in ("weights.safetensors", "grads.safetensors")
  )
  return Case(directory, meta, arrays, *tensors)


def channels_first(x: jax.Array) -> jax.Array:
  """Our images [..., X, Y, channels] in the recorded [..., channels, X, Y]."""
  return jnp.moveaxis(x, -1, -3)


def apply(
  model: nn.Module, params: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Mapping[str, Any]]:
  """The module's outputs, and the intermediates that it recorded."""
  out, recorded = model.apply(
    {"params": params}, *args, mutable=["intermediates"], **kwargs
  )
  return out, recorded.get("intermediates", {})


def named_grads(
  prefix: str, table: list[rules.Rule], grads: Any
) -> dict[str, Any]:
  """Gradients of our parameters as "PREFIX/NAME", NAME the public name."""
  named = rules.dump_params(table, jax.device_get(grads))
  return {f"{prefix}/{name}": grad for name, grad in named.items()}


def head_budget(hyper: Mapping[str, Any]) -> HeadBudget:
  """The head split of a recorded attention module."""
  names = "num_heads", "shared_head", "routed_head", "head_dim"
  return HeadBudget(*(hyper[name] for name in names))


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
  params = case.load(module, table, x, *inputs)

  def objective(params, x):
    (y, aux), recorded = apply(module, params, x, *inputs)
    (routing,) = recorded["router"]["routing"]
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
