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
from moh_jax.runtime.mesh import axes_of_entry
from moh_jax.runtime.parameters import is_box

_FSDP = "fsdp"


def exchange_once(
  gradients: Callable[..., tuple[Any, Any]],
  params: Any,
  boxed: Any,
  config: MeshConfig,
  mesh: Mesh | AbstractMesh,
  frozen: Any = None,
) -> Callable[..., tuple[Any, Any]]:
  """Wraps a gradient function so that devices exchange its results at its end.

  Args:
    gradients: (params, batch, rng, step, frozen) -> (gradients, metrics), the
      means over the examples of a batch.
    params: abstract parameters with shardings.
    boxed: the same in their boxes of logical axes.
    config: section `mesh`.
    mesh: the devices.
    frozen: the parameters that are not trained, in boxes of logical axes.

  Returns:
    The same function of global arrays. Gradients are split as the parameters
    are; metrics have a leading axis, of the devices that had other examples.
  """
  sizes = dict(mesh.shape)
  axes = ("data", _FSDP) if config.gather == "step" else ("data",)
  axes = tuple(axis for axis in axes if sizes[axis] > 1)
  if not axes:
    return gradients
  parts = math.prod(sizes[axis] for axis in axes)
  dtype = jnp.dtype(config.exchange)
  split, whole = PartitionSpec(axes), PartitionSpec()
  leaves, tree = jax.tree.flatten(params)
  specs = [leaf.sharding.spec for leaf in leaves]
  boxes = jax.tree.leaves(boxed, is_leaf=is_box)

  def rounded(box: Any, param: jax.Array) -> jax.Array:
    # As its layer would, so that half is gathered, and that the gradients of a
    # microbatch take half the memory.
    return param.astype(getattr(box, "dtype", None) or param.dtype)

  def partial_sums(params: list, *args: Any) -> tuple[list, Any]:
    grads, metrics = gradients(jax.tree.unflatten(tree, params), *args)
    return jax.tree.map(lambda x: x[None], (jax.tree.leaves(grads), metrics))

  def partial_spec(spec: PartitionSpec) -> PartitionSpec:
    entries = (axes_of_entry(entry) for entry in spec)
    kept = (tuple(a for a in entry if a not in axes) for entry in entries)
    return PartitionSpec(axes, *kept)

  def exchange(spec: PartitionSpec, grad: jax.Array) -> jax.Array:
    grad, rest = (grad[0].astype(jnp.float32) / parts).astype(dtype), axes
    for dim, entry in enumerate(spec):
      if _FSDP in axes and _FSDP in axes_of_entry(entry):
        how = {"scatter_dimension": dim, "tiled": True}
        grad = jax.lax.psum_scatter(grad, _FSDP, **how)
        rest = tuple(axis for axis in axes if axis != _FSDP)
    grad = jax.lax.psum(grad, rest) if rest else grad
    return grad.astype(jnp.float32)

  # The axes before these have one device. They are put under manual control
  # too, since XLA of jax 0.12 wants those of a nested `shard_map` to follow.
  # With all axes so, kernels need no further one.
  names = list(sizes)
  manual = names[: max(map(names.index, axes)) + 1]
  if all(sizes[axis] == 1 for axis in names if axis not in manual):
    manual = names
  compute = jax.shard_map(
    partial_sums,
    in_specs=(whole, split, whole, whole, whole),
    out_specs=split,
    axis_names=set(manual),
    check_vma=False,
  )
  # Under control of all axes, so that no axis is gathered on the way.
  join = jax.shard_map(
    lambda grads: list(map(exchange, specs, grads)),
    in_specs=([partial_spec(spec) for spec in specs],),
    out_specs=specs,
    check_vma=False,
  )

  def held(box: Any, param: jax.Array) -> jax.Array:
    return rounded(box, param) if param.dtype == jnp.float32 else param

  def exchanged(params: Any, *args: Any) -> tuple[Any, Any]:
    params = list(map(rounded, boxes, jax.tree.leaves(params)))
    *args, others = args
    others = jax.tree.map(held, frozen, others, is_leaf=is_box)
    grads, metrics = compute(params, *args, others)
    return jax.tree.unflatten(tree, join(grads)), metrics

  return exchanged
