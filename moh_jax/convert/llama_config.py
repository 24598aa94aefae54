"""Hugging Face's config.json of the LLaMA family, and our `LLMConfig`.

transformers reads the file, so that defaults, old keys and each version's ways
to say RoPE are its own; a key that it does not know has no effect there either.
What our model does not compute exactly is refused.

Models that no architecture of transformers computes have one of our own, with
keys of its own, which `transformers_code/configuration_moh.py` reads. Settings
without a key in config.json stand under our key `moh_jax`: fields of
`LLMConfig` that override the other keys.

`max_position_embeddings` is the sequence length of the training; transformers
computes texts of any length. Our `max_length` is the length that the RoPE is
made for: with the scalings "linear" and "dynamic" the training's length times
the factor; with "yarn" the original length times the factor, if that is more;
and with "llama3" the training's length, which is already scaled.

Where layers attend in a sliding window, `max_length` is at most the window. In
texts that short every token sees all before it, so the model is exact, and
longer texts are refused like any that exceed `max_length`.
"""

import copy
import dataclasses
import logging
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from moh_jax.config import LLMConfig, RotaryConfig, RouterConfig
from moh_jax.config.base import make_section
from moh_jax.config.layers import without_router
from moh_jax.config.llm import ROPE_SCALINGS
from moh_jax.config.parse import differing_fields
from moh_jax.data.files import import_extra
from moh_jax.runtime.files import read_json

_LOG = logging.getLogger(__name__)
# The last is for exported models that only our code for transformers computes:
# as plain LLaMAs they would load and compute something else.
_OURS = "moh_llama"
_ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  _OURS: "MoHLlamaForCausalLM",
}
# Keys of every architecture -> fields of `LLMConfig` of the same values.
_KEYS = {
  "vocab_size": "vocab_size",
  "hidden_size": "width",
  "intermediate_size": "mlp_dim",
  "num_key_value_heads": "num_kv_heads",
  "head_dim": "head_dim",
  "rms_norm_eps": "norm_eps",
  "tie_word_embeddings": "tie_embeddings",
}
# Keys of our architecture -> fields of `LLMConfig`.
_SAME = ("router", "shared_heads", "head_order")
_SAME += ("qkv_bias", "out_bias", "qk_norm")
_OUR_KEYS = dict(zip(_SAME, _SAME))
_OUR_KEYS |= {"selected_heads": "top_k", "heads_per_layer": "num_heads"}
BALANCE_WEIGHT = "router_aux_loss_coef"  # key, of our architecture too
_AUTO_MAP = {
  "AutoConfig": "configuration_moh.MoHLlamaConfig",
  "AutoModel": "modeling_moh.MoHModel",
  "AutoModelForCausalLM": "modeling_moh.MoHLlamaForCausalLM",
}
# The numbers of each RoPE scaling, by our fields and else by the keys.
_ROPE_NUMBERS = {
  "none": "",
  "linear": "factor",
  "dynamic": "factor",
  "llama3": "factor low_freq_factor high_freq_factor original_length",
  "yarn": "factor original_length beta_fast beta_slow truncate"
  " attention_factor",
}
_ROPE_KEYS = {"original_length": "original_max_position_embeddings"}


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
  stored = read_json(path)
  found = stored.get("model_type")
  if (found == _OURS) != (kind == "moh-hf"):
    right = "llama" if kind == "moh-hf" else "moh-hf"
    raise ValueError(f"{path}: model_type={found!r}: use --from {right}")
  has_code = "auto_map" in stored or any(path.parent.glob("modeling_*.py"))
  if kind == "llama" and has_code:
    raise ValueError(
      f"{path}: auto_map, or a modeling file beside it: the model is computed "
      "by code of its own, which is not run; the release's MoH-LLaMA3 is "
      "--from moh-llama3; of a folder that stock LLaMA computes remove both"
    )
  try:
    return from_hf(stored)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def from_hf(stored: Mapping[str, Any]) -> LLMConfig:
  """Converts a parsed config.json to a model section.

  Raises:
    ValueError: a field has a value that our model cannot compute.
  """
  kind = stored.get("model_type")
  if kind not in _ARCHITECTURES:
    allowed = ", ".join(_ARCHITECTURES)
    raise ValueError(f"model_type={kind!r} must be one of {allowed}")
  # That torch is not there, whose models are not needed.
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  library = import_extra("transformers", "config.json of a language model")
  others = ("model_type", "auto_map", *_OUR_KEYS)
  given = {n: x for n, x in stored.items() if n not in others}
  given = copy.deepcopy(given)  # transformers writes into it
  try:
    if kind == _OURS:  # whose width need not be a multiple of its heads
      given["hidden_size"] = given["head_dim"] * given["num_attention_heads"]
    theirs = library.AutoConfig.for_model(
      "llama" if kind == _OURS else kind, **given
    )
  except Exception as error:  # its checks raise nearly anything
    raise ValueError(" ".join(str(error).split())) from error
  heads, layers = theirs.num_attention_heads, theirs.num_hidden_layers
  quantized = stored.get("quantization_config")
  _check("hidden_act", theirs.hidden_act, "silu", "swish")
  _check("quantization_config", quantized, None, {})
  length, rope = _rope(theirs)
  window = getattr(theirs, "sliding_window", None)
  slides = kind == "mistral" or (
    kind in ("qwen2", "qwen3") and "sliding_attention" in theirs.layer_types
  )
  if slides and window is not None and window < length:
    _LOG.warning(
      "sliding_window=%d: texts of up to %d tokens, which see all before them, "
      "are exact; longer ones are refused (max_position_embeddings=%d)",
      *(window, window, theirs.max_position_embeddings),
    )
    length = window
  has_bias = kind in ("llama", "qwen3", _OURS) and theirs.attention_bias
  section = {
    **{field: getattr(theirs, key, None) for key, field in _KEYS.items()},
    "max_length": length,
    "num_heads": (heads,) * layers,
    "qkv_bias": has_bias or kind == "qwen2",
    "out_bias": has_bias,
    "mlp_bias": kind in ("llama", _OURS) and theirs.mlp_bias,
    "qk_norm": kind == "qwen3",
    "router": {"kind": "none"},
    "rope": rope,
    "shared_heads": (heads,) * layers,
    "top_k": (0,) * layers,
    "remat": "dots",  # as our released models
  }
  section["head_dim"] = section["head_dim"] or theirs.hidden_size // heads
  section["width"] = stored.get("hidden_size", theirs.hidden_size)
  ours = {
    field: stored[key]
    for key, field in _OUR_KEYS.items()
    if kind == _OURS and stored.get(key) is not None
  }
  ours |= stored.get("moh_jax", {})
  return make_section("model", LLMConfig, {**section, **ours})


def _check(name: str, found: Any, *allowed: Any) -> None:
  if found not in allowed:
    raise ValueError(f"{name}={found!r} must be one of {allowed}")


def _rope(theirs: Any) -> tuple[int, dict[str, Any]]:
  """The longest text, and the fields of RoPE's section."""
  rope, length = theirs.rope_parameters, theirs.max_position_embeddings
  scaling = rope.get("rope_type")
  scaling = "none" if scaling == "default" else scaling
  _check("rope_type", scaling, *ROPE_SCALINGS)
  _check("partial_rotary_factor", rope.get("partial_rotary_factor", 1), 1)
  fields: dict[str, Any] = {"theta": rope["rope_theta"], "scaling": scaling}
  for name in _ROPE_NUMBERS[scaling].split():
    if (value := rope.get(_ROPE_KEYS.get(name, name))) is not None:
      fields[name] = value
  if scaling not in ("none", "linear"):
    fields.setdefault("original_length", length)
  section = make_section("rope", RotaryConfig, fields)
  if scaling in ("linear", "dynamic"):  # how long a text is, the factor says
    length = int(length * section.factor)
  if scaling == "yarn":
    length = max(length, int(section.original_length * section.factor))
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    if all(scales):
      above, below = (0.1 * x * math.log(section.factor) + 1 for x in scales)
      fields.setdefault("attention_factor", above / below)
  return length, fields


def moh_llama3(model: LLMConfig) -> LLMConfig:
  """Gives a plain LLaMA the routing of the MoH-LLaMA3 release.

  Of the h heads of a layer the first int(0.5 h) are shared, and int(0.25 h) of
  the others are chosen by the norms of their queries.
  """
  return dataclasses.replace(
    model,
    router=RouterConfig("query_norm"),
    shared_heads=tuple(heads // 2 for heads in model.num_heads),
    top_k=tuple(heads // 4 for heads in model.num_heads),
  )


def to_hf(model: LLMConfig) -> dict[str, Any]:
  """Converts a model section to a config.json; `from_hf` is the inverse.

  Returns:
    The config.json of transformers' LLaMA, Qwen2 or Qwen3 if one of them
    computes this model, else of our own architecture.

  Raises:
    ValueError: neither they nor the code of our architecture compute it.
  """
  # The exported weights include the constant.
  model = dataclasses.replace(model, attention_out_multiplier=1.0)
  # Fields in which models with the same outputs may differ. Of `rope` a
  # config.json holds all that the scaling uses.
  free = {"max_length", "rope", *LLMConfig.RUNTIME_FIELDS}
  if model.router.kind == "none":
    free |= {"router", "shared_heads", "top_k", "head_order"}
  kinds = ("llama", "qwen2", "qwen3", _OURS)
  if model.width % model.num_heads[0]:  # which transformers refuses
    kinds = (_OURS,)
  for kind in kinds:
    stored = _to_hf(model, kind)
    plain, ours = (dataclasses.asdict(x) for x in (from_hf(stored), model))
    ours = {name: value for name, value in ours.items() if value != plain[name]}
    if not (lost := ours.keys() - free):
      return {**stored, "moh_jax": ours} if ours else stored
  fields = ", ".join(f"model.{n}={getattr(model, n)!r}" for n in sorted(lost))
  raise ValueError(f"{fields}: transformers has no code for such a model")


def to_released(model: LLMConfig) -> dict[str, Any]:
  """Makes the config.json with which the MoH-LLaMA3 release runs a model.

  It is that of the LLaMA of the same weights: the release's modeling file
  computes the routing from the number of heads.

  Raises:
    ValueError: the release's code computes another model.
  """
  heads, none = model.num_heads, (0,) * model.depth
  plain = without_router(model, shared_heads=heads, top_k=none, head_order=())
  wrong = differing_fields(model, moh_llama3(plain), "model")
  stored = to_hf(plain)
  if stored["model_type"] != "llama" or stored["rope_scaling"] or heads[0] % 2:
    wrong.append("it is no LLaMA of an even number of heads and unscaled RoPE")
  if wrong:
    raise ValueError(f"--to released: not the release's: {'; '.join(wrong)}")
  return stored


def _to_hf(model: LLMConfig, kind: str) -> dict[str, Any]:
  """Makes the config.json of an architecture, without our key `moh_jax`."""
  length, rope = model.max_length, model.rope
  if rope.scaling == "linear":
    length = math.ceil(length / rope.factor)
  elif rope.scaling == "dynamic":
    length = rope.original_length
  scaling = None
  if rope.scaling != "none":  # older versions of transformers read `type`
    scaling = {"rope_type": rope.scaling, "type": rope.scaling}
    for name in _ROPE_NUMBERS[rope.scaling].split():
      if (value := getattr(rope, name)) is not None:
        scaling[_ROPE_KEYS.get(name, name)] = value
  stored = {
    "architectures": [_ARCHITECTURES[kind]],
    "model_type": kind,
    **{key: getattr(model, field) for key, field in _KEYS.items()},
    "num_hidden_layers": model.depth,
    "num_attention_heads": model.num_heads[0],
    "hidden_act": "silu",
    "max_position_embeddings": length,
    "rope_theta": rope.theta,
    "rope_scaling": scaling,
    "attention_bias": model.qkv_bias and model.out_bias,
    "mlp_bias": model.mlp_bias,
  }
  if kind == _OURS:
    stored |= {key: getattr(model, field) for key, field in _OUR_KEYS.items()}
    stored["router"] = dataclasses.asdict(model.router)
    if len(set(model.num_heads)) == 1:
      stored["heads_per_layer"] = None
    stored["head_order"] = model.head_order or None
    stored[BALANCE_WEIGHT] = 0.01
    stored["auto_map"] = dict(_AUTO_MAP)
  return stored
