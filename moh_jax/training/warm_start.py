"""Starts a run from the parameters of another run, also of other classes."""

import dataclasses
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from moh_jax import config as config_lib
from moh_jax.config import Config
from moh_jax.data.tokenizers import (
  Tokenizer,
  read_files_beside,
  write_tokenizer_files,
)
from moh_jax.models import stored
from moh_jax.models.adapters import Adapters
from moh_jax.models.registry import fit_params, make_model
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.sharding import abstract_boxed, abstract_on, unbox
from moh_jax.training.step import Program, TrainState

_LOG = logging.getLogger(__name__)

# Keys, or beginnings of keys, that change what the model computes with the same
# parameters.
_NUMERIC_FIELDS = (
  "model.norm_eps",
  "model.rope.",
  "model.sr_ratios:",
  "model.window:",
)
# Those of models that choose heads; of "two_stage", or own kinds made from it.
_ROUTING_FIELDS = (
  "model.router.gate_form",
  "model.router.structure",
  "model.head_order",
)
_TWO_STAGE_FIELDS = ("model.router.two_stage",)


@dataclasses.dataclass(frozen=True)
class ClassRows:
  """The rows of a parameter that belong to classes which both models have.

  Attributes:
    axis: axis of the classes.
    rows: [K, 2] rows in the run's parameter, and in the stored one, of the same
      classes.
    new: number of rows of the run's parameter that the stored one lacks.
    left: number of the stored rows that the run does not take.
  """

  axis: int
  rows: np.ndarray
  new: int
  left: int

  def take(self, given: jax.Array, own: jax.Array) -> jax.Array:
    """The run's initial parameter `own` with the rows that `given` has."""
    before = (slice(None),) * self.axis
    ours, theirs = ((*before, rows) for rows in self.rows.T)
    return own.at[ours].set(given[theirs].astype(own.dtype))

  def __str__(self) -> str:
    taken = len(self.rows)
    return f"took {taken} rows, initialised {self.new}, left out {self.left}"


@dataclasses.dataclass(frozen=True)
class Beginning:
  """What a run begins with.

  Attributes:
    state: () -> its first state.
    metadata: of the run, with the hash of what its adapters are trained on.
    frozen: the parameters that are not trained; None where all are.
  """

  state: Callable[[], TrainState]
  metadata: Metadata
  frozen: Any = None


@dataclasses.dataclass(frozen=True)
class Source:
  """A checkpoint that a run starts from.

  Attributes:
    lacking: paths of the parameters that it does not have, or not whole.
    read: (the run's initial parameters, of which `lacking` is enough) -> the
      parameters to start from, and the mark of those that are stored.
  """

  lacking: frozenset[str]
  read: Callable[[Any], tuple[Any, str]]


def prepare(
  ours: Metadata,
  program: Program,
  mesh: Mesh,
  directory: str | epath.Path,
  start: int | None,
) -> Beginning:
  """Says how the first state is made; see `warm_start` for what it refuses.

  Parameters that adapters are trained on are read at once, also where the run
  continues.

  Args:
    ours: metadata of the run.
    program: of the run.
    mesh: the devices.
    directory: working directory.
    start: step that the run continues; None for a new one.
  """
  config, adapters = ours.config, program.adapters
  if adapters is None:
    if start is not None or not config.train.init_from:
      return Beginning(program.init, ours)
    source = warm_start(ours, program.state.params, mesh)
    return Beginning(functools.partial(_first_state, program, source), ours)
  if start is not None:
    metadata, _ = checkpoint.read_metadata(directory, start)
    ours = dataclasses.replace(ours, base_mark=metadata.base_mark)
    frozen = stored.read_frozen(config, adapters, mesh, ours.base_mark)
    return Beginning(program.init, ours, frozen)
  if not config.train.init_from:
    raise ValueError(
      f"tune.lora.rank={config.tune.lora.rank} needs train.init_from, the "
      "parameters that adapters are trained on"
    )
  source = warm_start(ours, abstract_boxed(adapters.base, mesh), mesh, adapters)
  trained = _flat(unbox(adapters.trained))
  if lost := sorted(source.lacking - trained.keys()):
    raise ValueError(
      f"train.init_from={config.train.init_from!r} lacks "
      f"{', '.join(lost[:3])}: tune.lora.whole must name what is to be trained "
      "from its initial values"
    )

  def initial() -> dict[str, Any]:
    params = _flat(program.random())
    return {name: params[name] for name in source.lacking}

  def split(base: Any) -> tuple[Any, Any]:
    key = jax.random.key(config.train.seed)
    return adapters.begin(key, base), adapters.freeze(base)

  base, found = source.read(unflatten_dict(jax.jit(initial)(), sep="/"))
  shardings = jax.tree.map(
    lambda x: x.sharding, (program.state.params, program.frozen)
  )
  first, frozen = jax.jit(split, out_shardings=shardings, donate_argnums=0)(
    base
  )
  place = os.fspath(steps.absolute(config.train.init_from))
  train = dataclasses.replace(config.train, init_from=place)
  config = dataclasses.replace(config, train=train)
  ours = dataclasses.replace(ours, config=config, base_mark=found)
  return Beginning(lambda: program.init(first), ours, frozen)


def _first_state(program: Program, source: Source) -> TrainState:
  """The state of a run that trains all parameters of another one further."""
  state = program.init()
  params, _ = source.read(state.params)
  ema = state.ema
  if ema is not None:
    ema = jax.tree.map(lambda x, old: jnp.array(x, old.dtype), params, ema)
  return dataclasses.replace(state, params=params, ema=ema)


def check_source(config: Config, workdir: str) -> None:
  """Checks that a run which begins has the checkpoint that it begins from.

  Raises:
    FileNotFoundError: there is none at `train.init_from`.
  """
  source = config.train.init_from
  if not source or steps.list_steps(workdir):
    return
  try:
    steps.find_step(source, None)
  except FileNotFoundError as error:
    raise FileNotFoundError(f"train.init_from={source!r}: {error}") from error


def warm_start(
  ours: Metadata, abstract: Any, mesh: Mesh, adapters: Adapters | None = None
) -> Source:
  """Checks that the checkpoint `train.init_from` fits a run; reads no arrays.

  Args:
    ours: metadata of the run.
    abstract: parameters of the run as ShapeDtypeStructs with shardings.
    mesh: the devices.
    adapters: that are trained on the checkpoint's parameters, or None.

  Returns:
    How the parameters are read, sharded like `abstract`. Of the run's initial
    ones the routers are kept if the checkpoint has none, and what belongs to
    classes that it does not have.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: its model is of another family or shape, computes something
      else with the same parameters, or was trained with another tokenizer.
  """
  wanted = ours.config
  source = wanted.train.init_from
  metadata, step = checkpoint.read_metadata(source)
  trained = metadata.config
  family = wanted.model.family
  if family != trained.model.family:
    raise ValueError(
      f"train.init_from={source!r} holds a model of family "
      f"{trained.model.family!r}, model.family={family!r}"
    )
  _check_numbers(source, wanted, trained)
  _check_tokenizer(source, ours, metadata)
  if adapters is None:
    theirs = abstract_on(*make_model(trained), mesh)
  else:
    theirs = stored.base_abstract(trained, adapters, mesh)
  fit = functools.partial(
    fit_params, trained=trained.model, wanted=wanted.model
  )
  fitted = jax.eval_shape(fit, theirs)
  needed, given = _flat(abstract), _flat(fitted)
  classes = match_classes(ours, metadata, needed, given)
  taken = _taken(source, needed, given, classes)

  def combine(params: Any, initial: Any) -> Any:
    initial = _flat(initial)
    found = initial | _flat(fit(params))
    for name, one in classes.items():
      found[name] = one.take(found[name], initial[name])
    return unflatten_dict({name: found[name] for name in needed}, sep="/")

  def read(initial: Any) -> tuple[Any, str]:
    params = stored.read_params(metadata, source, step, theirs, mesh)
    found = stored.base_mark(step, params) if adapters else ""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    _LOG.info("train.init_from=%s, step %d: %s", source, step, taken)
    return jax.jit(combine, out_shardings=shardings)(params, initial), found

  return Source(frozenset(needed.keys() - given | classes.keys()), read)


def keep_tokenizer(
  directory: str | epath.Path,
  ours: Metadata,
  tokenizer: Tokenizer | None,
  is_new: bool = True,
) -> None:
  """Writes a tokenizer and the files beside it into a working directory.

  A new run keeps the files of the text that it is trained on, and where
  `train.init_from` has the same tokenizer, those that the text lacks: chat
  templates and stops are known to the model that the run starts from. A run
  that goes on keeps the files that it began with.

  Args:
    directory: working directory.
    ours: metadata of the run.
    tokenizer: of the run's text, if it has any; the kind "bytes" has no file.
    is_new: whether the run begins.

  Raises:
    ValueError: a file beside the tokenizer of `train.init_from` is damaged.
  """
  if tokenizer is None or not tokenizer.file_name:
    return
  files = {tokenizer.file_name: tokenizer.content}
  if is_new:
    files |= tokenizer.files
    source = ours.config.train.init_from
    files = _files_beside(source, tokenizer) | files
  if not jax.process_index():
    write_tokenizer_files(steps.absolute(directory), files)


def _files_beside(source: str, tokenizer: Tokenizer) -> dict[str, bytes]:
  """The files beside the same tokenizer of another run, if it has it."""
  if not source:
    return {}
  own = steps.workdir(source) / tokenizer.file_name
  same = own.is_file() and own.read_bytes() == tokenizer.content
  return read_files_beside(own.parent) if same else {}


def _check_numbers(source: str, ours: Config, theirs: Config) -> None:
  here, there = ours.model, theirs.model
  kinds, fields = {here.router.kind, there.router.kind}, _NUMERIC_FIELDS
  if "none" not in kinds:
    fields += _ROUTING_FIELDS
  if len(kinds) == 1 and not kinds & {"none", "query_norm"}:
    fields += _TWO_STAGE_FIELDS
  differing = config_lib.differing_fields(here, there, "model")
  wrong = [line for line in differing if line.startswith(fields)]
  for name, section in ours.sections.items():
    other = theirs.sections[name]
    fields = getattr(section, "NUMERIC_FIELDS", ())
    starts = tuple(f"{name}.{field}:" for field in fields)
    differing = config_lib.differing_fields(section, other, name)
    wrong += [line for line in differing if line.startswith(starts)]
  if wrong:
    raise ValueError(
      f"train.init_from={source!r} holds parameters that were trained with "
      f"other numbers: {'; '.join(wrong)}"
    )


def _check_tokenizer(source: str, ours: Metadata, theirs: Metadata) -> None:
  here, there = ours.tokenizer_sha256, theirs.tokenizer_sha256
  if not here or not there or here == there:
    return
  old, new = (m.config.model.vocab_size for m in (theirs, ours))
  if new == old:
    raise ValueError(
      f"train.init_from={source!r} was trained with a tokenizer of sha256 "
      f"{there[:16]}, the run's text was made with {here[:16]}: the same ids "
      "mean other text"
    )
  _LOG.warning(
    "another tokenizer than that of %s: the first %d ids must mean the same",
    *(source, old),
  )


def _flat(tree: Any) -> dict[str, Any]:
  return flatten_dict(tree, sep="/")


def _taken(
  source: str,
  needed: Mapping[str, Any],
  given: Mapping[str, Any],
  classes: Mapping[str, ClassRows],
) -> str:
  """Says which parameters a run takes, initialises and leaves out.

  Raises:
    ValueError: others than routers are missing or left, or of another shape.
  """
  new = [name for name in needed if name not in given]
  unused = [name for name in given if name not in needed]
  wrong = [
    f"{name} missing, {needed[name].shape} needed"
    for name in new
    if "/router/" not in name
  ]
  wrong += [
    f"{name} {given[name].shape}, {leaf.shape} needed"
    for name, leaf in needed.items()
    if name in given.keys() - classes and given[name].shape != leaf.shape
  ]
  wrong += [f"{name} not used" for name in unused if "/router/" not in name]
  if wrong:
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    raise ValueError(
      f"train.init_from={source!r} does not fit the model: "
      f"{'; '.join(wrong[:3])}{more}"
    )
  taken = len(needed) - len(new) - len(classes)
  parts = [f"took {taken} of {len(needed)} parameters"]
  parts += [f"{name}: {rows}" for name, rows in classes.items()]
  for what, names in (("initialised", new), ("left out", unused)):
    if names:
      parts.append(f"{what} {', '.join(names)}")
  return "; ".join(parts)


def match_classes(
  ours: Metadata,
  theirs: Metadata,
  needed: Mapping[str, Any],
  given: Mapping[str, Any],
) -> dict[str, ClassRows]:
  """Finds what a run can take of the parameters that belong to classes.

  Classes are matched by name, or by position where a model has no names and
  equally many classes. Rows behind those of the classes, such as the one of "no
  label", are taken where both have them.

  Args:
    ours: metadata of the run.
    theirs: metadata of the model that it starts from.
    needed: parameters of the run, or their shapes, by path.
    given: parameters of the other model in the layout of the run's.

  Returns:
    For each parameter that belongs to classes, by its path. It is empty where
    both have the same classes.
  """
  model, other = ours.config.model, theirs.config.model
  paths = (("/".join(path), axis) for path, axis in model.CLASS_AXES.items())
  axes = {name: axis for name, axis in paths if name in needed.keys() & given}
  alike = all(needed[name].shape == given[name].shape for name in axes)
  named = bool(ours.class_names and theirs.class_names)
  if alike and (not named or ours.class_names == theirs.class_names):
    return {}
  pairs: list[tuple[int, int]] = []
  if named:
    counts = Counter(theirs.class_names), Counter(ours.class_names)
    pairs = [
      (label, theirs.class_names.index(name))
      for label, name in enumerate(ours.class_names)
      # A name of several classes tells none of them.
      if counts[0][name] == counts[1][name] == 1
    ]
  elif model.num_classes == other.num_classes:
    pairs = [(label, label) for label in range(model.num_classes)]
  found = {}
  for name, axis in axes.items():
    here, there = (tree[name].shape[axis] for tree in (needed, given))
    beyond = range(min(here - model.num_classes, there - other.num_classes))
    more = [(model.num_classes + i, other.num_classes + i) for i in beyond]
    rows = np.array([*pairs, *more], int).reshape(-1, 2)
    found[name] = ClassRows(axis, rows, here - len(rows), there - len(rows))
  return found
