"""The config that a trained model is served with."""

from collections.abc import Mapping, Sequence
from typing import Any

from moh_jax.config.parse import apply_overrides, changed
from moh_jax.config.run import Config


def serving_config(
  config: Config, changes: Sequence[str], model: Mapping[str, Any]
) -> Config:
  """The config of a run with other keys for serving.

  Args:
    config: of the run.
    changes: keys, as on command lines: "sample.steps=50".
    model: fields of the section `model`, which come after them.

  Raises:
    ValueError: a field is unknown, or a value does not fit the model.
  """
  for change in changes:
    if change.startswith("tune."):
      raise ValueError(
        f"--config.{change}: tune.* is for training; adapters are a part of "
        "the weights that are served"
      )
  others = {k: v for k, v in model.items() if k != "top_k"}
  config = changed(config.served(), changes)
  config = apply_overrides(config, "model", **others)
  return with_top_k(config, model["top_k"]) if "top_k" in model else config


def with_top_k(config: Config, top_k: int | Sequence[int]) -> Config:
  """A config with other numbers of routed heads.

  Args:
    config: of a model to serve.
    top_k: one for each layer (ViT: stage), or one for all.

  Raises:
    ValueError: the model has no such heads.
  """
  values = tuple(top_k) if isinstance(top_k, list | tuple) else (top_k,)
  router = config.model.router
  if values and not router.selects:
    raise ValueError(
      f"top_k={values}: the model has no routed heads, "
      f"model.router.kind={router.kind!r}"
    )
  if len(values) == 1:
    values *= len(config.model.top_k)
  return apply_overrides(config, "model", top_k=values)
