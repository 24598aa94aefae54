"""Learning rates that fall from the output to the input (arXiv:2106.08254).

Fine-tuning changes the last layers most: the first ones serve any task.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from moh_jax.config import RoutedLayers


def scale(
  optimizer: optax.GradientTransformation, decay: float, model: RoutedLayers
) -> optax.GradientTransformation:
  """Multiplies an optimizer's updates by the factors of `factors`.

  The state is the optimizer's own, so a run may be continued with another
  decay.

  Args:
    optimizer: gradient transformation whose updates include the learning rate.
    decay: factor from a layer to the one before it, in (0, 1].
    model: section of the network.
  """
  if decay == 1:
    return optimizer

  def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    updates, state = optimizer.update(grads, state, params)
    return jax.tree.map(
      jnp.multiply, updates, factors(updates, decay, model)
    ), state

  return optax.GradientTransformation(optimizer.init, update)


def factors(params: Any, decay: float, model: RoutedLayers) -> Any:
  """Factors of the learning rate: decay to the power of the layers above.

  The output has the factor 1, the last layer `decay`, and what comes before
  the first layer the least.

  Args:
    params: parameter tree, or one of its structure and shapes.
    decay: in (0, 1].
    model: section of the network.

  Returns:
    Tree of float32 arrays, which broadcast to the parameters: those of stacked
    layers have one factor for each.
  """
  firsts, layers = {}, 0
  for name, group in zip(model.stack_names(), model.layer_groups()):
    firsts[name] = (layers, group.depth)
    layers += group.depth

  def one(path: tuple, leaf: Any) -> jax.Array:
    names = [key.key for key in path]
    first, depth = firsts.get(names[0], (layers, 0))
    if names[0] in model.INPUTS:
      depths = 0
    elif any(name.startswith("blocks") for name in names[:2]):
      # Stacked layers: their index is the first axis.
      depths = first + 1 + jnp.arange(depth)
      depths = depths.reshape(depth, *(1,) * (leaf.ndim - 1))
    elif names[0] in firsts:  # beside a stage's layers
      depths = first if "embed" in names[1] else first + depth
    else:
      depths = layers + 1
    return jnp.float32(decay) ** (layers + 1 - jnp.asarray(depths))

  return jax.tree_util.tree_map_with_path(one, params)
