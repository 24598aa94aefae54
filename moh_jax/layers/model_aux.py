"""Router side values of a whole model, from those of its layers."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from moh_jax.ops.routing import RouterAux


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelAux:
  """Router side values of a whole model.

  Attributes:
    balance_loss: [] float32 mean over the layers that route, 0 if none does.
    activated_share: [] float32 heads used over all heads, of all layers.
    layers: the values that `collect_aux` was given.
  """

  balance_loss: jax.Array
  activated_share: jax.Array
  layers: Mapping[str, RouterAux] | Sequence[RouterAux]


def collect_aux(
  layers: Mapping[str, RouterAux] | Sequence[RouterAux],
) -> ModelAux:
  """Gathers the side values of a model's attention layers.

  For instance `collect_aux({"block0": aux0, "block1": aux1})`.

  Args:
    layers: by name or in order, the side values of a layer, or of a scanned
      stack of equal layers (with a leading layer axis).

  Returns:
    The model's balance loss and activated share. Every layer counts once,
    whether it is part of a stack or not.

  Raises:
    ValueError: it holds no layer, or anything but their side values.
  """
  values = layers.values() if isinstance(layers, Mapping) else layers
  values = list(values) if isinstance(values, Iterable) else []
  if not values or not all(isinstance(aux, RouterAux) for aux in values):
    kinds = sorted({type(aux).__name__ for aux in values or [layers]})
    raise ValueError(
      f"layers holds {kinds}, must be a dict or list of RouterAux, the second "
      "results of layers"
    )
  losses = [jnp.atleast_1d(aux.balance_loss) for aux in values if aux.routed]
  loss = (
    jnp.concatenate(losses).mean() if losses else jnp.zeros((), jnp.float32)
  )
  used = sum(aux.load.sum() for aux in values)
  present = sum(aux.load.size for aux in values)
  return ModelAux(loss, used / present, layers)
