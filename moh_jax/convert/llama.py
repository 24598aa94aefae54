"""Conversion rules of the LLaMA family, with and without MoH.

The public names are those of `LlamaForCausalLM` and related classes in Hugging
Face's transformers. RoPE rotates the same pairs there, so no rows are permuted.
MoH-LLaMA3 of github.com/SkyworkAI/MoH has no further tensors. Router matrices
have no public names; we call them `model.layers.N.self_attn.router.*`.
"""

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from moh_jax.config import Config, LLMConfig, TextDataConfig
from moh_jax.config.heads import HeadBudget
from moh_jax.convert import hf_config, hf_folder, rules
from moh_jax.convert.converter import Converter
from moh_jax.convert.layers import (
  mix_rules,
  router_rules,
  split_projection_rules,
  stack_rules,
)
from moh_jax.convert.rules import Rule

_ROUTER_NAMES = {
  name: f"router.{name}" for name in ("routed", "group", "shared")
}
_SEQUENCE_LENGTH = 2048  # default for training a converted model further


def model_rules(config: LLMConfig) -> list[Rule]:
  """Conversion rules of the whole network."""
  table = [
    rules.one("model.embed_tokens.weight", "embed/embedding"),
    rules.one("model.norm.weight", "norm/scale"),
  ]
  if not config.tie_embeddings:
    table += rules.linear("lm_head", "head", bias=False)
  block = functools.partial(_block_rules, config)
  return table + stack_rules(config, block, "model.layers.{layer}.")


def released_run(model: LLMConfig, tensors: Mapping[str, Any]) -> Config:
  """Config of a run with a released model."""
  del tensors  # the sizes of the model are those of its section
  length = min(_SEQUENCE_LENGTH, model.max_length)
  data = TextDataConfig(sequence_length=length)
  return Config(model=model, data=data)


def is_ignored(model: LLMConfig, name: str) -> bool:
  """Whether a public tensor is redundant and so not converted.

  Old checkpoints store RoPE's frequencies, which follow from the config. With
  tied embeddings the output layer is the embedding, whatever else a checkpoint
  stores; transformers does the same.
  """
  tied = model.tie_embeddings and name == "lm_head.weight"
  return tied or name.endswith("rotary_emb.inv_freq")


def _block_rules(config: LLMConfig, budget: HeadBudget) -> list[Rule]:
  heads, dim = budget.num_heads, budget.head_dim
  kv_heads = config.num_kv_heads
  project = functools.partial(
    split_projection_rules, dim=dim, bias=config.qkv_bias
  )
  if kv_heads == heads:
    attention = project(("q_proj", "k_proj", "v_proj"), "qkv", heads)
  else:
    attention = [
      *project(("q_proj",), "q", heads),
      *project(("k_proj", "v_proj"), "kv", kv_heads),
    ]
  attention += mix_rules("o_proj", "out", heads, dim, config.out_bias)
  attention += router_rules(budget, config.router, _ROUTER_NAMES)
  if config.qk_norm:
    for name in ("q_norm", "k_norm"):
      attention.append(rules.one(f"{name}.weight", f"{name}/scale"))
  table = [
    *rules.prefixed(attention, "self_attn.", ("attn",)),
    rules.one("input_layernorm.weight", "attn_norm/scale"),
    rules.one("post_attention_layernorm.weight", "mlp_norm/scale"),
  ]
  for name in ("gate", "up", "down"):
    table += rules.linear(
      f"mlp.{name}_proj", f"mlp/{name}", bias=config.mlp_bias
    )
  return table


def _described(kind: str, path: pathlib.Path) -> LLMConfig | None:
  """The model of transformers' config.json.

  Raises:
    FileNotFoundError: the format needs the file.
    ValueError: see `hf_config.read_config`.
  """
  if not path.is_file() and kind != "moh-hf":  # the shapes may tell
    return None
  model = hf_config.read_config(path, kind)
  if kind == "moh-llama3" and model.router.kind == "none":
    return hf_config.moh_llama3(model)
  return model


CONVERTER = Converter(
  model_rules, released_run, is_ignored, _described, hf_folder.folder_files
)
