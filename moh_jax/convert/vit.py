"""Conversion rules of MoH-ViT and TransNeXt.

The public names are those of github.com/SkyworkAI/MoH (MoH-ViT) and
github.com/DaiShiResearch/TransNeXt (classification).
"""

from collections.abc import Mapping
from typing import Any

from moh_jax.config import Config, DataConfig, ViTConfig
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.convert import rules
from moh_jax.convert.rules import Converter, Rule

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
  budget: HeadBudget,
  router: RouterConfig,
  *,
  pooled: bool,
  qkv_bias: bool,
  multiplier: float = 1.0,
) -> list[Rule]:
  """Conversion rules of one attention module.

  Args:
    budget: head split of the layer.
    router: its router.
    pooled: whether it is aggregated attention, with pooled keys, or full.
    qkv_bias: whether the projections have biases.
    multiplier: constant that multiplies its output.
  """
  heads, dim = budget.num_heads, budget.head_dim
  table = [
    rules.one(
      "temperature",
      "query_scale/temperature",
      rules.reshaped((heads,), (heads, 1, 1)),
    ),
    rules.one(
      "query_embedding",
      "query_scale/query_embedding",
      rules.reshaped((heads, dim), (heads, 1, dim)),
    ),
    rules.one("cpb_fc1.weight", "cpb/fc1_kernel", rules.TRANSPOSED),
    rules.one("cpb_fc1.bias", "cpb/fc1_bias"),
    *rules.linear("cpb_fc2", "cpb/fc2"),
    *rules.mix_rules("proj", "out", heads, dim, multiplier=multiplier),
    *rules.router_rules(budget, router),
  ]
  if not pooled:
    return table + rules.projection_rules("qkv", "qkv", 3, heads, dim, qkv_bias)
  return [
    *table,
    *rules.projection_rules("q", "q", 1, heads, dim, qkv_bias),
    *rules.projection_rules("kv", "kv", 2, heads, dim, qkv_bias),
    rules.one("relative_pos_bias_local", "relative_pos_bias_local"),
    rules.one("learnable_tokens", "learnable_tokens"),
    rules.one(
      "learnable_bias",
      "learnable_bias",
      rules.reshaped((heads, -1), (heads, 1, -1)),
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
    patch = rules.linear("proj", "proj", kernel_maps=rules.CONV_MAPS)
    patch += rules.norm("norm", "norm")
    attention = attention_rules(
      budget,
      config.router,
      pooled=config.sr_ratios[index] > 1,
      qkv_bias=config.qkv_bias,
      multiplier=config.attention_out_multiplier,
    )
    block = [
      *rules.norm("norm1", "norm1"),
      *rules.norm("norm2", "norm2"),
      *rules.prefixed(attention, "attn.", ("attn",)),
      *rules.prefixed(_mlp(config.mlp_dims[index]), "mlp.", ("mlp",)),
    ]
    theirs, layers = f"block{number}.{{layer}}.", range(config.depths[index])
    table += [
      *rules.prefixed(patch, f"patch_embed{number}.", (stage, "patch_embed")),
      *rules.norm(f"norm{number}", f"{stage}/norm"),
      *rules.stacked(block, theirs, (stage, "blocks"), layers),
    ]
  return table


def _mlp(hidden: int) -> list[Rule]:
  """Rules of a gated MLP, whose fc1 holds the gate's rows, then the value's."""

  def halves(theirs: str, ours: str, maps: rules.Maps) -> Rule:
    to_ours, to_theirs = maps

    def load(arrays: list) -> list:
      return [to_ours(arrays[0][:hidden]), to_ours(arrays[0][hidden:])]

    def dump(arrays: list) -> list:
      namespace: Any = arrays[0].__array_namespace__()
      return [namespace.concat([to_theirs(x) for x in arrays])]

    return Rule((theirs,), (("gate", ours), ("value", ours)), load, dump)

  return [
    halves("fc1.weight", "kernel", rules.TRANSPOSED),
    halves("fc1.bias", "bias", rules.SAME),
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
