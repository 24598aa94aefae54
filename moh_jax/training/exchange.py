"""Gradients over the devices of a mesh: partial sums, exchanged once a step.

The compiler alone would sum the gradients over the devices in every microbatch,
and the routers' statistics in every layer. So the axes of the batch are taken
from it (`jax.shard_map`): each device computes the gradients of its own
examples, adds them up over the microbatches, and only then sends them. The axes
`tensor` and `sequence` stay with the compiler.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from moh_jax.config import MeshConfig
from moh_jax.runtime.sharding import axes_of_entry

_FSDP = "fsdp"


def exchange_axes(config: MeshConfig, sizes: dict[str, int]) -> tuple[str, ...]:
  """The mesh axes over which gradients are exchanged once a step.

  Args:
    config: section `mesh`.
    sizes: devices along each axis.
  """
  axes = ("data", _FSDP) if config.gather == "step" else ("data",)
  return tuple(axis for axis in axes if sizes[axis] > 1)


def exchange_once(
  gradients: Callable[..., tuple[Any, Any]],
  params: Any,
  config: MeshConfig,
  mesh: Mesh | AbstractMesh,
) -> Callable[..., tuple[Any, Any]]:
  """Wraps a gradient function so that devices exchange its results at its end.

  Args:
    gradients: (params, batch, rng, step) -> (gradients, metrics), the means
      over the examples of a batch.
    params: abstract parameters with shardings.
    config: section `mesh`.
    mesh: the devices.

  Returns:
    The same function of global arrays. Gradients are split as the parameters
    are; metrics have a leading axis, of the devices that had other examples.
  """
  sizes = dict(mesh.shape)
  axes = exchange_axes(config, sizes)
  if not axes:
    return gradients
  dtype = jnp.dtype(config.exchange)
  split, whole = PartitionSpec(axes), PartitionSpec()
  specs = jax.tree.map(lambda x: x.sharding.spec, params)

  def partial(*args: Any) -> Any:
    return jax.tree.map(lambda x: x[None], gradients(*args))

  def without(spec: PartitionSpec) -> PartitionSpec:
    kept = (
      tuple(axis for axis in axes_of_entry(entry) if axis not in axes)
      for entry in spec
    )
    return PartitionSpec(axes, *kept)

  def total(spec: PartitionSpec, grad: jax.Array) -> jax.Array:
    grad, rest = (grad[0] / parts).astype(dtype), set(axes)
    for dim, entry in enumerate(spec):
      if _FSDP in axes_of_entry(entry) and _FSDP in axes:
        how = {"scatter_dimension": dim, "tiled": True}
        grad = jax.lax.psum_scatter(grad, _FSDP, **how)
        rest.remove(_FSDP)
    return jax.lax.psum(grad, tuple(rest)) if rest else grad

  parts = math.prod(sizes[axis] for axis in axes)
  is_spec = {"is_leaf": lambda x: isinstance(x, PartitionSpec)}
  # Axes of one device are put under manual control too: with all of them so,
  # kernels need no further `shard_map`.
  partial = jax.shard_map(
    partial,
    in_specs=(whole, split, whole, whole),
    out_specs=split,
    axis_names=set(axes) | {axis for axis, n in sizes.items() if n == 1},
    check_vma=False,
  )
  exchange = jax.shard_map(
    lambda grads: jax.tree.map(total, specs, grads, **is_spec),
    in_specs=(jax.tree.map(without, specs, **is_spec),),
    out_specs=specs,
    check_vma=False,
  )

  def exchanged(*args: Any) -> tuple[Any, Any]:
    grads, metrics = partial(*args)
    grads = exchange(grads)
    return jax.tree.map(lambda x, p: x.astype(p.dtype), grads, params), metrics

  return exchanged
