"""Loads config files, also those that leave the model to a checkpoint.

Importable without JAX.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moh_jax.config import Config, TrainConfig
from moh_jax.config.base import read_fields
from moh_jax.config.parse import (
  from_config_dict,
  merged,
  override,
  run_file,
  upgrade,
)
from moh_jax.config.run import check_known
from moh_jax.runtime.steps import find_step, read_json_item


def load_config(spec: str, overrides: Sequence[str] = ()) -> Config:
  """Loads a config file and changes some of its keys.

  A file whose section `model` names no family starts from another model: the
  section is that of the checkpoint `train.init_from`, with the fields that the
  file and the overrides state.

  Args:
    spec: "FILE" or "FILE:ARG"; the file's `get_config(ARG)` returns a
      ConfigDict or a dict of sections.
    overrides: "section.field=VALUE", later ones win; for instance
      "optim.lr=3e-4", "model.top_k=(1,2)" or "data.path=some/where".

  Returns:
    The checked config.

  Raises:
    FileNotFoundError: there is no such file, or no such checkpoint.
    ValueError: the file fails, or an override or a value does not fit; the
      message names the file or the key.
  """
  cfg = override(run_file(spec), overrides)
  model = cfg.get("model")
  if isinstance(model, Mapping) and "family" not in model:
    cfg = _with_model(spec, cfg)
  return from_config_dict(cfg)


def _with_model(spec: str, cfg: dict[str, Any]) -> dict[str, Any]:
  """A config with what it leaves to the checkpoint `train.init_from`."""
  train = read_fields("train", TrainConfig, cfg.get("train", {}))
  source = train.get("init_from", "")
  if not source:
    raise ValueError(
      f"{spec} takes its model from a checkpoint, and train.init_from is ''; "
      "add --config.train.init_from=DIR"
    )
  step = find_step(source, None)
  try:
    trained = from_config_dict(upgrade(read_json_item(source, step)["config"]))
  except (KeyError, ValueError) as error:
    raise ValueError(f"train.init_from={source!r}: {error}") from error
  model = trained.model
  try:
    check_known(cfg, model.family)
  except ValueError as error:
    raise ValueError(
      f"{spec} does not fit train.init_from={source!r}, a model of family "
      f"{model.family!r}: {error}"
    ) from error
  stated = read_fields("model", type(model), cfg["model"])
  return merged(model.inherited(trained, stated), cfg)
