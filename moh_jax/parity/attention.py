"""Recorded attention modules: what the families' cases have in common."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.convert import rules
from moh_jax.runtime.params import abstract_params, unbox


def attention_results(
  module: nn.Module,
  table: list[rules.Rule],
  arrays: Mapping[str, np.ndarray],
  weights: Mapping[str, np.ndarray],
  *inputs: Any,
) -> dict[str, Any]:
  """Outputs, routing and gradients of sum(y * r) + l_aux.

  Args:
    module: maps (x, *inputs) to (y, RouterAux) and records its routing.
    table: pairs its parameters with the recorded weights.
    arrays: the case's "x" and "r".
    weights: the recorded weights.
    *inputs: further inputs of the module.
  """
  x = jnp.asarray(arrays["x"])
  abstract = unbox(abstract_params(module, (x, *inputs)))
  params = rules.load_params(table, weights, abstract, source="weights")

  def objective(params, x):
    (y, aux), recorded = module.apply(
      {"params": params}, x, *inputs, mutable=["intermediates"]
    )
    (routing,) = recorded["intermediates"]["router"]["routing"]
    loss = jnp.sum(y * arrays["r"]) + aux.balance_loss
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


def named_grads(
  prefix: str, table: list[rules.Rule], grads: Any
) -> dict[str, Any]:
  """Gradients under their public names, "PREFIX/NAME"."""
  named = rules.dump_params(table, jax.device_get(grads))
  return {f"{prefix}/{name}": grad for name, grad in named.items()}
