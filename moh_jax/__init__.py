"""Mixture-of-Head attention (MoH, arXiv:2410.11842) in JAX and Flax.

The package imports without JAX; modules are imported where they are used:

  from moh_jax.inference.restore import restore
  from moh_jax.models.vit import ViT
  from moh_jax.layers.moh import HeadMix, HeadRouter, MoHAttention
  from moh_jax.config import HeadBudget, RouterConfig
"""

from moh_jax._version import __version__

__all__ = ["__version__"]
