"""One frozen dataclass per config section; every range check lives here."""

from moh_jax.config.model import MODEL_SECTIONS, StageShape, ViTConfig
from moh_jax.config.parse import (
  Config,
  apply_overrides,
  differing_fields,
  from_config_dict,
  from_json,
  to_config_dict,
  to_json,
)
from moh_jax.config.sections import (
  CheckpointConfig,
  DataConfig,
  EvalConfig,
  LogConfig,
  MeshConfig,
  OptimConfig,
  TrainConfig,
)

__all__ = [
  "MODEL_SECTIONS",
  "CheckpointConfig",
  "Config",
  "DataConfig",
  "EvalConfig",
  "LogConfig",
  "MeshConfig",
  "OptimConfig",
  "StageShape",
  "TrainConfig",
  "ViTConfig",
  "apply_overrides",
  "differing_fields",
  "from_config_dict",
  "from_json",
  "to_config_dict",
  "to_json",
]
