"""Released models by name."""

from moh_jax.config import DiTConfig, LLMConfig, ViTConfig
from moh_jax.models.sizes_dit import DIT_MODELS
from moh_jax.models.sizes_llm import LLM_MODELS
from moh_jax.models.sizes_vit import VIT_MODELS

MODELS: dict[str, ViTConfig | DiTConfig | LLMConfig] = {
  **VIT_MODELS,
  **DIT_MODELS,
  **LLM_MODELS,
}


def get_model(name: str) -> ViTConfig | DiTConfig | LLMConfig:
  """Looks a released model up.

  Raises:
    ValueError: an unknown name; the known ones are listed.
  """
  if name not in MODELS:
    raise ValueError(f"model {name!r} must be one of {tuple(MODELS)}")
  return MODELS[name]
