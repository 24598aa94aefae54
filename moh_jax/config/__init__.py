"""The configs of runs: a frozen dataclass per section, and what makes them.

Each name is imported as itself, which marks it as offered to other modules.
"""

from moh_jax.config.data import ClassifierConfig as ClassifierConfig
from moh_jax.config.data import DataConfig as DataConfig
from moh_jax.config.data import TextDataConfig as TextDataConfig
from moh_jax.config.dit import DiffusionConfig as DiffusionConfig
from moh_jax.config.dit import DiTConfig as DiTConfig
from moh_jax.config.dit import SampleConfig as SampleConfig
from moh_jax.config.heads import HeadBudget as HeadBudget
from moh_jax.config.heads import RouterConfig as RouterConfig
from moh_jax.config.layers import ImageClassifier as ImageClassifier
from moh_jax.config.layers import LayerGroup as LayerGroup
from moh_jax.config.layers import LayerStack as LayerStack
from moh_jax.config.layers import RoutedLayers as RoutedLayers
from moh_jax.config.layers import without_router as without_router
from moh_jax.config.llm import LLMConfig as LLMConfig
from moh_jax.config.llm import RotaryConfig as RotaryConfig
from moh_jax.config.parse import apply_overrides as apply_overrides
from moh_jax.config.parse import differing_fields as differing_fields
from moh_jax.config.parse import from_config_dict as from_config_dict
from moh_jax.config.parse import to_config_dict as to_config_dict
from moh_jax.config.parse import to_dict as to_dict
from moh_jax.config.parse import to_json as to_json
from moh_jax.config.registry import check_command as check_command
from moh_jax.config.registry import get_family as get_family
from moh_jax.config.registry import imported as imported
from moh_jax.config.registry import public_formats as public_formats
from moh_jax.config.registry import released_model as released_model
from moh_jax.config.registry import released_models as released_models
from moh_jax.config.run import CheckpointConfig as CheckpointConfig
from moh_jax.config.run import Config as Config
from moh_jax.config.run import EvalConfig as EvalConfig
from moh_jax.config.run import LogConfig as LogConfig
from moh_jax.config.run import MeshConfig as MeshConfig
from moh_jax.config.run import OptimConfig as OptimConfig
from moh_jax.config.run import TrainConfig as TrainConfig
from moh_jax.config.tune import DistillConfig as DistillConfig
from moh_jax.config.tune import LoraConfig as LoraConfig
from moh_jax.config.tune import TuneConfig as TuneConfig
from moh_jax.config.vit import ViTConfig as ViTConfig
