"""Conversion of MoH-DiT and DiT, and plain DiT in diffusers' layout.

The public names are those of github.com/SkyworkAI/MoH (MoH-DiT) and
github.com/facebookresearch/DiT, or of diffusers' `DiTTransformer2DModel`. There
queries, keys and values are three tensors, every block has a copy of the
embedders of timesteps and labels, and a config.json says the sizes.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from moh_jax.config import Config, DataConfig, DiTConfig
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.convert import rules
from moh_jax.convert.rules import Converter, Rule
from moh_jax.ops.position import sincos_2d
from moh_jax.runtime.files import read_json

# Public position tables were computed by another library, and differ in the
# last digits.
_POSITION_ATOL = 1e-5
# Data of the released models: latents of ImageNet.
_DATA = DataConfig(source="latents", path="data/imagenet_latents")
_DIFFUSERS = "diffusers"  # the format
# Values of its config.json that our model computes; where biases differ, so do
# the tensors. 1e-5 is diffusers' default, 1e-6 what the DiT release computes.
_FIXED: dict[str, tuple[Any, ...]] = {
  "_class_name": ("DiTTransformer2DModel", "Transformer2DModel"),
  "activation_fn": ("gelu-approximate",),
  "norm_type": ("ada_norm_zero",),
  "norm_eps": (1e-6, 1e-5),
}


def released_run(model: DiTConfig, tensors: Mapping[str, Any]) -> Config:
  """Config of a run with a released model.

  Args:
    model: section `model` of the released model. The public position table, if
      there is one, decides the input size instead.
    tensors: public tensors by name.
  """
  tokens = tensors["pos_embed"].shape[1] if "pos_embed" in tensors else 0
  if tokens:  # 256 or 512 pixels, or other
    side = math.isqrt(tokens) * model.patch_size
    model = dataclasses.replace(model, input_size=(side, side))
  return Config(model=model, data=_DATA)


def model_rules(config: DiTConfig) -> list[Rule]:
  """Conversion rules of the whole network."""
  table = [
    _position_table(config),
    *rules.patch_rules("x_embedder.proj", config.patch_size, config.channels),
    *rules.linear("t_embedder.mlp.0", "embed/time_in"),
    *rules.linear("t_embedder.mlp.2", "embed/time_out"),
    rules.one("y_embedder.embedding_table.weight", "embed/label/embedding"),
    *rules.linear("final_layer.adaLN_modulation.1", "final_modulation/linear"),
    *rules.linear("final_layer.linear", "final"),
  ]
  block = functools.partial(_block_rules, config)
  return table + rules.stack_rules(config, block, "blocks.{layer}.")


def _block_rules(config: DiTConfig, budget: HeadBudget) -> list[Rule]:
  heads, dim = budget.num_heads, budget.head_dim
  multiplier = config.attention_out_multiplier
  attention = [
    *rules.projection_rules("qkv", "qkv", 3, heads, dim, bias=True),
    *rules.mix_rules("proj", "out", heads, dim, multiplier=multiplier),
    *rules.router_rules(budget, config.router),
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


def _diffusers_rules(config: DiTConfig) -> list[Rule]:
  """Conversion rules of the whole network in diffusers' layout."""
  block = functools.partial(_diffusers_block, config)
  embedders = [
    *rules.linear("timestep_embedder.linear_1", "embed/time_in"),
    *rules.linear("timestep_embedder.linear_2", "embed/time_out"),
    rules.one("class_embedder.embedding_table.weight", "embed/label/embedding"),
  ]
  return [
    *rules.patch_rules("pos_embed.proj", config.patch_size, config.channels),
    *(_copied(rule, len(config.num_heads)) for rule in embedders),
    *rules.linear("proj_out_1", "final_modulation/linear"),
    *rules.linear("proj_out_2", "final"),
    *rules.stack_rules(config, block, "transformer_blocks.{layer}."),
  ]


def _diffusers_block(config: DiTConfig, budget: HeadBudget) -> list[Rule]:
  heads, dim = budget.num_heads, budget.head_dim
  multiplier = config.attention_out_multiplier
  parts = ("to_q", "to_k", "to_v")
  attention = [
    *rules.split_projection_rules(parts, "qkv", heads, dim=dim, bias=True),
    *rules.mix_rules("to_out.0", "out", heads, dim, multiplier=multiplier),
  ]
  return [
    *rules.prefixed(attention, "attn1.", ("attn",)),
    *rules.linear("ff.net.0.proj", "mlp/up"),
    *rules.linear("ff.net.2", "mlp/down"),
    *rules.linear("norm1.linear", "modulation/linear"),
  ]


def _copied(rule: Rule, depth: int) -> Rule:
  """Rule of a tensor of which every block has a copy."""
  (name,) = rule.theirs
  names = [f"transformer_blocks.{i}.norm1.emb.{name}" for i in range(depth)]

  def check(arrays: list[np.ndarray]) -> None:
    for other, array in zip(names[1:], arrays[1:]):
      if not np.array_equal(array, arrays[0]):
        raise ValueError(
          f"{other} must equal {names[0]}: the model has one for all blocks"
        )

  return Rule(
    tuple(names),
    rule.ours,
    lambda arrays: rule.load(arrays[:1]),
    lambda ours: rule.dump(ours) * depth,
    check=check,
  )


def _described(kind: str, path: pathlib.Path) -> DiTConfig | None:
  """The model of diffusers' config.json; the release has no such file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a value is missing, out of range, or of another model.
  """
  if kind != _DIFFUSERS:
    return None
  stored = read_json(path)
  channels = stored.get("in_channels", 4)
  allowed = {**_FIXED, "out_channels": (None, channels, 2 * channels)}
  for name, values in allowed.items():
    if (found := stored.get(name, values[0])) not in values:
      raise ValueError(f"{path}: {name}={found!r} must be one of {values}")
  try:
    heads, dim = stored["num_attention_heads"], stored["attention_head_dim"]
    depth = stored["num_layers"]
    return DiTConfig(
      input_size=(stored["sample_size"],) * 2,
      channels=channels,
      num_classes=stored["num_embeds_ada_norm"],
      patch_size=stored["patch_size"],
      width=heads * dim,
      num_heads=(heads,) * depth,
      head_dim=dim,
      shared_heads=(heads,) * depth,
      top_k=(0,) * depth,
      learn_sigma=stored.get("out_channels") == 2 * channels,
      router=RouterConfig("none"),
    )
  except KeyError as error:
    raise ValueError(f"{path} lacks {error}") from error
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


CONVERTER = Converter(
  model_rules,
  released_run,
  described=_described,
  other_rules={_DIFFUSERS: _diffusers_rules},
)
