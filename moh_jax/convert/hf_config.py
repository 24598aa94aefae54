"""Reads Hugging Face's config.json of the LLaMA family as an `LLMConfig`.

Only what our model computes exactly is accepted. Any other value is an error,
since ignoring a field would silently give wrong outputs. Our own architecture
has keys of its own (`moh_keys`). Settings without a field in config.json stand
under our key `moh_jax`: fields of `LLMConfig` that override the other keys.

`max_position_embeddings` is the sequence length of the training; transformers
computes texts of any length. Our `max_length` is the length that the RoPE is
made for: with the scalings "linear" and "dynamic" the training's length times
the factor, and with "llama3" the training's length, which is already scaled.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from moh_jax.config import (
  LLMConfig,
  RotaryConfig,
  RouterConfig,
  legacy,
  make_section,
)
from moh_jax.config.rotary import ROPE_SCALINGS
from moh_jax.convert import moh_keys

# These architectures differ only in the biases of their attention.
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
# Name for exported models that only our code for transformers computes: under
# the name of a plain LLaMA it would load them and compute something else.
OUR_ARCHITECTURE = "MoHLlamaForCausalLM"
OUR_KEY = "moh_jax"

_MODEL_TYPES = {"llama": 0, "mistral": 1, "qwen2": 2}
_REQUIRED = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
  "max_position_embeddings",
  "rms_norm_eps",
)
NO_ROUTER = {"kind": "none"}
_NESTED = ("router", "rope")  # sections of the model
# Longer texts than the training's are a matter of the factor alone.
_STRETCHED = ("linear", "dynamic")
# The numbers of each scaling, by transformers' name and ours.
ROPE_NUMBERS = {
  "none": {},
  "linear": {"factor": "factor"},
  "dynamic": {"factor": "factor"},
  "llama3": {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_length",
  },
}


def read_config(path: pathlib.Path, kind: str = "llama") -> LLMConfig:
  """Reads a config.json.

  Args:
    path: path of the file.
    kind: format that the folder is read as; "moh-hf" is our architecture, the
      others are transformers'.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is damaged, of another format, or describes a model that ours
      cannot compute; the message names the field, its value and what is
      supported.
  """
  if not path.is_file():
    raise FileNotFoundError(f"{path}: no such file")
  try:
    stored = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f"{path}: not valid JSON: {error}") from error
  if not isinstance(stored, dict):
    raise ValueError(f"{path}: holds no JSON object")
  try:
    _check_format(stored, kind)
    return from_hf(stored)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def from_hf(stored: Mapping[str, Any]) -> LLMConfig:
  """Converts a parsed config.json to a model section.

  Raises:
    ValueError: a field is missing, or has a value that our model cannot
      compute.
  """
  architecture = _architecture(stored)
  _check_supported(stored, architecture)
  stored = {name: value for name, value in stored.items() if value is not None}
  for name in _REQUIRED:
    if name not in stored:
      raise ValueError(f"has no {name!r}")
  heads = _integer(stored, "num_attention_heads")
  width = _integer(stored, "hidden_size")
  layers = _integer(stored, "num_hidden_layers")
  if "head_dim" not in stored and width % heads:
    raise ValueError(
      f"hidden_size={width} must be a multiple of num_attention_heads={heads} "
      "where no head_dim is given"
    )
  stored = {"num_key_value_heads": heads, "head_dim": width // heads, **stored}
  kv_heads = _integer(stored, "num_key_value_heads")
  if heads % kv_heads:
    raise ValueError(
      f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}"
    )
  is_qwen2 = architecture == "Qwen2ForCausalLM"
  bias = bool(stored.get("attention_bias", False))
  fields = {
    "vocab_size": _integer(stored, "vocab_size"),
    "width": width,
    "mlp_dim": _integer(stored, "intermediate_size"),
    "num_heads": (heads,) * layers,
    "num_kv_heads": kv_heads,
    "head_dim": _integer(stored, "head_dim"),
    "norm_eps": float(stored["rms_norm_eps"]),
    "tie_embeddings": bool(stored.get("tie_word_embeddings", False)),
    "qkv_bias": bias or is_qwen2,
    "out_bias": bias and not is_qwen2,
    "mlp_bias": bool(stored.get("mlp_bias", False)),
    "router": NO_ROUTER,
    "shared_heads": (heads,) * layers,
    "top_k": (0,) * layers,
    "remat": "dots",  # as our released models
    **_rope(stored),
  }
  ours = _our_fields(stored, architecture)
  nested = {name: {**fields[name], **ours.get(name, {})} for name in _NESTED}
  fields |= {**ours, **nested}
  return make_section("model", LLMConfig, fields)


def moh_llama3(model: LLMConfig) -> LLMConfig:
  """Gives a plain LLaMA the routing of the MoH-LLaMA3 release.

  Of the h heads of a layer the first int(0.5 h) are shared, and int(0.25 h) of
  the others are chosen by the norms of their queries.
  """
  return dataclasses.replace(
    model,
    router=RouterConfig("query_norm"),
    shared_heads=tuple(int(0.5 * heads) for heads in model.num_heads),
    top_k=tuple(int(0.25 * heads) for heads in model.num_heads),
  )


def _check_format(stored: Mapping[str, Any], kind: str) -> None:
  """Raises ValueError where another format is the right one."""
  found = stored.get("architectures")
  if (found == [OUR_ARCHITECTURE]) != (kind == "moh-hf"):
    right = "llama" if kind == "moh-hf" else "moh-hf"
    raise ValueError(f"architectures={found!r}: use --from {right}")


def _architecture(stored: Mapping[str, Any]) -> str:
  known = (*ARCHITECTURES, OUR_ARCHITECTURE)
  found = stored.get("architectures")
  if not found:  # configs that were written by hand may lack it
    kind = stored.get("model_type")
    if kind not in _MODEL_TYPES:
      raise ValueError(
        f"architectures={found!r}, model_type={kind!r}: supported are "
        f"{known} or, without architectures, {tuple(_MODEL_TYPES)}"
      )
    return ARCHITECTURES[_MODEL_TYPES[kind]]
  if not isinstance(found, list) or len(found) > 1 or found[0] not in known:
    raise ValueError(f"architectures={found!r} must be one of {known}")
  return found[0]


def _check_supported(stored: Mapping[str, Any], architecture: str) -> None:
  """Raises ValueError for fields that would change the model's outputs."""

  def refuse(name: str, allowed: str) -> None:
    raise ValueError(f"{name}={stored[name]!r} must be {allowed}")

  if stored.get("hidden_act", "silu") not in ("silu", "swish"):
    refuse("hidden_act", "'silu'")
  if stored.get("quantization_config"):
    refuse("quantization_config", "absent: weights must not be quantized")
  if stored.get("partial_rotary_factor") not in (None, 1, 1.0):
    refuse("partial_rotary_factor", "1: all of a head is rotated")
  if _slides(stored, architecture):
    refuse(
      "sliding_window",
      "null (or at least max_position_embeddings, or use_sliding_window "
      "false): every token sees all before it",
    )
  kinds = set(stored.get("layer_types") or ["full_attention"])
  if kinds != {"full_attention"}:
    refuse("layer_types", "'full_attention' in every layer")


def _slides(stored: Mapping[str, Any], architecture: str) -> bool:
  window = stored.get("sliding_window")
  if window is None or architecture in ("LlamaForCausalLM", OUR_ARCHITECTURE):
    return False
  on = stored.get("use_sliding_window", architecture == "MistralForCausalLM")
  longest = stored.get("max_position_embeddings") or math.inf
  return bool(on) and window < longest


def _rope(stored: Mapping[str, Any]) -> dict[str, Any]:
  """Reads RoPE from `rope_parameters`, or `rope_theta` and `rope_scaling`."""
  name = "rope_parameters" if "rope_parameters" in stored else "rope_scaling"
  scaling = stored.get(name) or {}
  if not isinstance(scaling, dict) or any(
    isinstance(value, dict) for value in scaling.values()
  ):
    raise ValueError(f"{name}={scaling!r} must be one set of parameters")
  kind = scaling.get("rope_type", scaling.get("type", "default"))
  kind = "none" if kind == "default" else kind
  if kind not in ROPE_SCALINGS:
    allowed = ("default", *ROPE_SCALINGS[1:])
    raise ValueError(f"{name}.rope_type={kind!r} must be one of {allowed}")
  if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
    raise ValueError(
      f"{name}.partial_rotary_factor={scaling['partial_rotary_factor']} must "
      "be 1: all of a head is rotated"
    )
  length = _integer(stored, "max_position_embeddings")
  theta = scaling.get("rope_theta", stored.get("rope_theta"))
  rope = {
    "theta": 10000.0 if theta is None else float(theta),
    "scaling": kind,
  }
  # transformers has the same default for the original length.
  given = {"original_max_position_embeddings": length, **scaling}
  for theirs, ours in ROPE_NUMBERS[kind].items():
    value = given.get(theirs)
    if not isinstance(value, int | float):
      raise ValueError(
        f"{name}.{theirs}={value!r} must be a number for rope_type={kind!r}"
      )
    rope[ours] = type(getattr(RotaryConfig(), ours))(value)
  if kind == "dynamic":
    rope["original_length"] = length
  if kind in _STRETCHED:
    length = int(length * rope["factor"])
  return {"rope": rope, "max_length": length}


def _our_fields(stored: Mapping[str, Any], architecture: str) -> dict[str, Any]:
  # Older exports have the keys of older configs.
  ours = legacy.upgrade({"model": stored.get(OUR_KEY) or {}})["model"]
  names = {field.name for field in dataclasses.fields(LLMConfig)}
  if unknown := sorted(set(ours) - names):
    raise ValueError(f"{OUR_KEY}: unknown fields {unknown}")
  if architecture == OUR_ARCHITECTURE:  # older exports have our key alone
    ours = {**moh_keys.read(stored), **ours}
  router = ours.get("router", {})
  if architecture == OUR_ARCHITECTURE and "kind" not in router:
    raise ValueError(f"architectures=[{OUR_ARCHITECTURE!r}] needs router.kind")
  if architecture != OUR_ARCHITECTURE and router.get("kind", "none") != "none":
    raise ValueError(
      f"{OUR_KEY}.router.kind={router['kind']!r} must be 'none' for "
      f"architectures=[{architecture!r}]"
    )
  return ours


def _integer(stored: Mapping[str, Any], name: str) -> int:
  value = stored[name]
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise ValueError(f"{name}={value!r} must be an integer of at least 1")
  return value
