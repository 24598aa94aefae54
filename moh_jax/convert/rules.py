"""Tables that pair our parameters with a public checkpoint's tensors.

A rule maps a list of their tensors to a list of our arrays and back. Only
views, transposes, splits and joins are used, so the same rules carry weights,
gradients and, under `jax.eval_shape`, shapes; and on arrays that are mapped
from a file they read nothing by themselves.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

Path = tuple[str, ...]
Arrays = list[Any]
# What weights may be stored as. Others are quantized: their numbers mean
# nothing without scales.
WEIGHT_DTYPES = ("float64", "float32", "float16", "bfloat16")
_MAX_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Rule:
  """One line of a table.

  Attributes:
    theirs: tensor names of the public checkpoint.
    ours: paths in our parameter tree.
    load: their arrays, in order, to ours.
    dump: the inverse.
    layer: of a scanned stack, the rule of one layer (its names and paths mean
      nothing); None where there is no leading layer axis.
  """

  theirs: tuple[str, ...]
  ours: tuple[Path, ...]
  load: Callable[[Arrays], Arrays]
  dump: Callable[[Arrays], Arrays]
  layer: "Rule | None" = None

  @property
  def layers(self) -> tuple[tuple[str, ...], ...]:
    """Of a stack, the names of each layer."""
    width = len(self.layer.theirs)
    starts = range(0, len(self.theirs), width)
    return tuple(self.theirs[start : start + width] for start in starts)


class Joined:
  """Arrays side by side along a new axis, read only where they are asked for.

  Attributes:
    shape: of the whole.
    dtype: of the whole.
  """

  def __init__(self, parts: list[np.ndarray], axis: int):
    """Takes equal shapes and dtypes."""
    self._parts, self._axis = parts, axis
    shape = parts[0].shape
    self.shape = (*shape[:axis], len(parts), *shape[axis:])
    self.dtype = parts[0].dtype

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    index = (*index, *(slice(None),) * (len(self.shape) - len(index)))
    rest = (*index[: self._axis], *index[self._axis + 1 :])
    kept = self._parts[index[self._axis]]
    return np.stack([part[rest] for part in kept], self._axis)

  def __array__(self, dtype: Any = None, copy: bool | None = None):
    return np.stack(self._parts, self._axis).astype(dtype or self.dtype)


def one(
  theirs: str,
  ours: str,
  load: Callable[[Any], Any] = lambda x: x,
  dump: Callable[[Any], Any] = lambda x: x,
) -> Rule:
  """A rule between one tensor and one parameter, "a/b/c"."""
  path = tuple(ours.split("/"))
  return Rule(
    (theirs,), (path,), lambda xs: [load(xs[0])], lambda xs: [dump(xs[0])]
  )


def transpose(matrix: Any) -> Any:
  """Swaps the axes of a matrix; its own inverse."""
  return matrix.T


def linear(theirs: str, ours: str, *, bias: bool = True) -> list[Rule]:
  """A torch Linear (out, in) to a Dense kernel (in, out)."""
  rules = [one(f"{theirs}.weight", f"{ours}/kernel", transpose, transpose)]
  return rules + ([one(f"{theirs}.bias", f"{ours}/bias")] if bias else [])


def norm(theirs: str, ours: str) -> list[Rule]:
  """LayerNorm: weight and bias to scale and bias."""
  return [
    one(f"{theirs}.weight", f"{ours}/scale"),
    one(f"{theirs}.bias", f"{ours}/bias"),
  ]


def conv(theirs: str, ours: str) -> list[Rule]:
  """A torch Conv2d (out, in, X, Y) to a Conv kernel (X, Y, in, out)."""
  return [
    conv_kernel(f"{theirs}.weight", f"{ours}/kernel"),
    one(f"{theirs}.bias", f"{ours}/bias"),
  ]


def conv_kernel(theirs: str, ours: str) -> Rule:
  """A torch convolution's (out, in, X, Y) to (X, Y, in, out)."""
  return one(
    theirs,
    ours,
    lambda w: w.transpose(2, 3, 1, 0),
    lambda w: w.transpose(3, 2, 0, 1),
  )


def stacked(rule: Rule, names: Iterable[tuple[str, ...]]) -> Rule:
  """Lifts a rule of one layer to a scanned stack with a leading layer axis.

  Args:
    rule: the rule of one layer; its `theirs` are replaced.
    names: per layer, their names in the rule's order.
  """
  names = tuple(names)
  width, depth = len(rule.theirs), len(names)

  def load(arrays: Arrays) -> Arrays:
    layers = [
      rule.load(arrays[i * width : (i + 1) * width]) for i in range(depth)
    ]
    return [np.stack(parts) for parts in zip(*layers)]

  def dump(arrays: Arrays) -> Arrays:
    return [x for i in range(depth) for x in rule.dump([a[i] for a in arrays])]

  theirs = tuple(name for layer in names for name in layer)
  return Rule(theirs, rule.ours, load, dump, rule)


def prefixed(rules: Iterable[Rule], theirs: str, ours: Path) -> list[Rule]:
  """Puts rules under a module of both sides."""
  return [
    dataclasses.replace(
      rule,
      theirs=tuple(f"{theirs}{name}" for name in rule.theirs),
      ours=tuple((*ours, *path) for path in rule.ours),
    )
    for rule in rules
  ]


def load_params(
  rules: Iterable[Rule],
  tensors: Mapping[str, Any],
  abstract: Any,
  *,
  source: str,
) -> Any:
  """Converts a public checkpoint.

  Args:
    rules: the table.
    tensors: their tensors.
    abstract: our parameter tree as ShapeDtypeStructs.
    source: where the tensors come from, for messages.

  Returns:
    Our parameter tree of NumPy arrays in our dtypes.

  Raises:
    ValueError: tensors are missing, left over or of another shape or kind; all
      of them are listed.
  """
  rules = list(rules)
  check_tensors(rules, tensors, abstract, source=source)
  params: dict[Path, np.ndarray] = {}
  for rule in rules:
    loaded = rule.load([np.asarray(tensors[name]) for name in rule.theirs])
    params.update(zip(rule.ours, loaded))
  leaves = traverse_util.flatten_dict(abstract)
  return traverse_util.unflatten_dict(
    {path: np.array(params[path], leaf.dtype) for path, leaf in leaves.items()}
  )


def dump_params(rules: Iterable[Rule], params: Any) -> dict[str, Any]:
  """Converts our parameters (or gradients) to their names and layout.

  Raises:
    ValueError: a parameter that no rule mentions.
  """
  rules = list(rules)
  flat = traverse_util.flatten_dict(params)
  check_covered(rules, flat)
  out = {}
  for rule in rules:
    out.update(zip(rule.theirs, rule.dump([flat[path] for path in rule.ours])))
  return out


def check_covered(rules: Iterable[Rule], paths: Iterable[Path]) -> None:
  """Refuses parameters that no rule mentions.

  Raises:
    ValueError: there are such; they are listed.
  """
  used = {path for rule in rules for path in rule.ours}
  if left := ["/".join(path) for path in paths if path not in used]:
    raise ValueError(f"parameters without a conversion rule: {_listed(left)}")


def expected_tensors(
  rules: Iterable[Rule], abstract: Any
) -> dict[str, jax.ShapeDtypeStruct]:
  """Their tensors of our abstract parameters; computes nothing."""
  rules = list(rules)
  return jax.eval_shape(lambda params: dump_params(rules, params), abstract)


def check_tensors(
  rules: Iterable[Rule],
  tensors: Mapping[str, Any],
  abstract: Any,
  *,
  source: str,
) -> None:
  """Checks a public checkpoint without reading it.

  Rules without parameters of ours, which only check a tensor, are run.

  Args:
    rules: the table.
    tensors: their tensors, or what has their shape and dtype.
    abstract: our parameter tree as ShapeDtypeStructs.
    source: where the tensors come from, for messages.

  Raises:
    ValueError: tensors are missing, left over or of another shape or kind; all
      of them are listed.
  """
  rules = list(rules)
  _check_names_and_shapes(expected_tensors(rules, abstract), tensors, source)
  for rule in rules:
    if not rule.ours:
      rule.load([np.asarray(tensors[name]) for name in rule.theirs])


def _check_names_and_shapes(
  expected: Mapping[str, Any], tensors: Mapping[str, Any], source: str
) -> None:
  missing = [name for name in expected if name not in tensors]
  extra = [name for name in tensors if name not in expected]
  there = {name: tensors[name] for name in expected if name in tensors}
  misshapen = [
    f"{name} {tuple(tensor.shape)} instead of {expected[name].shape}"
    for name, tensor in there.items()
    if tuple(tensor.shape) != expected[name].shape
  ]
  quantized = [
    f"{name} {tensor.dtype}"
    for name, tensor in there.items()
    if np.dtype(tensor.dtype).name not in WEIGHT_DTYPES
  ]
  problems = {
    "missing": missing,
    "not expected": extra,
    "shape": misshapen,
    f"dtype, must be one of {', '.join(WEIGHT_DTYPES)}": quantized,
  }
  if any(problems.values()):
    found = [
      f"{len(names)} {kind}: {_listed(names)}"
      for kind, names in problems.items()
      if names
    ]
    raise ValueError(
      f"{source}: tensors do not fit the model ({len(expected)} expected); "
      + "; ".join(found)
    )


def _listed(names: list[str]) -> str:
  more = f", and {len(names) - _MAX_LISTED} more" * (len(names) > _MAX_LISTED)
  return ", ".join(names[:_MAX_LISTED]) + more
