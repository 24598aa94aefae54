"""One frozen dataclass per config section; every range check lives here."""

from moh_jax.config.autoencoder import VAEConfig
from moh_jax.config.classifier import ClassifierConfig
from moh_jax.config.diffusion import DiffusionConfig, SampleConfig
from moh_jax.config.dit import DiTConfig
from moh_jax.config.family import Family
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.config.layers import LayerGroup, LayerStack, RoutedLayers
from moh_jax.config.llm import CACHE_DTYPES, LLMConfig
from moh_jax.config.model import ImageModel, without_router
from moh_jax.config.parse import (
  apply_overrides,
  differing_fields,
  from_config_dict,
  from_json,
  make_section,
  to_config_dict,
  to_json,
  unknown_key,
)
from moh_jax.config.registry import (
  check_command,
  families,
  family_of_format,
  get_family,
  public_formats,
  register_family,
  released_model,
  released_models,
)
from moh_jax.config.rotary import RotaryConfig
from moh_jax.config.run import Config
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
from moh_jax.config.vit import StageShape, ViTConfig
