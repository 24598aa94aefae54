"""Tables that pair our parameters with a public checkpoint's tensors.

A rule maps a list of their tensors to a list of our arrays and back. Only
views, transposes, splits and joins are used, so the same rules carry weights,
gradients and, under `jax.eval_shape`, shapes.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

Path = tuple[str, ...]
Arrays = list[Any]
_MAX_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Rule:
  """One line of a table.

  Attributes:
    theirs: tensor names of the public checkpoint.
    ours: paths in our parameter tree.
    load: their arrays, in order, to ours.
    dump: the inverse.
  """

  theirs: tuple[str, ...]
  ours: tuple[Path, ...]
  load: Callable[[Arrays], Arrays]
  dump: Callable[[Arrays], Arrays]


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
  return Rule(theirs, rule.ours, load, dump)


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
  tensors: Mapping[str, np.ndarray],
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
    ValueError: tensors are missing, left over or of another shape; all of them
      are listed.
  """
  rules = list(rules)
  expected = {
    name: leaf.shape
    for name, leaf in jax.eval_shape(
      lambda p: dump_params(rules, p), abstract
    ).items()
  }
  _check_names_and_shapes(expected, tensors, source)
  params: dict[Path, np.ndarray] = {}
  for rule in rules:
    loaded = rule.load([tensors[name] for name in rule.theirs])
    params.update(zip(rule.ours, loaded))
  leaves = traverse_util.flatten_dict(abstract)
  return traverse_util.unflatten_dict(
    {path: params[path].astype(leaf.dtype) for path, leaf in leaves.items()}
  )


def dump_params(rules: Iterable[Rule], params: Any) -> dict[str, Any]:
  """Converts our parameters (or gradients) to their names and layout.

  Raises:
    ValueError: a parameter that no rule mentions.
  """
  flat = traverse_util.flatten_dict(params)
  out, used = {}, set()
  for rule in rules:
    out.update(zip(rule.theirs, rule.dump([flat[path] for path in rule.ours])))
    used.update(rule.ours)
  if left := ["/".join(path) for path in flat if path not in used]:
    raise ValueError(f"parameters without a conversion rule: {_listed(left)}")
  return out


def _check_names_and_shapes(
  expected: Mapping[str, tuple], tensors: Mapping[str, Any], source: str
) -> None:
  missing = [name for name in expected if name not in tensors]
  extra = [name for name in tensors if name not in expected]
  misshapen = [
    f"{name} {tuple(tensors[name].shape)} instead of {shape}"
    for name, shape in expected.items()
    if name in tensors and tuple(tensors[name].shape) != shape
  ]
  problems = {"missing": missing, "not expected": extra, "shape": misshapen}
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
