"""The config of a whole run: all of its sections, checked together."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moh_jax.config.registry import get_family, imported
from moh_jax.config.sections import (
  CheckpointConfig,
  EvalConfig,
  LogConfig,
  MeshConfig,
  OptimConfig,
  TrainConfig,
)


def section_types(family: str) -> dict[str, type]:
  """The dataclass of every section of a family's configs, by name."""
  model = imported(get_family(family).model)
  return {"model": model, "data": model.DATA, **_SHARED, **model.SECTIONS}


@dataclasses.dataclass(frozen=True, init=False)
class Config:
  """A whole run.

  The sections that only some families have, such as `diffusion` and `sample`
  of diffusion models, are arguments and attributes like the others:
  `Config(model, diffusion=DiffusionConfig(steps=500)).diffusion.steps` is 500.
  Code that serves several families asks `"diffusion" in config.sections`.

  Attributes:
    model: the network; its `family` says which other sections there are.
    data: where examples come from.
    optim: the optimizer and its schedule.
    train: length, seed and losses.
    mesh: devices.
    checkpoint: when the run is saved.
    eval: evaluation on the held-out split.
    log: what is written besides checkpoints.
    sections: by name, the sections that not all families have.
  """

  model: Any
  data: Any
  optim: OptimConfig
  train: TrainConfig
  mesh: MeshConfig
  checkpoint: CheckpointConfig
  eval: EvalConfig
  log: LogConfig
  sections: Mapping[str, Any] = dataclasses.field(hash=False)

  def __init__(
    self,
    model: Any,
    *,
    sections: Mapping[str, Any] | None = None,
    **others: Any,
  ):
    """Completes and checks a run.

    Args:
      model: the section of the network.
      sections: sections of the family, as the attribute; `dataclasses.replace`
        passes it on.
      **others: any section by its name, before those of `sections`. What is
        left out takes its defaults.

    Raises:
      ValueError: a section that the family does not have or of a wrong type,
        or sections that do not fit together.
    """
    types = section_types(model.family)
    given = {"model": model, **(sections or {}), **others}
    check_known(given, model.family)
    for name, section in given.items():
      if not isinstance(section, types[name]):
        raise ValueError(
          f"config section {name!r} must be a {types[name].__name__} for "
          f"model.family={model.family!r}, not a {type(section).__name__}"
        )
    every = {
      name: given[name] if name in given else cls()
      for name, cls in types.items()
    }
    own = {name: every.pop(name) for name in model.SECTIONS}
    for name, value in {**every, "sections": own}.items():
      object.__setattr__(self, name, value)
    self._check()

  def __getattr__(self, name: str) -> Any:
    """A section that not all families have."""
    sections = self.__dict__.get("sections", {})
    if name not in sections:
      raise AttributeError(
        f"the config has no section {name!r}, only {sorted(self.__dict__)} and "
        f"{sorted(sections)}"
      )
    return sections[name]

  def _check(self) -> None:
    self.model.check_run(self)
    batch, parts = self.data.batch_size, self.optim.accumulation
    if batch % parts:
      raise ValueError(
        f"data.batch_size={batch} must be a multiple of "
        f"optim.accumulation={parts}"
      )
    warmup = self.optim.warmup(self.train.steps)
    if warmup > self.train.steps:
      raise ValueError(
        f"optim.warmup_steps={warmup} must be at most "
        f"train.steps={self.train.steps}"
      )
    decay = self.optim.decay(self.train.steps)
    if warmup + decay > self.train.steps:
      raise ValueError(
        f"optim.decay_steps={decay} must be at most train.steps="
        f"{self.train.steps} less the {warmup} steps of the warm-up"
      )

  def served(self) -> "Config":
    """The run to serve its model with: what only trains has its defaults."""
    defaults = {
      name: type(section)()
      for name, section in self.sections.items()
      if getattr(section, "ONLY_TRAINS", False)
    }
    return dataclasses.replace(self, **defaults)

  def by_name(self) -> dict[str, Any]:
    """Every section of the run, by its name."""
    shared = {name: getattr(self, name) for name in ("model", "data", *_SHARED)}
    return {**shared, **self.sections}


def check_known(names: Mapping[str, Any], family: str) -> None:
  """Refuses sections that a family does not have.

  Raises:
    ValueError: names the first of them, and those there are.
  """
  known = section_types(family)
  if unknown := sorted(set(names) - set(known)):
    raise ValueError(
      f"unknown config section {unknown[0]!r} for model.family={family!r}; "
      f"known: {list(known)}"
    )


# The sections that are the same in all families: the fields of `Config` that
# name a class.
_SHARED = {
  name: kind
  for name, kind in Config.__annotations__.items()
  if dataclasses.is_dataclass(kind)
}
