"""Mixture-of-Head attention (MoH, arXiv:2410.11842) in JAX and Flax."""

import importlib

from moh_jax._version import __version__

_WHERE = {
  "DiT": "models.dit",
  "Generator": "inference.generate",
  "HeadBudget": "ops.routing",
  "HeadMix": "layers.moh",
  "HeadRouter": "layers.moh",
  "LLM": "models.llm",
  "MoHAttention": "layers.moh",
  "RouterConfig": "ops.routing",
  "ViT": "models.vit",
  "attention": "ops.attention",
  "collect_aux": "layers.moh",
  "get_model": "models.registry",
  "load_config": "cli.common",
  "restore": "inference.restore",
  "train": "training.loop",
}
__all__ = [*_WHERE, "__version__"]  # noqa: PLE0604


def __getattr__(name):
  if name not in _WHERE:
    raise AttributeError(name)
  return getattr(importlib.import_module(f"moh_jax.{_WHERE[name]}"), name)
