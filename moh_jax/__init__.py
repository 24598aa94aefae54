"""Mixture-of-Head attention (MoH, arXiv:2410.11842) in JAX and Flax.

The names in `__all__` are the public interface; every other module and name is
internal and may change in any release. They are imported when they are first
used, so `import moh_jax` alone loads neither JAX nor Flax.
"""

from etils import epy as _epy

from moh_jax._version import __version__

with _epy.lazy_api_imports(globals()):
  from moh_jax.config.family import Family
  from moh_jax.config.heads import HeadBudget, RouterConfig
  from moh_jax.config.registry import get_family, register_family
  from moh_jax.config.routers import register_router
  from moh_jax.config.sources import register_source
  from moh_jax.data.sources import ImageSource
  from moh_jax.families.images import ImageClassifierFamily
  from moh_jax.inference.generate import Generator
  from moh_jax.inference.options import Sampling
  from moh_jax.inference.restore import Restored, restore
  from moh_jax.inference.sample import Sampler
  from moh_jax.layers.heads import HeadMix
  from moh_jax.layers.model_aux import collect_aux
  from moh_jax.layers.moh import MoHAttention
  from moh_jax.layers.router import HeadRouter
  from moh_jax.layers.routers import Router
  from moh_jax.models.dit import DiT
  from moh_jax.models.llm import LLM
  from moh_jax.models.registry import get_model
  from moh_jax.models.vit import ViT
  from moh_jax.ops.attention import attention
  from moh_jax.ops.routing import Routing
  from moh_jax.runtime.load import load_config
  from moh_jax.training.loop import train

__all__ = [
  "LLM",
  "DiT",
  "Family",
  "Generator",
  "HeadBudget",
  "HeadMix",
  "HeadRouter",
  "ImageClassifierFamily",
  "ImageSource",
  "MoHAttention",
  "Restored",
  "Router",
  "RouterConfig",
  "Routing",
  "Sampler",
  "Sampling",
  "ViT",
  "__version__",
  "attention",
  "collect_aux",
  "get_family",
  "get_model",
  "load_config",
  "register_family",
  "register_router",
  "register_source",
  "restore",
  "train",
]
