"""Conversion rules of MoH-DiT and DiT.

The public names are those of github.com/SkyworkAI/MoH (MoH-DiT) and
github.com/facebookresearch/DiT.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from moh_jax.config import Config, DataConfig, DiTConfig
from moh_jax.config.heads import HeadBudget
from moh_jax.convert import dit_diffusers, rules
from moh_jax.convert.converter import Converter
from moh_jax.convert.layers import (
  mix_rules,
  patch_rules,
  projection_rules,
  router_rules,
  stack_rules,
)
from moh_jax.convert.rules import Rule
from moh_jax.ops.position import sincos_2d

# Public position tables were computed by another library, and differ in the
# last digits.
_POSITION_ATOL = 1e-5
# Data of the released models: latents of ImageNet.
_DATA = DataConfig(source="latents", path="data/imagenet_latents")


def released_run(model: DiTConfig, tensors: Mapping[str, Any]) -> Config:
  """Config of a run with a released model.

  Args:
    model: section `model` of the released model. The public position table, if
      there is one, decides the input size instead.
    tensors: public tensors by name.
  """
  tokens = tensors["pos_embed"].shape[1] if "pos_embed" in tensors else 0
  side = math.isqrt(tokens) * model.patch_size
  if side and math.isqrt(tokens) ** 2 == tokens:  # 256 or 512 pixels, or other
    model = dataclasses.replace(model, input_size=(side, side))
  return Config(model=model, data=_DATA)


def model_rules(config: DiTConfig) -> list[Rule]:
  """Conversion rules of the whole network."""
  table = [
    _position_table(config),
    *patch_rules("x_embedder.proj", config.patch_size, config.channels),
    *rules.linear("t_embedder.mlp.0", "embed/time_in"),
    *rules.linear("t_embedder.mlp.2", "embed/time_out"),
    rules.one("y_embedder.embedding_table.weight", "embed/label/embedding"),
    *rules.linear("final_layer.adaLN_modulation.1", "final_modulation/linear"),
    *rules.linear("final_layer.linear", "final"),
  ]
  block = functools.partial(_block_rules, config)
  return table + stack_rules(config, block, "blocks.{layer}.")


def _block_rules(config: DiTConfig, budget: HeadBudget) -> list[Rule]:
  heads, dim = budget.num_heads, budget.head_dim
  attention = [
    *projection_rules("qkv", "qkv", 3, heads, dim, bias=True),
    *mix_rules("proj", "out", heads, dim),
    *router_rules(budget, config.router),
  ]
  return [
    *rules.prefixed(attention, "attn.", ("attn",)),
    *rules.linear("mlp.fc1", "mlp/up"),
    *rules.linear("mlp.fc2", "mlp/down"),
    *rules.linear("adaLN_modulation.1", "modulation/linear"),
  ]


def _position_table(config: DiTConfig) -> Rule:
  """Rule that checks the stored position table; our network computes it."""
  ours = sincos_2d(config.grid, config.width)[None]

  def check(arrays: list[np.ndarray]) -> None:
    if not np.allclose(arrays[0], ours, rtol=0, atol=_POSITION_ATOL):
      raise ValueError(
        "pos_embed is not the fixed sine-cosine table of a "
        f"{config.grid[0]} x {config.grid[1]} grid"
      )

  return Rule(("pos_embed",), (), lambda _: [], lambda _: [ours], check=check)


def _described(kind: str, path: pathlib.Path) -> DiTConfig | None:
  """The model of diffusers' config.json; the release has no such file."""
  return dit_diffusers.read_config(path) if kind == dit_diffusers.FORM else None


CONVERTER = Converter(
  model_rules,
  released_run,
  described=_described,
  folder_files=dit_diffusers.folder_files,
  other_rules={dit_diffusers.FORM: dit_diffusers.model_rules},
  stem=dit_diffusers.STEM,
)
