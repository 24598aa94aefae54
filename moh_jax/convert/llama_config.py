"""Hugging Face's config.json of the LLaMA family, and our `LLMConfig`.

Only what our model computes exactly is read. Any other value is an error, since
ignoring a field would silently give wrong outputs. For the same reason a key
that we do not know is refused by its name.

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

import dataclasses
import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from moh_jax.config import (
  LLMConfig,
  RouterConfig,
  make_section,
  upgrade,
  without_router,
)
from moh_jax.config.base import MOST_COUNT, MOST_LAYERS
from moh_jax.config.llm import ROPE_SCALINGS
from moh_jax.convert import rules
from moh_jax.runtime.json_files import Size, check_json, read_json

_LOG = logging.getLogger(__name__)

# Architectures of transformers with their model_type. They differ in the biases
# of their attention, in the norm of queries and keys, and in what absent keys
# mean. The last is for exported models that only our code for transformers
# computes: as plain LLaMAs they would load and compute something else.
OUR_ARCHITECTURE = "MoHLlamaForCausalLM"
_ARCHITECTURES = {
  "LlamaForCausalLM": "llama",
  "MistralForCausalLM": "mistral",
  "Qwen2ForCausalLM": "qwen2",
  "Qwen3ForCausalLM": "qwen3",
  OUR_ARCHITECTURE: "moh_llama",
}
_QWEN = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
# What transformers takes for a key that config.json lacks, where that is not
# what it takes for a LLaMA.
_DEFAULTS = {
  "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
  "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
  "Qwen3ForCausalLM": {
    "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128
  },
}  # fmt: skip
# The numbers of each RoPE scaling, by our fields; the needed ones have no
# defaults.
_ROPE_NUMBERS = {
  "none": "",
  "linear": "factor",
  "dynamic": "factor",
  "llama3": "factor low_freq_factor high_freq_factor original_length",
  "yarn": "factor original_length beta_fast beta_slow truncate"
  " attention_factor",
}
_THETA = 10000.0  # where a file says none
_NEEDED = ("factor", "low_freq_factor", "high_freq_factor")

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
_OUR_KEYS = {
  "router": "router",
  "shared_heads": "shared_heads",
  "selected_heads": "top_k",
  "heads_per_layer": "num_heads",
  "head_order": "head_order",
  "qkv_bias": "qkv_bias",
  "out_bias": "out_bias",
  "qk_norm": "qk_norm",
}
BALANCE_WEIGHT = "router_aux_loss_coef"  # key, of our architecture too
_AUTO_MAP = {
  "AutoConfig": "configuration_moh.MoHLlamaConfig",
  "AutoModel": "modeling_moh.MoHModel",
  "AutoModelForCausalLM": "modeling_moh.MoHLlamaForCausalLM",
}
_WHOLLY = "1: all of a head is rotated"
_NESTED = ("router", "rope")  # sections of the model

# Known keys without an effect on the logits: initial values, training, dtypes,
# the shape of transformers' own outputs, other tasks' heads, defaults of
# generation, and notes of the programs that wrote the file.
_WITHOUT_EFFECT = frozenset(
  """
  auto_map initializer_range attention_dropout hidden_dropout resid_pdrop
  embd_pdrop torch_dtype dtype use_cache pretraining_tp gradient_checkpointing
  use_bfloat16 torchscript tf_legacy_loss return_dict output_hidden_states
  output_attentions chunk_size_feed_forward attn_implementation
  _attn_implementation _attn_implementation_autoset
  _flash_attn_2_enabled _name_or_path name_or_path transformers_version
  unsloth_version unsloth_fixed max_sequence_length is_llama_config
  transformers.js_config
  bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
  decoder_start_token_id tokenizer_class prefix task_specific_params
  finetuning_task problem_type id2label label2id num_labels
  max_length min_length max_new_tokens do_sample early_stopping num_beams
  num_beam_groups diversity_penalty temperature top_k top_p typical_p
  repetition_penalty length_penalty no_repeat_ngram_size
  encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
  return_dict_in_generate forced_bos_token_id forced_eos_token_id
  remove_invalid_values exponential_decay_length_penalty suppress_tokens
  begin_suppress_tokens
""".split()
)
# Without effect while they are false, 0 or empty.
_OFF = frozenset(
  """
  is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size
  tie_encoder_decoder pruned_heads rope_interleaved use_mrope
""".split()
)


class _Rope(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
  """RoPE: `rope_parameters`, or of older files `rope_scaling`."""

  rope_type: str | None = None
  type: str | None = None  # the same in older files
  rope_theta: float | None = None
  partial_rotary_factor: float | None = None
  factor: float | None = None
  low_freq_factor: float | None = None
  high_freq_factor: float | None = None
  original_length: Size | None = msgspec.field(
    name="original_max_position_embeddings", default=None
  )
  beta_fast: float | None = None
  beta_slow: float | None = None
  truncate: bool | None = None
  attention_factor: float | None = None
  mscale: float | None = None
  mscale_all_dim: float | None = None
  finetuned: Any = None  # of programs that tune a model with YaRN


class _Stored(msgspec.Struct):
  """The keys that are read; null stands for an absent key."""

  vocab_size: Size
  hidden_size: Size
  intermediate_size: Size
  num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
  num_attention_heads: Size
  max_position_embeddings: Size
  rms_norm_eps: float
  architectures: list[str] | None = None
  model_type: str | None = None
  num_key_value_heads: Size | None = None
  head_dim: Size | None = None
  hidden_act: str = "silu"
  tie_word_embeddings: bool = False
  attention_bias: bool = False
  mlp_bias: bool = False
  partial_rotary_factor: float = 1.0
  rotary_percent: float = 1.0  # the same of Megatron; MoH-LLaMA3's file has it
  quantization_config: Any = None
  rope_theta: float | None = None
  rope_scaling: _Rope | None = None
  rope_parameters: _Rope | None = None
  sliding_window: int | None = None
  use_sliding_window: bool = False
  max_window_layers: int = 28
  layer_types: list[str] | None = None
  moh_jax: dict[str, Any] = msgspec.field(default_factory=dict)


_READ = frozenset(field.name for field in msgspec.structs.fields(_Stored))


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
  try:
    found = stored.get("architectures")
    if (found == [OUR_ARCHITECTURE]) != (kind == "moh-hf"):
      right = "llama" if kind == "moh-hf" else "moh-hf"
      raise ValueError(f"architectures={found!r}: use --from {right}")
    if kind == "llama":
      _check_own_code(stored, path.parent)
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
  stored = {**_DEFAULTS.get(architecture, {}), **stored}
  stored = {n: value for n, value in stored.items() if value not in (None, {})}
  _check_keys(stored, architecture)
  keys = msgspec.convert(check_json(stored, _Stored), _Stored)
  heads, layers = keys.num_attention_heads, keys.num_hidden_layers
  dim = keys.head_dim or keys.hidden_size / heads
  for name, fits, what in (
    ("hidden_act", keys.hidden_act in ("silu", "swish"), "'silu'"),
    ("partial_rotary_factor", keys.partial_rotary_factor == 1, _WHOLLY),
    ("rotary_percent", keys.rotary_percent == 1, _WHOLLY),
    ("quantization_config", not keys.quantization_config,
     "absent: weights must not be quantized"),
    ("hidden_size", dim == int(dim),
     f"a multiple of num_attention_heads={heads} where no head_dim is given"),
  ):  # fmt: skip
    if not fits:
      raise ValueError(f"{name}={getattr(keys, name)!r} must be {what}")
  length, rope = _rope(keys)
  window = _window(keys, architecture)
  if window is not None and window < length:
    _LOG.warning(
      "sliding_window=%d: texts of up to %d tokens, which see all before them, "
      "are exact; longer ones are refused (max_position_embeddings=%d)",
      *(window, window, keys.max_position_embeddings),
    )
    length = window
  keys.num_key_value_heads = keys.num_key_value_heads or heads
  keys.head_dim = int(dim)
  is_qwen2 = architecture == "Qwen2ForCausalLM"
  fields = {
    **{field: getattr(keys, key) for key, field in _KEYS.items()},
    "max_length": length,
    "num_heads": (heads,) * layers,
    "qkv_bias": keys.attention_bias or is_qwen2,
    "out_bias": keys.attention_bias and not is_qwen2,
    "mlp_bias": keys.mlp_bias,
    "qk_norm": architecture == "Qwen3ForCausalLM",
    "router": {"kind": "none"},
    "rope": rope,
    "shared_heads": (heads,) * layers,
    "top_k": (0,) * layers,
    "remat": "dots",  # as our released models
  }
  ours = _our_fields(stored, architecture)
  nested = {name: {**fields[name], **ours.get(name, {})} for name in _NESTED}
  return make_section("model", LLMConfig, {**fields, **ours, **nested})


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


def _architecture(stored: Mapping[str, Any]) -> str:
  found, kind = stored.get("architectures"), stored.get("model_type")
  for name, its_kind in _ARCHITECTURES.items():
    # Configs that were written by hand may lack one of the two.
    if found in (None, [], [name]) and kind in (None, its_kind):
      if found or kind:
        return name
  pairs = ", ".join(f"{name} ({its})" for name, its in _ARCHITECTURES.items())
  raise ValueError(
    f"architectures={found!r} and model_type={kind!r} must be those of one "
    f"model, or one of them absent: {pairs}"
  )


def _check_keys(stored: Mapping[str, Any], architecture: str) -> None:
  """Raises ValueError for a key that may change what the model computes."""
  known = _READ | _WITHOUT_EFFECT
  if architecture == OUR_ARCHITECTURE:  # two concern its loss and outputs
    known |= _OUR_KEYS.keys() | {BALANCE_WEIGHT, "output_router_logits"}
  for name, value in stored.items():
    if name not in known and (value or name not in _OFF):
      raise ValueError(
        f"unknown key {name!r}={value!r} may change the outputs; remove it "
        "from config.json if it does not"
      )


def _check_own_code(stored: Mapping[str, Any], folder: pathlib.Path) -> None:
  """Raises ValueError for a folder that computes by Python code of its own.

  Its config.json names code (`auto_map`), or a modeling file lies beside it.
  """
  found = f"auto_map={stored['auto_map']!r}" if stored.get("auto_map") else ""
  for path in sorted(folder.glob("modeling_*.py"))[:1]:
    found = found or f"the file {path.name!r} beside it"
  if found:
    raise ValueError(
      f"{found}: the model is computed by code of its own, which is not run; "
      "the release's MoH-LLaMA3 is --from moh-llama3; of a folder that stock "
      "LLaMA computes remove auto_map and the modeling file"
    )


def _window(keys: _Stored, architecture: str) -> int | None:
  """Tokens that a sliding layer sees, None where every token sees all before.

  Raises:
    ValueError: layers attend in another way, or slide without a window.
  """
  slides = architecture == "MistralForCausalLM"  # there all layers slide
  if architecture in _QWEN and keys.use_sliding_window:
    slides = keys.max_window_layers < keys.num_hidden_layers
    if keys.layer_types is not None:
      slides = "sliding_attention" in keys.layer_types
  window = keys.sliding_window if slides else None
  allowed = {"full_attention"} | ({"sliding_attention"} if window else set())
  if not set(keys.layer_types or ()) <= allowed:
    raise ValueError(
      f"layer_types={keys.layer_types!r} must each be in {sorted(allowed)}"
    )
  return window


def _kinds(given: _Rope) -> list[str]:
  """The kind of a scaling, by both of its names."""
  return list(filter(None, (given.rope_type, given.type))) or ["default"]


def _plain(given: _Rope) -> _Rope:
  """The same scaling, which files say in several ways."""
  kind = _kinds(given)[0]
  return msgspec.structs.replace(
    given, rope_type=kind, type=None, rope_theta=None
  )


def _rope(keys: _Stored) -> tuple[int, dict[str, Any]]:
  """The longest text, and the fields of RoPE's section."""
  old, new = keys.rope_scaling, keys.rope_parameters
  name = "rope_scaling" if old else "rope_parameters"
  given = old or new or _Rope()
  each = [x for x in (old, new) if x]
  thetas = [*(x.rope_theta for x in each), keys.rope_theta]
  thetas = [x for x in thetas if x is not None]
  for what, said in (
    ("rope_scaling, rope_parameters", [_plain(x) for x in each]),
    *((f"{name}.rope_type, {name}.type", _kinds(x)) for x in each),
    ("rope_theta", thetas),
  ):
    if any(x != said[0] for x in said):
      raise ValueError(f"{what} must be the same wherever it is given")
  kind = _kinds(given)[0]
  kind = "none" if kind == "default" else kind
  if kind not in ROPE_SCALINGS:
    allowed = ("default", *ROPE_SCALINGS[1:])
    raise ValueError(f"{name}.rope_type={kind!r} must be one of {allowed}")
  if given.partial_rotary_factor not in (None, 1):
    found = f"{name}.partial_rotary_factor={given.partial_rotary_factor}"
    raise ValueError(f"{found} must be {_WHOLLY}")
  theta = thetas[0] if thetas else _THETA
  rope: dict[str, Any] = {"theta": theta, "scaling": kind}
  for number in _ROPE_NUMBERS[kind].split():
    if (value := getattr(given, number)) is not None:
      rope[number] = value
    elif number in _NEEDED:
      raise ValueError(f"{name}.{number} must be given for rope_type={kind!r}")
  length = keys.max_position_embeddings
  if kind not in ("none", "linear"):
    rope.setdefault("original_length", length)
  if kind in ("linear", "dynamic"):  # how long a text is, the factor alone says
    length = int(min(length * rope["factor"], MOST_COUNT + 1))
  if kind == "yarn":
    scaled = min(rope["original_length"] * rope["factor"], MOST_COUNT + 1)
    length = max(length, int(scaled))
    if given.mscale and given.mscale_all_dim:
      above, below = (
        0.1 * count * math.log(rope["factor"]) + 1
        for count in (given.mscale, given.mscale_all_dim)
      )
      if below <= 0:
        raise ValueError(
          f"{name}.mscale_all_dim={given.mscale_all_dim} must make a factor "
          "above 0"
        )
      rope.setdefault("attention_factor", above / below)
  return length, rope


def _our_fields(stored: Mapping[str, Any], architecture: str) -> dict[str, Any]:
  """Fields of `LLMConfig` by our own keys."""
  # Older exports have the keys of older configs.
  ours = upgrade({"model": stored.get("moh_jax", {})})["model"]
  if architecture == OUR_ARCHITECTURE:  # older exports have our key alone
    for key in ("shared_heads", "selected_heads"):
      if "router" in stored and key not in stored:
        raise ValueError(f"has a router, but no {key!r}")
    keys = {n: stored[key] for key, n in _OUR_KEYS.items() if key in stored}
    ours = {**keys, **ours}
  for name in _NESTED:
    if not isinstance(ours.get(name, {}), dict):
      raise ValueError(f"{name}={ours[name]!r} must be an object")
  kind = ours.get("router", {}).get("kind")
  if architecture == OUR_ARCHITECTURE and kind is None:
    raise ValueError(f"architectures=[{OUR_ARCHITECTURE!r}] needs router.kind")
  if architecture != OUR_ARCHITECTURE and kind not in (None, "none"):
    raise ValueError(
      f"moh_jax.router.kind={kind!r} must be 'none' for "
      f"architectures=[{architecture!r}]"
    )
  return ours


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
  for architecture in ("LlamaForCausalLM", *_QWEN, OUR_ARCHITECTURE):
    stored = _to_hf(model, architecture)
    plain = dataclasses.asdict(from_hf(stored))
    ours = dataclasses.asdict(model)
    ours = {name: value for name, value in ours.items() if value != plain[name]}
    if not (lost := ours.keys() - free):
      break
  if lost:
    fields = ", ".join(f"model.{n}={getattr(model, n)!r}" for n in sorted(lost))
    raise ValueError(f"{fields}: transformers has no code for such a model")
  return {**stored, "moh_jax": ours} if ours else stored


def to_released(model: LLMConfig) -> dict[str, Any]:
  """Makes the config.json with which the MoH-LLaMA3 release runs a model.

  It is that of the plain LLaMA of the same weights: the release's modeling file
  computes the routing from the number of heads.

  Raises:
    ValueError: the model differs from the release's form; all differences are
      named.
  """
  heads, scaling = model.num_heads[0], model.rope.scaling
  plain = without_router(
    model, shared_heads=model.num_heads, top_k=(0,) * model.depth, head_order=()
  )
  want = moh_llama3(plain)
  stored = to_hf(plain)
  (architecture,) = stored["architectures"]
  wrong = rules.differences(
    model,
    {
      "router.kind": (want.router.kind,),
      "router.structure": ("free",),
      "num_heads": ((heads,) * model.depth,),
      "shared_heads": (want.shared_heads,),
      "top_k": (want.top_k,),
      "head_order": ((tuple(range(heads)),) * model.depth, ()),
      "head_dim": (model.width / heads,),
      "mlp_bias": (False,),
      "rope.scaling": ("none", "linear", "dynamic"),  # of its version
    },
  )
  if heads % 2:  # its masks assume as many shared heads as others
    wrong.append(f"model.num_heads={model.num_heads} must be even")
  if architecture != "LlamaForCausalLM":
    wrong.append(
      f"without a router it is a {architecture}, not a LlamaForCausalLM"
    )
  if wrong:
    raise ValueError(
      "--to released: the release's code computes another model: "
      f"{'; '.join(wrong)}"
    )
  if rope := stored["rope_scaling"]:  # older versions allow no other keys
    stored["rope_scaling"] = {"type": scaling, "factor": rope["factor"]}
  return stored


def _to_hf(model: LLMConfig, architecture: str) -> dict[str, Any]:
  """Makes the config.json of an architecture, without our key `moh_jax`."""
  length, rope = model.max_length, model.rope
  if rope.scaling == "linear":
    length = math.ceil(length / rope.factor)
  elif rope.scaling == "dynamic":
    length = rope.original_length
  scaling = None
  if rope.scaling != "none":  # older versions of transformers read `type`
    names = _ROPE_NUMBERS[rope.scaling].split()
    numbers = {name: getattr(rope, name) for name in names}
    scaling = msgspec.to_builtins(_Rope(rope.scaling, rope.scaling, **numbers))
  stored = {
    "architectures": [architecture],
    "model_type": _ARCHITECTURES[architecture],
    **{key: getattr(model, field) for key, field in _KEYS.items()},
    "num_hidden_layers": model.depth,
    "num_attention_heads": model.num_heads[0],
    "hidden_act": "silu",
    "max_position_embeddings": length,
    "rope_theta": rope.theta,
    "rope_scaling": scaling,
    "attention_dropout": 0.0,
  }
  if architecture in _QWEN:
    stored["use_sliding_window"] = False
  else:
    stored["mlp_bias"] = model.mlp_bias
  if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
    stored["attention_bias"] = model.qkv_bias and model.out_bias
  if architecture == OUR_ARCHITECTURE:
    stored |= {key: getattr(model, field) for key, field in _OUR_KEYS.items()}
    stored["router"] = dataclasses.asdict(model.router)
    if len(set(model.num_heads)) == 1:
      stored["heads_per_layer"] = None
    stored["head_order"] = model.head_order or None
    stored[BALANCE_WEIGHT] = 0.01
    stored["auto_map"] = dict(_AUTO_MAP)
  return stored
