"""Changes of a language model's parameters: vocabulary, dtypes, layout."""

from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.config import LLMConfig


def grow_vocabulary(params: Any, rows: int) -> Any:
  """Adds tokens, whose vectors are the mean of the old ones.

  Args:
    params: of a model with fewer tokens.
    rows: tokens wanted.

  Returns:
    Parameters of a model with `rows` tokens.
  """
  grown = dict(params)
  for module, leaf, axis in (("embed", "embedding", 0), ("head", "kernel", 1)):
    if module in params:
      old = params[module][leaf]
      mean = old.mean(axis, keepdims=True)
      new = jnp.repeat(mean, rows - old.shape[axis], axis=axis)
      grown[module] = {leaf: jnp.concatenate([old, new], axis=axis)}
  return grown


def compute_dtypes(params: Any, config: LLMConfig) -> Any:
  """The dtype that the network uses each parameter in.

  Matrices are used in the compute dtype, so storing them in it changes no
  output; routers, norms and biases stay float32.

  Args:
    params: arrays or their shapes.
    config: the model.

  Returns:
    The tree with a dtype for every leaf.
  """

  def dtype(path: tuple, leaf: Any) -> jnp.dtype:
    names = [key.key for key in path]
    matrix = names[-1] in ("kernel", "embedding") and "router" not in names
    return jnp.dtype(config.dtype) if matrix else leaf.dtype

  return jax.tree_util.tree_map_with_path(dtype, params)


def unroll(params: Any, config: LLMConfig) -> Any:
  """Cuts stacks into layers and stores kernels output-major.

  Args:
    params: as trained, every stack with a leading layer axis.
    config: the model.

  Returns:
    Parameters for `LLM(config, unrolled=True)`.
  """
  out = {n: tree for n, tree in params.items() if not n.startswith("blocks")}
  if "head" in out:
    out["head"] = {"kernel": out["head"]["kernel"].T}
  for index, group in enumerate(config.layer_groups()):
    for layer in range(group.depth):
      out[f"blocks{index}_{layer}"] = jax.tree_util.tree_map_with_path(
        lambda path, x: _output_major(path, x[layer]),  # noqa: B023
        params[f"blocks{index}"],
      )
  return out


def _output_major(path: tuple, x: jax.Array) -> jax.Array:
  """Puts the output dimensions of a layer's kernel first."""
  names = [key.key for key in path]
  if names[-1] != "kernel":
    return x
  inputs = 2 if names[-2] == "out" else 1  # heads and their dim, or the width
  return jnp.moveaxis(x, range(inputs), range(-inputs, 0))
