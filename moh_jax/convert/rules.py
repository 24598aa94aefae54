"""Conversion rules between our parameters and the tensors of a public release.

A table is a list of rules. A rule maps a list of public tensors ("theirs") to a
list of our parameters ("ours") and back, by views, transposes, splits and joins
only. So the same rules convert weights, gradients and, under `jax.eval_shape`,
shapes; of arrays that are mapped from a file, joins alone read anything.

A family's `Converter` holds its table and whatever else its public form needs.
"""

import dataclasses
import pathlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from moh_jax.config import Config, LayerStack, get_family, imported
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.layers.router import TwoStageRouter

Path = tuple[str, ...]
Arrays = list[Any]
Maps = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # to ours, and back
CONFIG_FILE = "config.json"  # describes the model of a folder
# Dtypes of weights. Tensors of other dtypes are quantized, and mean nothing
# without their scales.
WEIGHT_DTYPES = ("float64", "float32", "float16", "bfloat16")
_MAX_LISTED = 8
# Router matrices in the releases of ViT and DiT.
_ROUTER_NAMES = {"routed": "wg", "group": "wg_0", "shared": "wg_1"}


@dataclasses.dataclass(frozen=True)
class Rule:
  """One line of a conversion table.

  Attributes:
    theirs: names of public tensors.
    ours: paths in our parameter tree.
    load: maps their arrays, in the order of `theirs`, to ours.
    dump: inverse of `load`.
    layer: index along the leading layer axis of the parameters of scanned
      layers, of which this is the rule of one layer; ... of others.
    check: looks at the values of `theirs` before anything is converted, and
      raises ValueError; None where any will do.
  """

  theirs: tuple[str, ...]
  ours: tuple[Path, ...]
  load: Callable[[Arrays], Arrays]
  dump: Callable[[Arrays], Arrays]
  layer: int | types.EllipsisType = ...
  check: Callable[[Arrays], None] | None = None


@dataclasses.dataclass(frozen=True)
class Converter:
  """Functions that read and write the public checkpoints of a family.

  Attributes:
    rules: (model section) -> pairs of public tensors and our parameters.
    released_run: (model section, public tensors by name) -> the run that a
      released model stands for; the tensors may be an empty dict.
    kept: (model section, public tensors by name) -> those that mean something
      for the model; raises ValueError where one that should only repeat another
      differs from it.
    described: (format, path of a config.json, which need not exist) -> the
      model section that it describes, or None: the tensors' shapes must tell.
    folder_files: (config of the run, folder that holds the tokenizer's files
      already, tokenizer or None, dtype of the weights, licence or "", form) ->
      the small files of an exported folder beside the tokenizer's, texts by
      name; raises ValueError where the model has no such form. None where one
      file of tensors is exported.
    other_rules: functions as `rules` by format, of those that have other
      tensors.
  """

  rules: Callable[[Any], list[Rule]]
  released_run: Callable[[Any, Mapping[str, Any]], Config]
  kept: Callable[..., Mapping[str, Any]] = lambda model, tensors: tensors
  described: Callable[[str, pathlib.Path], Any] = lambda kind, path: None
  folder_files: Callable[..., Mapping[str, str]] | None = None
  other_rules: Mapping[str, Callable[[Any], list[Rule]]] = dataclasses.field(
    default_factory=dict
  )


def converter_of(model: Any) -> Converter:
  """The converter of a model section's family.

  Raises:
    NotImplementedError: the family has no public form.
  """
  converter = imported(get_family(model.family).converter)
  if converter is None:
    raise NotImplementedError(
      f"model.family={model.family!r} has no public tensor names to convert "
      "from or export to"
    )
  return converter


# Tables.

SAME: Maps = (lambda x: x, lambda x: x)
TRANSPOSED: Maps = (lambda x: x.T, lambda x: x.T)
# Kernels of torch Conv2d (out, in, X, Y) to ours (X, Y, in, out), and back.
CONV_MAPS: Maps = (
  lambda w: w.transpose(2, 3, 1, 0),
  lambda w: w.transpose(3, 2, 0, 1),
)


def reshaped(ours: tuple[int, ...], theirs: tuple[int, ...]) -> Maps:
  """Maps to our shape and back to theirs; an axis of either may be -1."""
  return lambda x: x.reshape(ours), lambda x: x.reshape(theirs)


def reshaped_kernel(ours: tuple[int, ...], theirs: tuple[int, int]) -> Maps:
  """Maps of a torch Linear's weight (out, in) to a kernel, and back.

  Args:
    ours: shape of the kernel, whose input axes come first.
    theirs: (in, out).
  """
  return lambda w: w.T.reshape(ours), lambda k: k.reshape(theirs).T


def one(theirs: str, ours: str, maps: Maps = SAME) -> Rule:
  """Rule between one public tensor and one parameter of ours.

  Args:
    theirs: name of the public tensor.
    ours: path of the parameter, such as "stage1/norm/scale".
    maps: maps of the array, theirs to ours and back.
  """
  path, (load, dump) = tuple(ours.split("/")), maps
  return Rule(
    (theirs,), (path,), lambda xs: [load(xs[0])], lambda xs: [dump(xs[0])]
  )


def linear(
  theirs: str,
  ours: str,
  *,
  bias: bool = True,
  kernel_maps: Maps = TRANSPOSED,
  bias_maps: Maps = SAME,
) -> list[Rule]:
  """Rules of a module's weight and bias, by default torch Linear to Dense.

  Args:
    theirs: name of the public module, with tensors "weight" and "bias".
    ours: path of our module, with parameters "kernel" and "bias".
    bias: whether there is a bias.
    kernel_maps: maps of the weight, theirs to ours and back; the default
      transposes (out, in) to (in, out).
    bias_maps: maps of the bias, theirs to ours and back.
  """
  table = [one(f"{theirs}.weight", f"{ours}/kernel", kernel_maps)]
  if bias:
    table.append(one(f"{theirs}.bias", f"{ours}/bias", bias_maps))
  return table


def norm(theirs: str, ours: str) -> list[Rule]:
  """Rules of a LayerNorm: weight and bias to scale and bias."""
  return [
    one(f"{theirs}.weight", f"{ours}/scale"),
    one(f"{theirs}.bias", f"{ours}/bias"),
  ]


def projection_rules(
  theirs: str, ours: str, parts: int, heads: int, dim: int, bias: bool
) -> list[Rule]:
  """Linear (parts * H * D, C) to a `HeadProjection` kernel (C, parts, H, D)."""
  maps = reshaped_kernel((-1, parts, heads, dim), (-1, parts * heads * dim))
  bias_maps = reshaped((parts, heads, dim), (-1,))
  return linear(theirs, ours, bias=bias, kernel_maps=maps, bias_maps=bias_maps)


def split_projection_rules(
  theirs: Sequence[str], ours: str, heads: int, *, dim: int, bias: bool
) -> list[Rule]:
  """Linears (H * D, C), one a part, to a `HeadProjection` (C, parts, H, D)."""
  kernel = reshaped_kernel((-1, heads, dim), (-1, heads * dim))
  table = [
    _joined([f"{n}.weight" for n in theirs], f"{ours}/kernel", 1, kernel)
  ]
  if bias:
    maps = reshaped((heads, dim), (-1,))
    table.append(
      _joined([f"{n}.bias" for n in theirs], f"{ours}/bias", 0, maps)
    )
  return table


def _joined(theirs: Sequence[str], ours: str, axis: int, maps: Maps) -> Rule:
  """Rule of one parameter that is a stack of public tensors along `axis`."""
  load, dump = maps
  before = (slice(None),) * axis
  return Rule(
    tuple(theirs),
    (tuple(ours.split("/")),),
    lambda xs: [np.stack([load(x) for x in xs], axis)],
    lambda xs: [dump(xs[0][(*before, i)]) for i in range(len(theirs))],
  )


def patch_rules(theirs: str, patch: int, channels: int) -> list[Rule]:
  """Convolution of patches (C, channels, p, p) to `patch` (p * p * c, C)."""
  return linear(
    theirs,
    "patch",
    kernel_maps=(
      lambda w: w.transpose(2, 3, 1, 0).reshape(-1, w.shape[0]),
      lambda w: w.reshape(patch, patch, channels, -1).transpose(3, 2, 0, 1),
    ),
  )


def mix_rules(
  theirs: str,
  ours: str,
  heads: int,
  dim: int,
  bias: bool = True,
  multiplier: float = 1.0,
) -> list[Rule]:
  """Linear (C, H * D) to a `HeadMix` kernel (H, D, C).

  Public models have no `attention_out_multiplier`: their weights include it.
  """
  load, dump = reshaped_kernel((heads, dim, -1), (heads * dim, -1))
  table = linear(theirs, ours, bias=bias, kernel_maps=(load, dump))
  if multiplier == 1:
    return table
  return [
    dataclasses.replace(
      rule,
      load=lambda xs, rule=rule: [rule.load(xs)[0] / multiplier],
      dump=lambda xs, rule=rule: [rule.dump(xs)[0] * multiplier],
    )
    for rule in table
  ]


def router_rules(
  budget: HeadBudget,
  router: RouterConfig,
  names: Mapping[str, str] = _ROUTER_NAMES,
) -> list[Rule]:
  """Rules of the router matrices that a layer has.

  Args:
    budget: the layer's head split.
    router: its router.
    names: public names of the matrices "routed", "group" and "shared".

  Raises:
    ValueError: no public checkpoint has such a router.
  """
  two_stage = TwoStageRouter.matrices(budget, router)
  matrices = {"two_stage": two_stage, "query_norm": (), "none": ()}
  if router.kind not in matrices:
    raise ValueError(
      f"model.router.kind={router.kind!r} must be one of {tuple(matrices)}: "
      "public checkpoints have no other router"
    )
  return [
    one(f"{names[ours]}.weight", f"router/{ours}", TRANSPOSED)
    for ours in matrices[router.kind]
  ]


def prefixed(rules: Iterable[Rule], theirs: str, ours: Path) -> list[Rule]:
  """Moves rules into a module: prefixes their names and our paths."""
  return [
    dataclasses.replace(
      rule,
      theirs=tuple(f"{theirs}{name}" for name in rule.theirs),
      ours=tuple((*ours, *path) for path in rule.ours),
    )
    for rule in rules
  ]


def stacked(
  block: Iterable[Rule], theirs: str, ours: Path, layers: Iterable[int]
) -> list[Rule]:
  """Rules of scanned layers, whose parameters have a leading layer axis.

  Rules of one parameter follow each other, so that it is read once.

  Args:
    block: rules of one layer.
    theirs: what precedes a layer's names, with {layer} for its number.
    ours: path of the stack.
    layers: numbers of the layers.
  """
  return [
    dataclasses.replace(moved, layer=index)
    for rule in block
    for index, layer in enumerate(layers)
    for moved in prefixed([rule], theirs.format(layer=layer), ours)
  ]


def stack_rules(
  config: LayerStack, block: Callable[[HeadBudget], list[Rule]], theirs: str
) -> list[Rule]:
  """Rules of all layers, each in the run of equal ones that holds it.

  Args:
    config: the model.
    block: rules of a layer by its head split.
    theirs: what precedes a layer's names, with {layer} for its number.
  """
  table, first = [], 0
  for index, group in enumerate(config.layer_groups()):
    layers = range(first, first + group.depth)
    first += group.depth
    ours = (f"blocks{index}",)
    table += stacked(block(group.budget), theirs, ours, layers)
  return table


# Arrays.


def load_params(
  rules: Sequence[Rule],
  tensors: Mapping[str, Any],
  abstract: Any,
  *,
  source: str,
) -> Any:
  """Converts public tensors to our parameters.

  Args:
    rules: conversion table.
    tensors: public tensors by name.
    abstract: our parameter tree as ShapeDtypeStructs.
    source: where the tensors come from, for messages.

  Returns:
    Our parameter tree, NumPy arrays in our dtypes.

  Raises:
    ValueError: tensors are missing, unexpected, or of a wrong shape or dtype;
      the message lists them.
  """
  check_tensors(rules, tensors, abstract, source=source)
  leaves = traverse_util.flatten_dict(abstract)
  params = {path: np.empty(x.shape, x.dtype) for path, x in leaves.items()}
  for rule in rules:
    loaded = rule.load([np.asarray(tensors[name]) for name in rule.theirs])
    for path, part in zip(rule.ours, loaded):
      params[path][rule.layer] = part
  return traverse_util.unflatten_dict(params)


def dump_params(rules: Sequence[Rule], params: Any) -> dict[str, Any]:
  """Converts our parameters (or gradients) to public tensors by name.

  Raises:
    ValueError: a parameter has no rule.
  """
  flat = traverse_util.flatten_dict(params)
  used = {path for rule in rules for path in rule.ours}
  if left := ["/".join(path) for path in flat if path not in used]:
    raise ValueError(f"parameters without a conversion rule: {_listed(left)}")
  out = {}
  for rule in rules:
    ours = [flat[path][rule.layer] for path in rule.ours]
    out.update(zip(rule.theirs, rule.dump(ours)))
  return out


def expected_tensors(
  rules: Sequence[Rule], abstract: Any
) -> dict[str, jax.ShapeDtypeStruct]:
  """Shapes and dtypes of the public tensors, from our abstract parameters."""
  return jax.eval_shape(lambda params: dump_params(rules, params), abstract)


def check_tensors(
  rules: Sequence[Rule],
  tensors: Mapping[str, Any],
  abstract: Any,
  *,
  source: str,
) -> None:
  """Checks the names, shapes and dtypes of public tensors without reading them.

  Tensors are read only for rules with a `check`.

  Args:
    rules: conversion table.
    tensors: public tensors by name; they have a shape and a dtype.
    abstract: our parameter tree as ShapeDtypeStructs.
    source: where the tensors come from, for messages.

  Raises:
    ValueError: tensors are missing, unexpected, or of a wrong shape or dtype;
      the message lists them.
  """
  expected = expected_tensors(rules, abstract)
  check_shapes(tensors, {n: x.shape for n, x in expected.items()}, source)
  for rule in rules:
    if rule.check:
      rule.check([np.asarray(tensors[name]) for name in rule.theirs])


def check_shapes(
  tensors: Mapping[str, Any],
  expected: Mapping[str, tuple[int, ...]],
  source: str,
) -> None:
  """Checks that tensors have these names and shapes, and dtypes of weights.

  Raises:
    ValueError: some have not; the message lists them.
  """
  dtypes = f"dtype, must be one of {', '.join(WEIGHT_DTYPES)}"
  problems: dict[str, list[str]] = {
    "missing": sorted(expected.keys() - tensors.keys()),
    "not expected": sorted(tensors.keys() - expected.keys()),
    "shape": [],
    dtypes: [],
  }
  for name in sorted(expected.keys() & tensors.keys()):
    found, wanted = tuple(tensors[name].shape), expected[name]
    if found != wanted:
      problems["shape"].append(f"{name} {found} instead of {wanted}")
    if str(tensors[name].dtype) not in WEIGHT_DTYPES:
      problems[dtypes].append(f"{name} {tensors[name].dtype}")
  if any(problems.values()):
    listed = [
      f"{len(x)} {what}: {_listed(x)}" for what, x in problems.items() if x
    ]
    raise ValueError(
      f"{source}: tensors do not fit the model ({len(expected)} expected); "
      + "; ".join(listed)
    )


def _listed(names: list[str]) -> str:
  more = f", and {len(names) - _MAX_LISTED} more" * (len(names) > _MAX_LISTED)
  return ", ".join(names[:_MAX_LISTED]) + more
