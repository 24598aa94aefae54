"""Starting a run from another run's parameters."""

import dataclasses
import functools
import logging
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import Mesh

from moh_jax import config as config_lib
from moh_jax.config import get_family
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.params import abstract_on

_LOG = logging.getLogger(__name__)
_Flat = dict[tuple[str, ...], Any]


# Fields without parameters of their own that the parameters were trained with.
_NUMERIC_FIELDS = ("model.norm_eps", "model.rope.", "model.router.gate_form")


class WarmStart:
  """The parameters of `train.init_from`, fitted to a run's model."""

  def __init__(self, ours: Metadata, abstract: Any, mesh: Mesh):
    """Checks, before any long work, that the parameters fit.

    Args:
      ours: of the run.
      abstract: its parameters as ShapeDtypeStructs with shardings.
      mesh: the devices.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: its model is of another family or shape, computes something
        else with the same parameters, or reads another tokenizer's ids.
    """
    config = ours.config
    self._directory = config.train.init_from
    metadata, self._step = checkpoint.read_metadata(self._directory, None)
    model, theirs = config.model, metadata.config.model
    if model.family != theirs.family:
      raise ValueError(
        f"train.init_from={self._directory!r} holds a model of family "
        f"{theirs.family!r}, model.family={model.family!r}"
      )
    self._check_numbers(model, theirs)
    self._check_tokenizer(ours, metadata)
    self._abstract = abstract
    self._stored = abstract_on(*make_model(metadata.config), mesh)
    self._fit = functools.partial(
      get_family(model.family).fit_params,
      trained=metadata.config,
      wanted=config,
    )
    self._check(jax.eval_shape(self._fit, self._stored))

  def _check_numbers(self, ours: Any, theirs: Any) -> None:
    if "none" in (ours.router.kind, theirs.router.kind):
      theirs = dataclasses.replace(theirs, router=ours.router)  # no gates yet
    differing = config_lib.differing_fields(ours, theirs, "model")
    wrong = [line for line in differing if line.startswith(_NUMERIC_FIELDS)]
    if wrong:
      raise ValueError(
        f"train.init_from={self._directory!r} holds parameters that were "
        f"trained with other numbers: {'; '.join(wrong)}"
      )

  def _check_tokenizer(self, ours: Metadata, theirs: Metadata) -> None:
    here, there = ours.tokenizer_sha256, theirs.tokenizer_sha256
    if not here or not there or here == there:
      return
    old, new = (m.config.model.vocab_size for m in (theirs, ours))
    if new == old:
      raise ValueError(
        f"train.init_from={self._directory!r} was trained with a tokenizer of "
        f"sha256 {there[:16]}, the run's text was made with {here[:16]}: the "
        "same ids mean other text"
      )
    _LOG.warning(
      "another tokenizer than that of %s: the first %d ids must mean the same",
      self._directory,
      old,
    )

  def _check(self, fitted: Any) -> None:
    needed, given = _flat(self._abstract), _flat(fitted)
    wrong = []
    for path, leaf in needed.items():
      shape = given[path].shape if path in given else None
      drawn = shape is None and _is_router(path)
      if shape != leaf.shape and not drawn:
        found = "missing" if shape is None else shape
        wrong.append(f"{'/'.join(path)} {found}, {leaf.shape} needed")
    wrong += [
      f"{'/'.join(path)} not used"
      for path in given
      if path not in needed and not _is_router(path)
    ]
    if wrong:
      more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
      raise ValueError(
        f"train.init_from={self._directory!r} does not fit the model: "
        f"{'; '.join(wrong[:3])}{more}"
      )

  def load(self, drawn: Any) -> Any:
    """Reads the parameters.

    Args:
      drawn: the run's own initial parameters; its routers stay where the
        checkpoint has none.

    Returns:
      The parameters to start from, sharded like `drawn`.
    """
    stored = checkpoint.restore_params(
      self._directory, self._step, self._stored, use_ema=True
    )

    def combine(stored: Any, drawn: Any) -> Any:
      given, own = _flat(self._fit(stored)), _flat(drawn)
      return traverse_util.unflatten_dict(
        {path: given.get(path, leaf) for path, leaf in own.items()}
      )

    shardings = jax.tree.map(lambda x: x.sharding, self._abstract)
    _LOG.info("parameters of %s, step %d", self._directory, self._step)
    return jax.jit(combine, out_shardings=shardings)(stored, drawn)


def _flat(params: Any) -> _Flat:
  return traverse_util.flatten_dict(params)


def _is_router(path: tuple[str, ...]) -> bool:
  return "router" in path
