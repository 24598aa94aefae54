"""Starts a run from the parameters of another run, also of other classes."""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from moh_jax.config import Config, apply_overrides
from moh_jax.config.parse import differing_keys
from moh_jax.data import tokenizers
from moh_jax.models import stored
from moh_jax.models.adapters import Adapters
from moh_jax.models.registry import fit_params, make_model
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.parameters import abstract_boxed, abstract_on, unbox
from moh_jax.training.step import Program, TrainState

_LOG = logging.getLogger(__name__)
# Keys, or beginnings of keys, that change what the model computes with the same
# parameters, and those of models that choose heads.
_NUMERIC = (
  *("model.norm_eps", "model.rope.", "model.sr_ratios:", "model.window:"),
  "model.attention_out_multiplier:",
)
_ROUTED = "model.router.gate_form", "model.router.structure", "model.head_order"
_Shapes = dict[str, tuple[int, ...]]  # by path
# (the run's initial parameters, of which those that its source lacks are
# enough) -> the parameters to start from.
Read = Callable[[Any], Any]


def with_absolute_base(config: Config) -> Config:
  """Names the base of adapters so that it is found from any folder."""
  if not (config.tune.lora.rank and config.train.init_from):
    return config
  place = os.fspath(steps.absolute(config.train.init_from))
  return apply_overrides(config, "train", init_from=place)


def prepare(
  ours: Metadata,
  program: Program,
  mesh: Mesh,
  directory: str | epath.Path,
  start: int | None,
) -> tuple[Callable[[], TrainState], Metadata, Any]:
  """Says how a run begins; see `warm_start` for what it refuses.

  Parameters that adapters are trained on are read at once, also where the run
  continues.

  Args:
    ours: metadata of the run.
    program: of the run.
    mesh: the devices.
    directory: working directory.
    start: step that the run continues; None for a new one.

  Returns:
    What makes its first state; its metadata, with the mark of what its adapters
    are trained on; and the parameters that are not trained, None where all are.
  """
  config, adapters = ours.config, program.adapters
  if adapters is None:
    if start is not None or not config.train.init_from:
      return program.init, ours, None
    _, read = warm_start(ours, program.state.params, mesh)

    def first_state() -> TrainState:
      state = program.init()
      params = read(state.params)
      ema = state.ema and jax.tree.map(jnp.array, params)
      return dataclasses.replace(state, params=params, ema=ema)

    return first_state, ours, None
  if start is not None:
    metadata, _ = checkpoint.read_metadata(directory, start)
    ours = dataclasses.replace(ours, base_mark=metadata.base_mark)
    frozen = stored.read_frozen(config, adapters, mesh, ours.base_mark)
    return program.init, ours, frozen
  if not config.train.init_from:
    raise ValueError(
      f"tune.lora.rank={config.tune.lora.rank} needs train.init_from, the "
      "parameters that adapters are trained on"
    )
  abstract = abstract_boxed(adapters.base, mesh)
  lacking, read = warm_start(ours, abstract, mesh, adapters)
  if lost := sorted(lacking - _flat(unbox(adapters.trained)).keys()):
    raise ValueError(
      f"train.init_from={config.train.init_from!r} lacks "
      f"{', '.join(lost[:3])}: tune.lora.whole must name what is to be trained "
      "from its initial values"
    )

  def initial() -> Any:
    params = _flat(program.random())
    return unflatten_dict({name: params[name] for name in lacking}, sep="/")

  def split(base: Any) -> tuple[Any, Any]:
    key = jax.random.key(config.train.seed)
    return adapters.begin(key, base), adapters.freeze(base)

  trees = program.state.params, program.frozen
  shardings = jax.tree.map(lambda x: x.sharding, trees)
  split = jax.jit(split, out_shardings=shardings, donate_argnums=0)
  first, frozen = split(read(jax.jit(initial)()))
  place = config.train.init_from
  mark = steps.mark(place, steps.find_step(place, None))
  ours = dataclasses.replace(ours, base_mark=mark)
  return lambda: program.init(first), ours, frozen


def warm_start(
  ours: Metadata, abstract: Any, mesh: Mesh, adapters: Adapters | None = None
) -> tuple[set[str], Read]:
  """Checks that the checkpoint `train.init_from` fits a run; reads no arrays.

  Args:
    ours: metadata of the run.
    abstract: parameters of the run as ShapeDtypeStructs with shardings.
    mesh: the devices.
    adapters: that are trained on the checkpoint's parameters, or None.

  Returns:
    Paths of the parameters that the checkpoint does not have: routers if it has
    none, and what belongs to classes if it has others. And what reads the
    parameters, sharded like `abstract`, with initial values of those.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: its model is of another family or shape, computes something
      else with the same parameters, or was trained with another tokenizer.
  """
  wanted, source = ours.config, ours.config.train.init_from
  metadata, step = checkpoint.read_metadata(source)
  trained, family = metadata.config, wanted.model.family
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
  needed, given = _shapes(abstract), _shapes(jax.eval_shape(fit, theirs))
  names = ours.class_names, metadata.class_names
  free = wanted.model.CLASS_PARAMS
  if not all(names) or names[0] == names[1]:
    free = {name for name in free if needed.get(name) != given.get(name)}
  lacking = (needed.keys() - given.keys()) | (free & needed.keys())
  _check_fit(source, needed, given, free)

  def combine(params: Any, initial: Any) -> Any:
    params, initial = _flat(fit(params)), _flat(initial)
    kept = {n: (initial if n in lacking else params)[n] for n in needed}
    return unflatten_dict(kept, sep="/")

  def read(initial: Any) -> Any:
    params = stored.read_params(metadata, source, step, theirs, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    _LOG.info(
      "train.init_from=%s, step %d: took %d of %d parameters%s",
      *(source, step, len(needed) - len(lacking), len(needed)),
      f"; initialised {', '.join(sorted(lacking))}" if lacking else "",
    )
    return jax.jit(combine, out_shardings=shardings)(params, initial)

  return lacking, read


def keep_tokenizer(
  directory: epath.Path,
  ours: Metadata,
  tokenizer: tokenizers.Tokenizer | None,
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
  """
  if jax.process_index() or tokenizer is None or not tokenizer.file_name:
    return
  files = {tokenizer.file_name: tokenizer.content}
  if is_new:
    files |= tokenizer.files
    if source := ours.config.train.init_from:
      own = steps.workdir(source) / tokenizer.file_name
      if own.is_file() and own.read_bytes() == tokenizer.content:
        files = tokenizers.read_files_beside(own.parent) | files
  tokenizers.write_tokenizer_files(directory, files)


def _check_numbers(source: str, ours: Config, theirs: Config) -> None:
  """The same parameters compute the same in both models."""
  kinds = {ours.model.router.kind, theirs.model.router.kind}
  numeric = _NUMERIC
  if "none" not in kinds:
    numeric += _ROUTED
  if kinds == {"two_stage"}:
    numeric += ("model.router.two_stage",)
  for name, section in ours.sections.items():
    own = getattr(section, "NUMERIC_FIELDS", ())
    numeric += tuple(f"{name}.{field}:" for field in own)
  lines = differing_keys(ours, theirs)
  if found := [line for line in lines if line.startswith(numeric)]:
    raise ValueError(
      f"train.init_from={source!r} holds parameters that were trained with "
      f"other numbers: {'; '.join(found)}"
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


def _check_fit(
  source: str, needed: _Shapes, given: _Shapes, free: Collection[str]
) -> None:
  """Only routers and parameters of classes may be missing or differ."""
  wrong = []
  for name in sorted((needed.keys() | given.keys()) - free):
    here, there = needed.get(name), given.get(name)
    if here == there or (None in (here, there) and "/router/" in name):
      continue
    found = "missing" if there is None else there
    needs = "not used" if here is None else f"{found}, {here} needed"
    wrong.append(f"{name} {needs}")
  if wrong:
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    raise ValueError(
      f"train.init_from={source!r} does not fit the model: "
      f"{'; '.join(wrong[:3])}{more}"
    )


def _shapes(tree: Any) -> _Shapes:
  return {name: leaf.shape for name, leaf in _flat(tree).items()}


def _flat(tree: Any) -> dict[str, Any]:
  return flatten_dict(tree, sep="/")
