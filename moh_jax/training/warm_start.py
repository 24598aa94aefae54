"""Starts a run from the parameters of another run."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from moh_jax import config as config_lib
from moh_jax.config import Config
from moh_jax.data.tokenizer_files import read_files_beside
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.models.registry import make_model
from moh_jax.models.restack import fit_params
from moh_jax.runtime import checkpoint, location
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.params import abstract_on
from moh_jax.training.new_classes import ClassRows, match_classes

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
_ROUTING_FIELDS = ("model.router.gate_form", "model.head_order")
_TWO_STAGE_FIELDS = ("model.router.two_stage",)


def warm_start(
  ours: Metadata, abstract: Any, mesh: Mesh
) -> Callable[[Any], Any]:
  """Checks that the checkpoint `train.init_from` fits a run; reads no arrays.

  Args:
    ours: metadata of the run.
    abstract: parameters of the run as ShapeDtypeStructs with shardings.
    mesh: the devices.

  Returns:
    A function that reads the parameters to start from, sharded like `abstract`.
    Its argument are the initial parameters of the run, of which the routers are
    kept if the checkpoint has none, and what belongs to classes that it does
    not have.

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
  stored = abstract_on(*make_model(trained), mesh)
  fit = functools.partial(
    fit_params, trained=trained.model, wanted=wanted.model
  )
  fitted = jax.eval_shape(fit, stored)
  classes = match_classes(ours, metadata, abstract, fitted)
  _check_shapes(source, abstract, fitted, classes)

  def combine(params: Any, initial: Any) -> Any:
    given, own = flatten_dict(fit(params)), flatten_dict(initial)
    return unflatten_dict(
      {
        path: classes[path].take(given[path], leaf)
        if path in classes
        else given.get(path, leaf)
        for path, leaf in own.items()
      }
    )

  def read(initial: Any) -> Any:
    params = checkpoint.restore_params(source, step, stored, use_ema=True)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    _LOG.info(
      "train.init_from=%s, step %d: %s",
      source,
      step,
      _describe(abstract, fitted, classes),
    )
    return jax.jit(combine, out_shardings=shardings)(params, initial)

  return read


def tokenizer_files(ours: Metadata, tokenizer: Tokenizer) -> dict[str, bytes]:
  """The files that a new run keeps beside its tokenizer.

  Those of the text that it is trained on, and where `train.init_from` has the
  same tokenizer, those that the text lacks: chat templates and stops are
  known to the model that the run starts from.

  Args:
    ours: metadata of the run.
    tokenizer: of the run's text.

  Raises:
    ValueError: a file beside the tokenizer of `train.init_from` is damaged.
  """
  source, files = ours.config.train.init_from, dict(tokenizer.files)
  if source:
    trained, _ = checkpoint.read_metadata(source)
    if trained.tokenizer_sha256 == tokenizer.sha256:
      files = {**read_files_beside(location.workdir(source)), **files}
  return files


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
    source,
    old,
  )


def _describe(
  abstract: Any, fitted: Any, classes: dict[tuple[str, ...], ClassRows]
) -> str:
  """Says which parameters a run takes, initialises and leaves out."""
  needed, given = flatten_dict(abstract), flatten_dict(fitted)
  new = [path for path in needed if path not in given]
  unused = [path for path in given if path not in needed]
  taken = len(needed) - len(new) - len(classes)
  parts = [f"took {taken} of {len(needed)} parameters"]
  parts += [f"{'/'.join(path)}: {rows}" for path, rows in classes.items()]
  for what, paths in (("initialised", new), ("left out", unused)):
    if paths:
      parts.append(f"{what} {', '.join('/'.join(path) for path in paths)}")
  return "; ".join(parts)


def _check_shapes(
  source: str,
  abstract: Any,
  fitted: Any,
  classes: dict[tuple[str, ...], ClassRows],
) -> None:
  needed, given = flatten_dict(abstract), flatten_dict(fitted)
  wrong = []
  for path, leaf in needed.items():
    if path in classes:
      continue
    shape = given[path].shape if path in given else None
    new_router = shape is None and "router" in path
    if shape != leaf.shape and not new_router:
      found = "missing" if shape is None else shape
      wrong.append(f"{'/'.join(path)} {found}, {leaf.shape} needed")
  wrong += [
    f"{'/'.join(path)} not used"
    for path in given
    if path not in needed and "router" not in path
  ]
  if wrong:
    more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    raise ValueError(
      f"train.init_from={source!r} does not fit the model: "
      f"{'; '.join(wrong[:3])}{more}"
    )
