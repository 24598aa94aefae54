"""Starts a run from the parameters of another run."""

import dataclasses
import functools
import logging
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from moh_jax import config as config_lib
from moh_jax.config import get_family
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.params import abstract_on

_LOG = logging.getLogger(__name__)

# Keys, or beginnings of keys, that change what the model computes with the same
# parameters.
_NUMERIC_FIELDS = ("model.norm_eps", "model.rope.", "model.router.gate_form")


class WarmStart:
  """Parameters of the checkpoint `train.init_from`, fitted to a run's model."""

  def __init__(self, ours: Metadata, abstract: Any, mesh: Mesh):
    """Checks that the checkpoint fits the run, without reading parameters.

    Args:
      ours: metadata of the run.
      abstract: parameters of the run as ShapeDtypeStructs with shardings.
      mesh: the devices.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: its model is of another family or shape, computes something
        else with the same parameters, or was trained with another tokenizer.
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
    needed, given = flatten_dict(self._abstract), flatten_dict(fitted)
    wrong = []
    for path, leaf in needed.items():
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
        f"train.init_from={self._directory!r} does not fit the model: "
        f"{'; '.join(wrong[:3])}{more}"
      )

  def load(self, initial: Any) -> Any:
    """Reads the parameters.

    Args:
      initial: initial parameters of the run, of which the routers are kept if
        the checkpoint has none.

    Returns:
      The parameters to start from, sharded like `initial`.
    """
    stored = checkpoint.restore_params(
      self._directory, self._step, self._stored, use_ema=True
    )

    def combine(stored: Any, initial: Any) -> Any:
      given, own = flatten_dict(self._fit(stored)), flatten_dict(initial)
      return unflatten_dict(
        {path: given.get(path, leaf) for path, leaf in own.items()}
      )

    shardings = jax.tree.map(lambda x: x.sharding, self._abstract)
    _LOG.info("parameters of %s, step %d", self._directory, self._step)
    return jax.jit(combine, out_shardings=shardings)(stored, initial)
