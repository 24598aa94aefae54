"""Conversion rules of MoH-ViT and TransNeXt.

The public names are those of github.com/SkyworkAI/MoH (MoH-ViT) and
github.com/DaiShiResearch/TransNeXt (classification).
"""

from collections.abc import Mapping
from typing import Any

from moh_jax.config import Config, DataConfig, ViTConfig
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.convert import rules
from moh_jax.convert.converter import Converter
from moh_jax.convert.layers import mix_rules, projection_rules, router_rules
from moh_jax.convert.rules import Rule

# Data of the released classifiers: ImageNet, resized to 256 and cropped.
_DATA = DataConfig(
  source="image_folder",
  path="data/imagenet",
  eval_resize=256,
  augment="crop_flip",
)


def released_run(model: ViTConfig, tensors: Mapping[str, Any]) -> Config:
  """Config of a run with a released model on ImageNet."""
  del tensors  # the sizes of the model are those of its section
  return Config(model=model, data=_DATA)


def attention_rules(
  budget: HeadBudget, router: RouterConfig, *, pooled: bool, qkv_bias: bool
) -> list[Rule]:
  """Conversion rules of one attention module.

  Args:
    budget: head split of the layer.
    router: its router.
    pooled: whether it is aggregated attention, with pooled keys, or full.
    qkv_bias: whether the projections have biases.
  """
  heads, dim = budget.num_heads, budget.head_dim
  table = [
    rules.one(
      "temperature",
      "query_scale/temperature",
      lambda t: t.reshape(heads),
      lambda t: t.reshape(heads, 1, 1),
    ),
    rules.one(
      "query_embedding",
      "query_scale/query_embedding",
      lambda e: e.reshape(heads, dim),
      lambda e: e.reshape(heads, 1, dim),
    ),
    *_position_mlp(),
    *mix_rules("proj", "out", heads, dim),
    *router_rules(budget, router),
  ]
  if not pooled:
    return table + projection_rules("qkv", "qkv", 3, heads, dim, qkv_bias)
  return [
    *table,
    *projection_rules("q", "q", 1, heads, dim, qkv_bias),
    *projection_rules("kv", "kv", 2, heads, dim, qkv_bias),
    rules.one("relative_pos_bias_local", "relative_pos_bias_local"),
    rules.one("learnable_tokens", "learnable_tokens"),
    rules.one(
      "learnable_bias",
      "learnable_bias",
      lambda b: b.reshape(heads, -1),
      lambda b: b.reshape(heads, 1, -1),
    ),
    *rules.linear(
      "sr",
      "sr",
      kernel_maps=(lambda w: w[:, :, 0, 0].T, lambda w: w.T[:, :, None, None]),
    ),
    *rules.norm("norm", "norm"),
  ]


def model_rules(config: ViTConfig) -> list[Rule]:
  """Conversion rules of the whole classifier."""
  table = rules.linear("head", "head")
  for index, budget in enumerate(config.budgets()):
    number, stage = index + 1, f"stage{index + 1}"
    table += rules.conv(
      f"patch_embed{number}.proj", f"{stage}/patch_embed/proj"
    )
    table += rules.norm(
      f"patch_embed{number}.norm", f"{stage}/patch_embed/norm"
    )
    table += rules.norm(f"norm{number}", f"{stage}/norm")
    block = [
      *rules.norm("norm1", "norm1"),
      *rules.norm("norm2", "norm2"),
      *rules.prefixed(
        attention_rules(
          budget,
          config.router,
          pooled=config.sr_ratios[index] > 1,
          qkv_bias=config.qkv_bias,
        ),
        "attn.",
        ("attn",),
      ),
      *rules.prefixed(_mlp(config.mlp_dims[index]), "mlp.", ("mlp",)),
    ]
    for rule in rules.prefixed(block, "", (stage, "blocks")):
      names = [
        tuple(f"block{number}.{layer}.{name}" for name in rule.theirs)
        for layer in range(config.depths[index])
      ]
      table.append(rules.stacked(rule, names))
  return table


def _position_mlp() -> list[Rule]:
  return [
    rules.one(
      "cpb_fc1.weight", "cpb/fc1_kernel", rules.transpose, rules.transpose
    ),
    rules.one("cpb_fc1.bias", "cpb/fc1_bias"),
    *rules.linear("cpb_fc2", "cpb/fc2"),
  ]


def _mlp(hidden: int) -> list[Rule]:
  """Rules of a gated MLP, whose fc1 holds the gate's rows, then the value's."""

  def halves(suffix: str, transpose: bool) -> Rule:
    turn = (lambda w: w.T) if transpose else (lambda w: w)

    def load(arrays: list) -> list:
      return [turn(arrays[0][:hidden]), turn(arrays[0][hidden:])]

    def dump(arrays: list) -> list:
      namespace: Any = arrays[0].__array_namespace__()
      return [namespace.concat([turn(x) for x in arrays])]

    leaf = "kernel" if transpose else "bias"
    return Rule(
      (f"fc1.{suffix}",), (("gate", leaf), ("value", leaf)), load, dump
    )

  return [
    halves("weight", transpose=True),
    halves("bias", transpose=False),
    *rules.linear(
      "dwconv.dwconv",
      "dwconv",
      kernel_maps=(
        lambda w: w[:, 0].transpose(1, 2, 0),
        lambda w: w.transpose(2, 0, 1)[:, None],
      ),
    ),
    *rules.linear("fc2", "out"),
  ]


CONVERTER = Converter(model_rules, released_run)
