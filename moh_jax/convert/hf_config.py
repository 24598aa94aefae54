"""Reads Hugging Face's config.json of the LLaMA family as an `LLMConfig`.

Only what our model computes exactly is accepted. Any other value is an error,
since ignoring a field would silently give wrong outputs. Our own architecture
has keys of its own (`moh_keys`). Settings without a field in config.json stand
under our key `moh_jax`: fields of `LLMConfig` that override the other keys.

`max_position_embeddings` is the sequence length of the training; transformers
computes texts of any length. Our `max_length` is the length that the RoPE is
made for: with the scalings "linear" and "dynamic" the training's length times
the factor; with "yarn" the original length times the factor, if that is more;
and with "llama3" the training's length, which is already scaled.

Where layers attend in a sliding window, `max_length` is at most the window. In
texts that short every token sees all before it, so the model is exact, and
longer texts are refused like any that exceed `max_length`.
"""

import dataclasses
import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from moh_jax.config import LLMConfig, RouterConfig, make_section, upgrade
from moh_jax.config.llm import ROPE_SCALINGS
from moh_jax.convert import moh_keys
from moh_jax.convert.hf_keys import (
  OUR_ARCHITECTURE,
  OUR_KEY,
  Keys,
  check_keys,
  check_own_code,
)
from moh_jax.json_files import read_json

_LOG = logging.getLogger(__name__)

# Architectures with their model_type. They differ in the biases of their
# attention, in the norm of queries and keys, and in what absent keys mean.
# The name for exported models that only our code for transformers computes is
# `OUR_ARCHITECTURE`: under the name of a plain LLaMA it would load them and
# compute something else.
ARCHITECTURES = {
  "LlamaForCausalLM": "llama",
  "MistralForCausalLM": "mistral",
  "Qwen2ForCausalLM": "qwen2",
  "Qwen3ForCausalLM": "qwen3",
}
# What transformers takes for a key that config.json lacks, where that is not
# what it takes for a LLaMA.
_DEFAULTS = {
  "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
  "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
  "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
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
  "yarn": {
    "factor": "factor",
    "original_max_position_embeddings": "original_length",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
  },
}
_CASTS = {"original_length": int, "truncate": bool}  # the others are floats
# Those that may be absent: then our default is transformers'.
_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor")
# What else may stand beside the numbers. Programs that tune a model with YaRN
# write "finetuned".
_ROPE_KEYS = {
  *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
  *("mscale", "mscale_all_dim", "finetuned"),
}.union(*ROPE_NUMBERS.values())


def read_config(path: pathlib.Path, kind: str = "llama") -> LLMConfig:
  """Reads a config.json.

  Args:
    path: path of the file.
    kind: format that the folder is read as; "moh-hf" is our architecture, the
      others are transformers'. A "llama" must be computed by a stock
      architecture, not by code of its folder.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is damaged, of another format, or describes a model that ours
      cannot compute; the message names the field, its value and what is
      supported.
  """
  stored = read_json(path, Keys)
  try:
    _check_format(stored, kind)
    if kind == "llama":
      check_own_code(stored, path.parent)
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
  check_keys(stored)
  stored = {**_DEFAULTS.get(ARCHITECTURES.get(architecture), {}), **stored}
  stored = {name: value for name, value in stored.items() if value is not None}
  _check_supported(stored)
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
    "qk_norm": architecture == "Qwen3ForCausalLM",
    "router": NO_ROUTER,
    "shared_heads": (heads,) * layers,
    "top_k": (0,) * layers,
    "remat": "dots",  # as our released models
    **_rope(stored),
  }
  window = _window(stored, architecture)
  if window and window < fields["max_length"]:
    _LOG.warning(
      "sliding_window=%d: texts of up to %d tokens, which see all before them, "
      "are exact; longer ones are refused (max_position_embeddings=%d)",
      *(window, window, stored["max_position_embeddings"]),
    )
    fields["max_length"] = window
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
    names = {kind: name for name, kind in ARCHITECTURES.items()}
    if kind not in names:
      raise ValueError(
        f"architectures={found!r}, model_type={kind!r}: supported are "
        f"{known} or, without architectures, {tuple(names)}"
      )
    return names[kind]
  if not isinstance(found, list) or len(found) > 1 or found[0] not in known:
    raise ValueError(f"architectures={found!r} must be one of {known}")
  return found[0]


def _check_supported(stored: Mapping[str, Any]) -> None:
  """Raises ValueError for values that would change the model's outputs."""

  def refuse(name: str, allowed: str) -> None:
    raise ValueError(f"{name}={stored[name]!r} must be {allowed}")

  if stored.get("hidden_act", "silu") not in ("silu", "swish"):
    refuse("hidden_act", "'silu'")
  if stored.get("quantization_config"):
    refuse("quantization_config", "absent: weights must not be quantized")
  if stored.get("partial_rotary_factor", 1) != 1:
    refuse("partial_rotary_factor", "1: all of a head is rotated")


def _window(stored: Mapping[str, Any], architecture: str) -> int | None:
  """Tokens that a sliding layer sees, None where every token sees all before.

  Raises:
    ValueError: layers attend in another way, or slide without a window.
  """
  given = stored.get("layer_types")
  window = stored.get("sliding_window")
  if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
    slides = "sliding_attention" in (given or ())
    if given is None:
      slides = stored.get("max_window_layers", 28) < stored["num_hidden_layers"]
    window = window if slides and stored.get("use_sliding_window") else None
  elif architecture != "MistralForCausalLM":  # there all layers slide
    window = None
  allowed = {"full_attention"} | ({"sliding_attention"} if window else set())
  if given and not set(given) <= allowed:
    raise ValueError(f"layer_types={given!r} must each be in {sorted(allowed)}")
  return None if window is None else _integer(stored, "sliding_window")


def _rope(stored: Mapping[str, Any]) -> dict[str, Any]:
  """Reads RoPE from `rope_parameters`, or `rope_theta` and `rope_scaling`."""
  name = "rope_scaling" if stored.get("rope_scaling") else "rope_parameters"
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
  scaling = {key: value for key, value in scaling.items() if value is not None}
  if unknown := sorted(scaling.keys() - _ROPE_KEYS):
    raise ValueError(f"{name}: unknown keys {unknown} may change the outputs")
  length = _integer(stored, "max_position_embeddings")
  rope = {
    "theta": float(scaling.get("rope_theta", stored.get("rope_theta", 10000))),
    "scaling": kind,
  }
  # transformers has the same default for the original length.
  given = {"original_max_position_embeddings": length, **scaling}
  for theirs, ours in ROPE_NUMBERS[kind].items():
    value = given.get(theirs)
    if value is None and theirs in _OPTIONAL:
      continue
    if not isinstance(value, int | float):
      raise ValueError(
        f"{name}.{theirs}={value!r} must be a number for rope_type={kind!r}"
      )
    rope[ours] = _CASTS.get(ours, float)(value)
  if kind == "dynamic":
    rope["original_length"] = length
  if kind in _STRETCHED:
    length = int(length * rope["factor"])
  if kind == "yarn":
    rope = {**_yarn_factor(scaling, rope["factor"]), **rope}
    length = max(length, int(rope["original_length"] * rope["factor"]))
  return {"rope": rope, "max_length": length}


def _yarn_factor(scaling: Mapping[str, Any], factor: float) -> dict[str, float]:
  """The attention factor that both keys "mscale..." stand for, if there."""
  counts = [scaling.get(name) for name in ("mscale", "mscale_all_dim")]
  if not all(counts):
    return {}
  above, below = (0.1 * count * math.log(factor) + 1 for count in counts)
  return {"attention_factor": above / below}


def _our_fields(stored: Mapping[str, Any], architecture: str) -> dict[str, Any]:
  # Older exports have the keys of older configs.
  ours = upgrade({"model": stored.get(OUR_KEY) or {}})["model"]
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
