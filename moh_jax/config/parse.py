"""ConfigDict, JSON and dataclasses: the same run in three forms."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moh_jax.config.diffusion import DiffusionConfig, SampleConfig
from moh_jax.config.dit import DiTConfig
from moh_jax.config.families import FAMILIES, OPTIONAL_SECTIONS
from moh_jax.config.llm import LLMConfig
from moh_jax.config.sections import (
  CheckpointConfig,
  DataConfig,
  EvalConfig,
  LogConfig,
  MeshConfig,
  OptimConfig,
  TrainConfig,
)
from moh_jax.config.text import TextDataConfig, TuneConfig
from moh_jax.config.vit import ViTConfig

if TYPE_CHECKING:
  import ml_collections

_SECTIONS = {
  "optim": OptimConfig,
  "train": TrainConfig,
  "mesh": MeshConfig,
  "checkpoint": CheckpointConfig,
  "eval": EvalConfig,
  "log": LogConfig,
}


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run; see the sections for their fields.

  `diffusion` and `sample` are there for diffusion models, `tune` for language
  models; they are None for others.
  """

  model: ViTConfig | DiTConfig | LLMConfig
  data: DataConfig | TextDataConfig = DataConfig()
  optim: OptimConfig = OptimConfig()
  train: TrainConfig = TrainConfig()
  mesh: MeshConfig = MeshConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  eval: EvalConfig = EvalConfig()
  log: LogConfig = LogConfig()
  diffusion: DiffusionConfig | None = None
  sample: SampleConfig | None = None
  tune: TuneConfig | None = None

  def __post_init__(self):
    name = self.model.family
    family = FAMILIES[name]
    for section in OPTIONAL_SECTIONS:
      wanted = section in family.sections
      if wanted != (getattr(self, section) is not None):
        raise ValueError(
          f"config section {section!r} is {'missing' if wanted else 'unknown'} "
          f"for model.family={name!r}"
        )
    if not isinstance(self.data, family.data):
      raise ValueError(
        f"config section 'data' must be a {family.data.__name__} for "
        f"model.family={name!r}, not a {type(self.data).__name__}"
      )
    family.check(self)
    batch, parts = self.data.batch_size, self.optim.accumulation
    if batch % parts:
      raise ValueError(
        f"data.batch_size={batch} must be a multiple of "
        f"optim.accumulation={parts}"
      )
    if self.optim.warmup_steps > self.train.steps:
      raise ValueError(
        f"optim.warmup_steps={self.optim.warmup_steps} must be at most "
        f"train.steps={self.train.steps}"
      )


def to_config_dict(config: Config) -> "ml_collections.ConfigDict":
  """The run as a locked ConfigDict whose every leaf can be overridden."""
  # Models and kernels import this module where ml_collections may be missing.
  import ml_collections

  return ml_collections.ConfigDict(_to_dict(config)).lock()


def from_config_dict(cfg: Mapping[str, Any]) -> Config:
  """Checks a ConfigDict (or plain dict) and freezes it.

  Raises:
    ValueError: an unknown or missing key, a wrong type or a value out of range;
      the message names the field, its value and what is allowed.
  """
  cfg = cfg if isinstance(cfg, Mapping) else cfg.to_dict()
  if "model" not in cfg:
    raise ValueError("the config has no section 'model'")
  for name, section in cfg.items():
    if not isinstance(section, Mapping):
      raise ValueError(f"config section {name}={section!r} must have fields")
  model = cfg["model"]
  family = model.get("family")
  if not isinstance(family, str) or family not in FAMILIES:
    raise ValueError(
      f"model.family={family!r} must be one of {tuple(FAMILIES)}"
    )
  known = {
    "model": FAMILIES[family].model,
    "data": FAMILIES[family].data,
    **_SECTIONS,
    **FAMILIES[family].sections,
  }
  if unknown := sorted(set(cfg) - set(known)):
    raise ValueError(
      f"unknown config section {unknown[0]!r}; known: {list(known)}"
    )
  sections = {
    name: _section(name, cls, cfg.get(name, {})) for name, cls in known.items()
  }
  return Config(**sections)


def _to_dict(config: Config) -> dict[str, Any]:
  """Nested dicts, without the sections that the family does not have."""
  sections = dataclasses.asdict(config).items()
  return {name: section for name, section in sections if section is not None}


def to_json(config: Config) -> str:
  """The run as JSON, as checkpoints store it."""
  return json.dumps(_to_dict(config), indent=2, sort_keys=True)


def from_json(text: str) -> Config:
  """Inverse of `to_json`."""
  return from_config_dict(json.loads(text))


def apply_overrides(config: Config, section: str, **fields: Any) -> Config:
  """A copy with some fields of one section changed, checked again.

  Raises:
    ValueError: an unknown field, a wrong type or a value out of range.
  """
  old = getattr(config, section)
  changed = _section(section, type(old), {**dataclasses.asdict(old), **fields})
  return dataclasses.replace(config, **{section: changed})


def differing_fields(ours: Any, theirs: Any, section: str) -> list[str]:
  """Names what differs between two dataclasses of one section.

  Returns:
    Lines "section.field: OURS here, THEIRS there".
  """
  ours, theirs = dataclasses.asdict(ours), dataclasses.asdict(theirs)
  return [
    f"{section}.{name}: {ours.get(name)!r} here, {theirs.get(name)!r} there"
    for name in sorted({*ours, *theirs})
    if ours.get(name) != theirs.get(name)
  ]


def _section(name: str, cls: type, values: Mapping[str, Any]) -> Any:
  """Builds one section, refusing unknown keys and wrong types."""
  hints = typing.get_type_hints(cls)
  fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
  for key in values:
    if key not in fields:
      raise ValueError(
        f"unknown config key {name}.{key}; known: {sorted(fields)}"
      )
  return cls(
    **{
      key: _coerce(f"{name}.{key}", value, fields[key])
      for key, value in values.items()
    }
  )


def _coerce(name: str, value: Any, hint: Any) -> Any:
  """Checks a leaf's type; lists (from JSON) become tuples, ints floats."""
  if isinstance(hint, types.GenericAlias):  # tuple[int, int], tuple[str, ...]
    if not isinstance(value, list | tuple):
      raise ValueError(f"{name}={value!r} must be a {hint}")
    item, *rest = typing.get_args(hint)
    length = None if rest == [...] else 1 + len(rest)
    if length is not None and len(value) != length:
      raise ValueError(f"{name}={value!r} must have {length} values")
    return tuple(_coerce(f"{name}[{i}]", v, item) for i, v in enumerate(value))
  if hint is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  wrong_bool = isinstance(value, bool) and hint is not bool
  if wrong_bool or not isinstance(value, hint):
    raise ValueError(f"{name}={value!r} must be of type {hint.__name__}")
  return value
