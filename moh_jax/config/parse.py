"""ConfigDict, JSON and dataclasses: the same run in three forms."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

from moh_jax.config.diffusion import DiffusionConfig, SampleConfig
from moh_jax.config.dit import DiTConfig
from moh_jax.config.model import MODEL_SECTIONS
from moh_jax.config.sections import (
  CheckpointConfig,
  DataConfig,
  EvalConfig,
  LogConfig,
  MeshConfig,
  OptimConfig,
  TrainConfig,
)
from moh_jax.config.vit import ViTConfig
from moh_jax.diffusion.process import spaced_timesteps

_SECTIONS = {
  "data": DataConfig,
  "optim": OptimConfig,
  "train": TrainConfig,
  "mesh": MeshConfig,
  "checkpoint": CheckpointConfig,
  "eval": EvalConfig,
  "log": LogConfig,
}
# Sections that only some families have.
_FAMILY_SECTIONS = {
  "vit": {},
  "dit": {"diffusion": DiffusionConfig, "sample": SampleConfig},
}
# Fields of the shared sections that only one family reads.
_CLASSIFIER_FIELDS = ("label_smoothing", "mixup", "cutmix")


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run; see the sections for their fields.

  `diffusion` and `sample` are there for diffusion models and None for others.
  """

  model: ViTConfig | DiTConfig
  data: DataConfig = DataConfig()
  optim: OptimConfig = OptimConfig()
  train: TrainConfig = TrainConfig()
  mesh: MeshConfig = MeshConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  eval: EvalConfig = EvalConfig()
  log: LogConfig = LogConfig()
  diffusion: DiffusionConfig | None = None
  sample: SampleConfig | None = None

  def __post_init__(self):
    self._check_family()
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
    # Latents are normalized already.
    encoded = self.diffusion is not None and self.diffusion.space == "latent"
    if not encoded and len(self.data.mean) != self.model.channels:
      raise ValueError(
        f"data.mean={self.data.mean} must have model.channels="
        f"{self.model.channels} values"
      )

  def _check_family(self):
    family = self.model.family
    optional = {n for sections in _FAMILY_SECTIONS.values() for n in sections}
    for name in sorted(optional):
      wanted = name in _FAMILY_SECTIONS[family]
      if wanted != (getattr(self, name) is not None):
        raise ValueError(
          f"config section {name!r} is {'missing' if wanted else 'unknown'} "
          f"for model.family={family!r}"
        )
    if family == "vit":
      if self.data.source == "latents":
        raise ValueError(
          "data.source='latents' is for diffusion models, model.family='vit'"
        )
      return
    for name in _CLASSIFIER_FIELDS:
      if value := getattr(self.train, name):
        raise ValueError(
          f"train.{name}={value} must be 0 for model.family={family!r}"
        )
    self._check_space()
    self._check_sampling()

  def _check_space(self):
    space, source = self.diffusion.space, self.data.source
    if (space == "latent") != (source == "latents") and source != "fake":
      raise ValueError(
        f"diffusion.space={space!r} and data.source={source!r} do not go "
        "together: 'latent' needs 'latents', as `encode-latents` writes them, "
        "and 'pixel' an image source"
      )
    if source == "latents":
      for name, neutral in (("augment", "none"), ("eval_resize", 0)):
        if (value := getattr(self.data, name)) != neutral:
          raise ValueError(
            f"data.{name}={value!r} must be {neutral!r} for latents, which are "
            "cropped and mirrored when they are encoded"
          )
    halves = (0.5,) * len(self.data.mean)
    if space == "pixel" and (self.data.mean, self.data.std) != (halves, halves):
      raise ValueError(
        f"data.mean={self.data.mean} and data.std={self.data.std} must be 0.5 "
        "for diffusion.space='pixel': pixels in [-1, 1]"
      )

  def _check_sampling(self):
    try:
      spaced_timesteps(self.diffusion.steps, self.sample.steps)
    except ValueError as error:
      raise ValueError(f"sample.{error}") from error
    if self.sample.cfg_interval[0] >= self.diffusion.steps:
      raise ValueError(
        f"sample.cfg_interval={self.sample.cfg_interval} must begin below "
        f"diffusion.steps={self.diffusion.steps}"
      )
    if self.sample.cfg_scale != 1 and not self.model.label_dropout:
      raise ValueError(
        f"sample.cfg_scale={self.sample.cfg_scale} must be 1 for a model with "
        "model.label_dropout=0: it cannot do without labels"
      )


def to_config_dict(config: Config) -> ml_collections.ConfigDict:
  """The run as a locked ConfigDict whose every leaf can be overridden."""
  return ml_collections.ConfigDict(_to_dict(config)).lock()


def from_config_dict(cfg: Mapping[str, Any]) -> Config:
  """Checks a ConfigDict (or plain dict) and freezes it.

  Raises:
    ValueError: an unknown or missing key, a wrong type or a value out of range;
      the message names the field, its value and what is allowed.
  """
  cfg = cfg.to_dict() if isinstance(cfg, ml_collections.ConfigDict) else cfg
  if "model" not in cfg:
    raise ValueError("the config has no section 'model'")
  for name, section in cfg.items():
    if not isinstance(section, Mapping):
      raise ValueError(f"config section {name}={section!r} must have fields")
  model = cfg["model"]
  family = model.get("family")
  if not isinstance(family, str) or family not in MODEL_SECTIONS:
    raise ValueError(
      f"model.family={family!r} must be one of {tuple(MODEL_SECTIONS)}"
    )
  known = {
    "model": MODEL_SECTIONS[family],
    **_SECTIONS,
    **_FAMILY_SECTIONS[family],
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
