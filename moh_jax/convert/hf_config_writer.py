"""Converts `LLMConfig` to Hugging Face's config.json; the inverse of reading.

Settings without a field in config.json stand under our key `moh_jax`, see
`hf_config`.
"""

import dataclasses
import math
from typing import Any

from moh_jax.config import LLMConfig
from moh_jax.convert.hf_config import (
  NO_ROUTER,
  OUR_ARCHITECTURE,
  OUR_KEY,
  ROPE_NUMBERS,
  from_hf,
)


def to_hf(
  model: LLMConfig,
  *,
  dtype: str = "float32",
  bos_id: int | None = None,
  eos_id: int | None = None,
) -> dict[str, Any]:
  """Converts a model section to a config.json; `from_hf` is the inverse.

  Args:
    model: the model section.
    dtype: dtype of the stored weights.
    bos_id: id of the begin of text, if known.
    eos_id: id of the end of text, if known.

  Returns:
    The config.json of transformers' `LlamaForCausalLM` or `Qwen2ForCausalLM` if
    one of them computes this model, else of our own architecture.
  """
  # Fields in which models with the same outputs may differ. Of `rope` a
  # config.json holds all that the scaling uses.
  free = {"max_length", "rope", *LLMConfig.RUNTIME_FIELDS}
  if model.router.kind == "none":
    free |= {"router", "shared_heads", "top_k", "head_order"}
  names = ("LlamaForCausalLM", "Qwen2ForCausalLM", OUR_ARCHITECTURE)
  for architecture in names:
    stored = _to_hf(model, architecture)
    plain = from_hf(stored | {OUR_KEY: {"router": NO_ROUTER}})
    plain, ours = dataclasses.asdict(plain), dataclasses.asdict(model)
    ours = {name: value for name, value in ours.items() if value != plain[name]}
    if not ours.keys() - free:
      break
  if architecture == OUR_ARCHITECTURE:
    # `router` must stand there for its absence to mean a damaged file.
    ours["router"] = dataclasses.asdict(model.router)
  stored |= {OUR_KEY: ours} if ours else {}
  ids = {"bos_token_id": bos_id, "eos_token_id": eos_id}
  return {**stored, **ids, "torch_dtype": dtype}


def _to_hf(model: LLMConfig, architecture: str) -> dict[str, Any]:
  """Makes the config.json of an architecture, without our own key."""
  kind = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
  length, rope = model.max_length, model.rope
  names = ROPE_NUMBERS[rope.scaling]
  numbers = {theirs: getattr(rope, ours) for theirs, ours in names.items()}
  if rope.scaling == "linear":
    length = math.ceil(length / rope.factor)
  elif rope.scaling == "dynamic":
    length = rope.original_length
  stored = {
    "architectures": [architecture],
    "model_type": kind.get(architecture, "moh_llama"),
    "vocab_size": model.vocab_size,
    "hidden_size": model.width,
    "intermediate_size": model.mlp_dim,
    "num_hidden_layers": model.depth,
    "num_attention_heads": model.num_heads[0],
    "num_key_value_heads": model.num_kv_heads,
    "head_dim": model.head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": length,
    "rms_norm_eps": model.norm_eps,
    "rope_theta": rope.theta,
    "rope_scaling": {"rope_type": rope.scaling, **numbers} if numbers else None,
    "tie_word_embeddings": model.tie_embeddings,
    "attention_dropout": 0.0,
  }
  if architecture == "Qwen2ForCausalLM":
    return stored | {"use_sliding_window": False}
  return stored | {
    "attention_bias": model.qkv_bias and model.out_bias,
    "mlp_bias": model.mlp_bias,
  }
