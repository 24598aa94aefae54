"""Starting a run from another run's parameters."""

import functools
import logging
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.models.build import fit_params, make_model
from moh_jax.training import checkpoint
from moh_jax.training.state import abstract_on

_LOG = logging.getLogger(__name__)
_Flat = dict[tuple[str, ...], Any]


class WarmStart:
  """The parameters of `train.init_from`, fitted to a run's model."""

  def __init__(self, config: Config, abstract: Any, mesh: Mesh):
    """Checks, before any long work, that the parameters fit.

    Args:
      config: the run.
      abstract: its parameters as ShapeDtypeStructs with shardings.
      mesh: the devices.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: its model is of another family or shape.
    """
    self._directory = config.train.init_from
    metadata, self._step = checkpoint.read_metadata(self._directory, None)
    ours, theirs = config.model, metadata.config.model
    if ours.family != theirs.family:
      raise ValueError(
        f"train.init_from={self._directory!r} holds a model of family "
        f"{theirs.family!r}, model.family={ours.family!r}"
      )
    self._abstract = abstract
    self._stored = abstract_on(*make_model(metadata.config), mesh)
    self._fit = functools.partial(
      fit_params, trained=metadata.config, wanted=config
    )
    self._check(jax.eval_shape(self._fit, self._stored))

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
