"""Memory that a microbatch takes until its gradients are known, estimated."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.plan.liveness import peak_bytes
from moh_jax.runtime.params import abstract_params, unbox
from moh_jax.runtime.sharding import AXES, RULES, resolve_spec
from moh_jax.training.task import Objective


def activation_bytes(
  objective: Objective,
  device: jax.sharding.AbstractDevice,
  examples: int,
  tensor: int = 1,
  sequence: int = 1,
) -> float:
  """Bytes of a microbatch's activations on one device, estimated.

  The program is that of one device with its own examples, so attention has the
  form that it will have there. Parameters and their gradients, split or not,
  are left out; the parameters that the devices of `fsdp` put together in the
  compute dtype are part of it.

  Args:
    objective: network and loss.
    device: what the program is for.
    examples: of a microbatch on the device.
    tensor: size of the mesh's axis `tensor`.
    sequence: size of the mesh's axis `sequence`.
  """
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((examples, *x.shape), x.dtype),
    objective.example,
  )
  boxed = abstract_params(objective.model, objective.inputs)
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    program = jax.make_jaxpr(jax.grad(objective.loss_fn, has_aux=True))(
      unbox(boxed),
      batch,
      jax.eval_shape(lambda: jax.random.key(0)),
      jax.ShapeDtypeStruct((), jnp.int32),
    )
  return peak_bytes(program.jaxpr, _Sizes(boxed, tensor, sequence))


class _Sizes:
  """Bytes that an array of the traced program takes on a device of the mesh.

  The program does not know the mesh. Arrays of the shape and dtype of a
  parameter, or of a layer of a stacked one, are parameters or gradients, which
  are counted elsewhere. Dimensions as long as one that parameters have for
  heads, the MLP or the vocabulary are split over `tensor`; over `sequence` all
  but arrays of the shape of a parameter, by their tokens or their heads.
  """

  def __init__(self, boxed: Any, tensor: int, sequence: int):
    mesh = dict.fromkeys(AXES, 1) | {"tensor": tensor}
    self._sequence = sequence
    self._parameters: set[tuple] = set()
    self._split: dict[int, int] = {}
    for leaf in jax.tree.leaves(boxed, is_leaf=_is_boxed):
      value = leaf.value if _is_boxed(leaf) else leaf
      names = leaf.names if _is_boxed(leaf) else (None,) * value.ndim
      self._parameters.add((value.shape, value.dtype))
      if "layers" in names:
        self._parameters.add((value.shape[1:], value.dtype))
      spec = resolve_spec(names, value.shape, mesh, RULES)
      split = [size for size, axes in zip(value.shape, spec) if axes]
      self._split |= dict.fromkeys(split, tensor)
    self._shapes = {shape for shape, _ in self._parameters}

  def __call__(self, aval: Any) -> float:
    """Bytes of an abstract array; none in the host's memory."""
    if (
      not hasattr(aval, "shape")
      or (aval.shape, aval.dtype) in self._parameters
      or aval.memory_space is jax.memory.Space.Host
    ):
      return 0.0
    whole = math.prod(aval.shape) * jnp.dtype(_plain(aval.dtype)).itemsize
    inner = aval.shape[1:] if len(aval.shape) > 2 else ()
    whole /= max([self._split.get(size, 1) for size in inner] or [1])
    return whole if aval.shape in self._shapes else whole / self._sequence


def _is_boxed(x: Any) -> bool:
  return isinstance(x, nn.LogicallyPartitioned)


def _plain(dtype: Any) -> Any:
  """A dtype that has a size in bytes; keys of random numbers have none."""
  return dtype if isinstance(dtype, jnp.dtype) else jnp.uint64
