"""Converts `LLMConfig` to Hugging Face's config.json; the inverse of reading.

Settings that no key of config.json says stand under our key `moh_jax`, see
`hf_config`.
"""

import dataclasses
import math
from typing import Any

from moh_jax.config import LLMConfig, without_router
from moh_jax.convert import moh_keys
from moh_jax.convert.hf_config import (
  ARCHITECTURES,
  ROPE_NUMBERS,
  from_hf,
  moh_llama3,
)
from moh_jax.convert.hf_keys import OUR_ARCHITECTURE, OUR_KEY

# RoPE scalings of the transformers version that the MoH-LLaMA3 release needs.
_RELEASED_SCALINGS = ("none", "linear", "dynamic")


def to_hf(
  model: LLMConfig,
  *,
  dtype: str = "float32",
  bos_id: int | None = None,
  eos_id: int | list[int] | None = None,
  balance_weight: float = 0.01,
) -> dict[str, Any]:
  """Converts a model section to a config.json; `from_hf` is the inverse.

  Args:
    model: the model section.
    dtype: dtype of the stored weights.
    bos_id: id of the begin of text, if known.
    eos_id: id of the end of text, or all at which a text stops, if known.
    balance_weight: weight of the balance loss in the loss of our architecture.

  Returns:
    The config.json of transformers' LLaMA, Qwen2 or Qwen3 if one of them
    computes this model, else of our own architecture.

  Raises:
    ValueError: neither they nor the code of our architecture compute it.
  """
  # Fields in which models with the same outputs may differ. Of `rope` a
  # config.json holds all that the scaling uses.
  free = {"max_length", "rope", *LLMConfig.RUNTIME_FIELDS}
  if model.router.kind == "none":
    free |= {"router", "shared_heads", "top_k", "head_order"}
  names = [name for name in ARCHITECTURES if name != "MistralForCausalLM"]
  for architecture in (*names, OUR_ARCHITECTURE):
    stored = _to_hf(model, architecture)
    if architecture == OUR_ARCHITECTURE:
      stored |= moh_keys.write(model, balance_weight)
    plain = dataclasses.asdict(from_hf(stored))
    ours = dataclasses.asdict(model)
    ours = {name: value for name, value in ours.items() if value != plain[name]}
    if not (lost := ours.keys() - free):
      break
  if lost:
    fields = ", ".join(f"model.{n}={getattr(model, n)!r}" for n in sorted(lost))
    raise ValueError(f"{fields}: transformers has no code for such a model")
  stored |= {OUR_KEY: ours} if ours else {}
  ids = {"bos_token_id": bos_id, "eos_token_id": eos_id}
  return {**stored, **ids, "torch_dtype": dtype}


def to_released(model: LLMConfig, **options: Any) -> dict[str, Any]:
  """Makes the config.json with which the MoH-LLaMA3 release runs a model.

  It is that of the plain LLaMA of the same weights: the release's modeling file
  computes the routing from the number of heads.

  Args:
    model: the model section.
    **options: of `to_hf`.

  Raises:
    ValueError: the model differs from the release's form; all differences are
      named.
  """
  heads = model.num_heads[0]
  plain = without_router(
    model, shared_heads=model.num_heads, top_k=(0,) * model.depth, head_order=()
  )
  want = moh_llama3(plain)
  natural = (tuple(range(heads)),) * model.depth
  differences = {
    "router.kind": (model.router.kind, want.router.kind),
    "router.top_p": (model.router.top_p, 0.0),
    "num_heads": (model.num_heads, (heads,) * model.depth),
    "shared_heads": (model.shared_heads, want.shared_heads),
    "top_k": (model.top_k, want.top_k),
    "head_order": (model.head_order or natural, natural),
    "head_dim": (model.head_dim, model.width / heads),
    "mlp_bias": (model.mlp_bias, False),
  }
  stored = to_hf(plain, **options)
  wrong = [
    f"model.{name}={found!r} must be {allowed!r}"
    for name, (found, allowed) in differences.items()
    if found != allowed
  ]
  if model.rope.scaling not in _RELEASED_SCALINGS:
    wrong.append(
      f"model.rope.scaling={model.rope.scaling!r} must be one of "
      f"{_RELEASED_SCALINGS}"
    )
  if heads % 2:  # its masks assume as many shared heads as others
    wrong.append(f"model.num_heads={model.num_heads} must be even")
  if (found := stored["architectures"]) != ["LlamaForCausalLM"]:
    wrong.append(f"without a router it is a {found[0]}, not a LlamaForCausalLM")
  if wrong:
    raise ValueError(
      "--to released: the release's code computes another model: "
      f"{'; '.join(wrong)}"
    )
  if scaling := stored["rope_scaling"]:  # older versions allow no other keys
    kept = {"type": scaling["type"], "factor": scaling["factor"]}
    stored["rope_scaling"] = kept
  return stored


def _to_hf(model: LLMConfig, architecture: str) -> dict[str, Any]:
  """Makes the config.json of an architecture, without our own key."""
  length, rope = model.max_length, model.rope
  names = ROPE_NUMBERS[rope.scaling]
  numbers = {theirs: getattr(rope, ours) for theirs, ours in names.items()}
  numbers = {name: x for name, x in numbers.items() if x is not None}
  if rope.scaling == "linear":
    length = math.ceil(length / rope.factor)
  elif rope.scaling == "dynamic":
    length = rope.original_length
  stored = {
    "architectures": [architecture],
    "model_type": ARCHITECTURES.get(architecture, "moh_llama"),
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
    "rope_scaling": None,
    "tie_word_embeddings": model.tie_embeddings,
    "attention_dropout": 0.0,
  }
  if numbers:  # older versions of transformers read `type`
    scaling = {"rope_type": rope.scaling, "type": rope.scaling}
    stored["rope_scaling"] = scaling | numbers
  if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
    stored["use_sliding_window"] = False
  else:
    stored["mlp_bias"] = model.mlp_bias
  if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
    stored["attention_bias"] = model.qkv_bias and model.out_bias
  return stored
