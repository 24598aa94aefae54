"""Plain DiT in diffusers' layout: what `DiTTransformer2DModel` loads.

Unlike the release's, its queries, keys and values are three tensors, and every
block has a copy of the embedders of timesteps and labels. A config.json says
the sizes.
"""

import dataclasses
import json
import pathlib
from typing import Annotated, Any

import msgspec
import numpy as np

from moh_jax.config import DiTConfig
from moh_jax.config.base import MOST_LAYERS
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.convert import rules
from moh_jax.convert.converter import CONFIG_FILE, Exported
from moh_jax.convert.layers import (
  mix_rules,
  patch_rules,
  split_projection_rules,
  stack_rules,
)
from moh_jax.convert.rules import Rule
from moh_jax.json_files import Size, read_json

FORM = "diffusers"
STEM = "diffusion_pytorch_model"
_MLP_RATIO = 4  # of diffusers' FeedForward
# Values of config.json, beside the sizes, that our model computes. We write the
# first; 1e-5 is diffusers' default, 1e-6 what we and the DiT release compute.
_FIXED: dict[str, tuple[Any, ...]] = {
  "_class_name": ("DiTTransformer2DModel", "Transformer2DModel"),
  "activation_fn": ("gelu-approximate",),
  "attention_bias": (True,),
  "norm_type": ("ada_norm_zero",),
  "norm_elementwise_affine": (False,),
  "norm_eps": (1e-6, 1e-5),
}
_README = """\
# DiT for diffusers

Trained with diffusion.schedule={schedule!r}, diffusion.steps={steps} and
diffusion.prediction={prediction!r}.

Timesteps have the frequencies of the DiT release; diffusers' class has others.
With these lines it computes what the model was trained to:

```python
from diffusers import DiTTransformer2DModel

model = DiTTransformer2DModel.from_pretrained("this folder")
for block in model.transformer_blocks:
  block.norm1.emb.time_proj.downscale_freq_shift = 0
```
"""


class _Public(msgspec.Struct):
  """Sizes in diffusers' config.json."""

  num_attention_heads: Size
  attention_head_dim: Size
  num_layers: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
  sample_size: Size
  patch_size: Size
  num_embeds_ada_norm: Size
  in_channels: Size = 4
  out_channels: Size | None = None


def model_rules(config: DiTConfig) -> list[Rule]:
  """Conversion rules of the whole network.

  Raises:
    ValueError: diffusers has no such model.
  """
  _check(config)
  embedders = [
    *rules.linear("timestep_embedder.linear_1", "embed/time_in"),
    *rules.linear("timestep_embedder.linear_2", "embed/time_out"),
    rules.one("class_embedder.embedding_table.weight", "embed/label/embedding"),
  ]
  return [
    *patch_rules("pos_embed.proj", config.patch_size, config.channels),
    *(_copied(rule, len(config.num_heads)) for rule in embedders),
    *rules.linear("proj_out_1", "final_modulation/linear"),
    *rules.linear("proj_out_2", "final"),
    *stack_rules(config, _block_rules, "transformer_blocks.{layer}."),
  ]


def _block_rules(budget: HeadBudget) -> list[Rule]:
  heads, dim = budget.num_heads, budget.head_dim
  parts = ("to_q", "to_k", "to_v")
  attention = [
    *split_projection_rules(parts, "qkv", heads, dim=dim, bias=True),
    *mix_rules("to_out.0", "out", heads, dim),
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


def _check(config: DiTConfig) -> None:
  """Raises ValueError where diffusers' class is no such model."""
  if config.router.kind != "none":
    raise ValueError(
      f"diffusers: model.router.kind={config.router.kind!r} must be 'none', it "
      "has no MoH; `export` without --to writes the MoH release's names"
    )
  rows, heads = config.input_size[0], config.num_heads[0]
  for name, found, allowed in (
    ("num_heads", config.num_heads, (heads,) * len(config.num_heads)),
    ("width", config.width, heads * config.head_dim),
    ("mlp_ratio", config.mlp_ratio, _MLP_RATIO),
    ("input_size", config.input_size, (rows, rows)),
  ):
    if found != allowed:
      raise ValueError(f"diffusers: model.{name}={found} must be {allowed}")
  if not config.label_dropout:
    raise ValueError(
      "diffusers: model.label_dropout=0 must be above 0, its table of labels "
      "has a row for none"
    )


def folder_files(exported: Exported, folder: pathlib.Path) -> dict[str, str]:
  """The small files of a folder that diffusers loads: config.json, README.md.

  Args:
    exported: the model.
    folder: unused.
  """
  del folder
  config = exported.config.model
  entries = {
    **{name: allowed[0] for name, allowed in _FIXED.items()},
    "num_attention_heads": config.num_heads[0],
    "attention_head_dim": config.head_dim,
    "num_layers": len(config.num_heads),
    "sample_size": config.input_size[0],
    "patch_size": config.patch_size,
    "num_embeds_ada_norm": config.num_classes,
    "in_channels": config.channels,
    "out_channels": config.out_channels,
  }
  text = json.dumps(entries, indent=2, sort_keys=True)
  process = dataclasses.asdict(exported.config.diffusion)
  return {CONFIG_FILE: f"{text}\n", "README.md": _README.format(**process)}


def read_config(path: pathlib.Path) -> DiTConfig:
  """The model section of diffusers' config.json.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a value is missing, out of range, or of another model.
  """
  entries = read_json(path, _Public)
  for name, allowed in _FIXED.items():
    if name in entries and entries[name] not in allowed:
      raise ValueError(
        f"{path}: {name}={entries[name]!r} must be one of {allowed}"
      )
  heads, depth = entries["num_attention_heads"], entries["num_layers"]
  channels = entries.get("in_channels", 4)
  out_channels = entries.get("out_channels") or channels
  if out_channels not in (channels, 2 * channels):
    raise ValueError(
      f"{path}: out_channels={out_channels} must be in_channels={channels}, or "
      "twice as many"
    )
  try:
    return DiTConfig(
      input_size=(entries["sample_size"],) * 2,
      channels=channels,
      num_classes=entries["num_embeds_ada_norm"],
      patch_size=entries["patch_size"],
      width=heads * entries["attention_head_dim"],
      num_heads=(heads,) * depth,
      head_dim=entries["attention_head_dim"],
      shared_heads=(heads,) * depth,
      top_k=(0,) * depth,
      learn_sigma=out_channels != channels,
      router=RouterConfig("none"),
    )
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
