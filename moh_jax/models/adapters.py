"""Adapters (LoRA, arXiv:2106.09685) of any network, and its frozen parameters.

A network with adapters has two trees of parameters, one that is trained and one
that is frozen; `join` makes one of them, which the network computes with.
`layers.linear` finds a kernel's adapter beside it:

  lora_a      A, [*inputs, r]; of a kernel with parts (queries, keys and values
              in one) [C, parts, r]
  lora_b      B, [r, *outputs], or [parts, r, H, D]
  lora_scale  alpha / r

and `kernel_scale`, by which a kernel in int8 is multiplied. Parameters of
stacked layers have a leading axis of layers, these too.
"""

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from moh_jax.config import LoraConfig
from moh_jax.layers.linear import KERNEL_SCALE, LORA_A, LORA_B, LORA_SCALE
from moh_jax.layers.partitioning import LogicalAxes

Path = tuple[str, ...]
_KERNEL = "kernel"
_MATRICES = (_KERNEL, "embedding")
_MOST_INT8 = 127
_LEAST_SCALE = 1e-30  # of a channel of zeros


@dataclasses.dataclass(frozen=True)
class Matrix:
  """A kernel that can have an adapter.

  Attributes:
    lead: 1 where layers are stacked along the first axis, else 0.
    inputs: number of the input dimensions, which follow.
    parts: names of the matrices that lie in it side by side along the next
      axis; () where it has no such axis.
    shape: of the kernel.
    axes: logical names of its dimensions.
  """

  lead: int
  inputs: int
  parts: tuple[str, ...]
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]

  @classmethod
  def of(cls, name: str, box: LogicalAxes) -> "Matrix":
    """The matrix of a kernel.

    Args:
      name: of its layer.
      box: the abstract kernel, in its box of logical axes.
    """
    shape, axes = box.value.shape, tuple(box.names)
    lead = int(axes[0] == "layers")
    parts: tuple[str, ...] = ()
    if len(shape) - lead - box.inputs == 3:  # parts, heads, head dim
      parts = tuple(name)  # a letter for each: "q", "kv" or "qkv"
    return cls(lead, box.inputs, parts, shape, axes)

  @property
  def input_axes(self) -> range:
    """The kernel's axes that a product sums over."""
    return range(self.lead, self.lead + self.inputs)

  @property
  def fan_in(self) -> int:
    """Number of its inputs."""
    return math.prod(self.shape[axis] for axis in self.input_axes)

  def names(self, layer: Path) -> list[str]:
    """Names of the matrices in it, such as "blocks0/attn/q"."""
    *above, name = layer
    return ["/".join((*above, part)) for part in self.parts or (name,)]

  def factors(self, rank: int) -> dict[str, LogicalAxes]:
    """Abstract parameters of an adapter, in boxes of logical axes."""
    first = self.lead + self.inputs  # the axis after the inputs
    rest = first + bool(self.parts)

    def box(*cuts: slice | int) -> LogicalAxes:
      sizes, names = [], []
      for cut in cuts:  # a number is the rank
        is_rank = isinstance(cut, int)
        sizes += [rank] if is_rank else self.shape[cut]
        names += ["rank"] if is_rank else self.axes[cut]
      value = jax.ShapeDtypeStruct(tuple(sizes), jnp.float32)
      return LogicalAxes(value, tuple(names))

    lead, parts = slice(self.lead), slice(first, rest)
    return {
      LORA_A: box(slice(rest), rank),
      LORA_B: box(lead, parts, rank, slice(rest, None)),
      LORA_SCALE: box(lead),
    }

  def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
    """A B, float32 and shaped as the kernel."""
    lead, parts = self.shape[: self.lead], len(self.parts) or 1
    a = a.reshape(*lead, self.fan_in, parts, -1)
    b = b.reshape(*lead, parts, a.shape[-1], -1)
    out = jnp.einsum("...cpr,...pro->...cpo", a, b, precision="highest")
    return out.reshape(self.shape)

  def quantized(self, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The kernel in int8, and its scales by output channel."""
    largest = jnp.abs(kernel).max(tuple(self.input_axes), keepdims=True)
    scale = jnp.maximum(largest.astype(jnp.float32) / _MOST_INT8, _LEAST_SCALE)
    return jnp.round(kernel / scale).astype(jnp.int8), scale

  def scale_box(self) -> LogicalAxes:
    """The abstract scales of the kernel in int8, in their box."""
    shape, axes = list(self.shape), list(self.axes)
    for axis in self.input_axes:
      shape[axis], axes[axis] = 1, None
    return LogicalAxes(jax.ShapeDtypeStruct(shape, jnp.float32), tuple(axes))


@dataclasses.dataclass(frozen=True)
class Adapters:
  """The adapters of a network: what is trained with them, and what frozen.

  Attributes:
    config: section `tune.lora`.
    kernels: all that can have adapters, by the path of their layer.
    adapted: layers that have one, and which of their parts.
    base: abstract parameters of the network, in boxes of logical axes, in the
      dtypes in which the others are made from them.
    trained: the same of those that are trained: factors, and what
      `config.whole` names.
    frozen: the same of those that are frozen, in the dtypes in which they are
      held.
  """

  config: LoraConfig
  kernels: Mapping[Path, Matrix]
  adapted: Mapping[Path, np.ndarray]
  base: Any
  trained: Any
  frozen: Any

  @classmethod
  def of(cls, boxed: Any, config: LoraConfig) -> "Adapters":
    """The adapters that a config asks for.

    Args:
      boxed: abstract parameters of the network in boxes of logical axes.
      config: section `tune.lora`, with a rank above 0.

    Raises:
      ValueError: a pattern names no matrix, or no parameter.
    """
    leaves = flatten_dict(boxed)
    kernels = {
      path[:-1]: Matrix.of(path[-2], box)
      for path, box in leaves.items()
      if getattr(box, "inputs", None) is not None
    }
    names = {path: one.names(path) for path, one in kernels.items()}
    paths = {path: "/".join(path) for path in leaves}
    _check("targets", config.targets, itertools.chain(*names.values()))
    _check("whole", set(config.whole) - set(LoraConfig.whole), paths.values())
    has = {
      path: np.array([_matches(name, config.targets) for name in each])
      for path, each in names.items()
    }
    adapted = {path: parts for path, parts in has.items() if parts.any()}
    base, trained, frozen = dict(leaves), {}, {}
    for path, box in leaves.items():
      layer, is_kernel = path[:-1], path[-1] == _KERNEL
      if _matches(paths[path], config.whole):
        trained[path] = box
        if is_kernel:
          adapted.pop(layer, None)
        continue
      matrix = path[-1] in _MATRICES and config.base_dtype != "float32"
      if matrix:
        base[path] = frozen[path] = _as_dtype(box, jnp.bfloat16)
      else:
        frozen[path] = box
      if matrix and config.base_dtype == "int8" and layer in kernels:
        frozen[path] = _as_dtype(box, jnp.int8)
        frozen[*layer, KERNEL_SCALE] = kernels[layer].scale_box()
    for layer in adapted:
      factors = kernels[layer].factors(config.rank)
      frozen[*layer, LORA_SCALE] = factors.pop(LORA_SCALE)
      trained |= {(*layer, name): box for name, box in factors.items()}
    trees = map(unflatten_dict, (base, trained, frozen))
    return cls(config, kernels, adapted, *trees)

  def begin(self, key: jax.Array, base: Any) -> Any:
    """The first trained parameters: adapters that add nothing yet.

    A is uniform up to 1 / root of the number of its inputs, B is 0 (as PEFT).

    Args:
      key: of the random factors.
      base: parameters of the network, as `self.base` says.
    """
    given, trained = flatten_dict(base), {}
    boxes = sorted(flatten_dict(self.trained).items())
    for index, (path, box) in enumerate(boxes):
      *layer, name = path
      if name == LORA_A:
        one, key_a = self.kernels[tuple(layer)], jax.random.fold_in(key, index)
        most = one.fan_in**-0.5
        draw = jax.random.uniform(
          key_a, box.value.shape, minval=-most, maxval=most
        )
        has = self.adapted[tuple(layer)][:, None]
        trained[path] = jnp.where(has, draw, 0) if one.parts else draw
      elif name == LORA_B:
        trained[path] = jnp.zeros(box.value.shape, jnp.float32)
      else:
        trained[path] = given[path].astype(jnp.float32)
    return unflatten_dict(trained)

  def freeze(self, base: Any) -> Any:
    """The frozen parameters, as they are held.

    Args:
      base: parameters of the network, as `self.base` says.
    """
    given, boxes, frozen = flatten_dict(base), flatten_dict(self.frozen), {}
    for path, box in boxes.items():
      *layer, name = path
      (held,) = jax.tree.leaves(box)
      if name == LORA_SCALE:
        factor = self.config.alpha / self.config.rank
        frozen[path] = jnp.full(held.shape, factor, jnp.float32)
      elif held.dtype == jnp.int8:
        one = self.kernels[tuple(layer)]
        frozen[path], scale = one.quantized(given[path])
        frozen[*layer, KERNEL_SCALE] = scale
      elif name != KERNEL_SCALE:
        frozen[path] = given[path].astype(held.dtype)
    return unflatten_dict(frozen)

  def merge(self, params: Any) -> Any:
    """The network's parameters, of which adapters have become a part.

    Args:
      params: trained and frozen ones, joined; without the adapters they are
        those of the model that the adapters are trained on.

    Returns:
      Float32 arrays, as the network has them without adapters.
    """
    given = flatten_dict(params)
    merged = {}
    for path in flatten_dict(self.base):
      *layer, name = path
      value = given[path].astype(jnp.float32)
      if name == _KERNEL and (*layer, KERNEL_SCALE) in given:
        value = value * given[*layer, KERNEL_SCALE]
      if name == _KERNEL and (*layer, LORA_A) in given:
        one = self.kernels[tuple(layer)]
        a, b, factor = (
          given[*layer, part] for part in (LORA_A, LORA_B, LORA_SCALE)
        )
        added = one.product(a, b)
        factor = jnp.expand_dims(factor, range(one.lead, added.ndim))
        value = value + factor * added
      merged[path] = value
    return unflatten_dict(merged)


def join(frozen: Any, trained: Any) -> Any:
  """One tree of parameters from two, whose leaves have different paths.

  Args:
    frozen: a tree, or None: `trained` has all.
    trained: a tree.
  """
  if frozen is None:
    return trained
  return unflatten_dict(flatten_dict(frozen) | flatten_dict(trained))


def count(*trees: Any) -> int:
  """Parameters in trees, without the scales beside kernels."""
  leaves = (leaf for tree in trees for leaf in flatten_dict(tree or {}).items())
  scales = (LORA_SCALE, KERNEL_SCALE)
  return sum(x.size for path, x in leaves if path[-1] not in scales)


def without_adapters(params: Any) -> Any:
  """The parameters that the network would have with its adapters off."""
  flat = flatten_dict(params)
  factors = (LORA_A, LORA_B, LORA_SCALE)
  return unflatten_dict({p: x for p, x in flat.items() if p[-1] not in factors})


def _as_dtype(box: Any, dtype: jnp.dtype) -> Any:
  """An abstract parameter, in its box or not, in another dtype."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), box)


def _matches(name: str, patterns: Iterable[str]) -> bool:
  return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check(field: str, patterns: Iterable[str], names: Iterable[str]) -> None:
  """Raises ValueError where a pattern matches none of the names."""
  names = sorted(set(names))
  for pattern in sorted(patterns):
    if not fnmatch.filter(names, pattern):
      known = ", ".join(names)
      raise ValueError(
        f"tune.lora.{field}: {pattern!r} matches none of {known}"
      )
