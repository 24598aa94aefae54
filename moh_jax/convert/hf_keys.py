"""Which keys of Hugging Face's config.json may stand there.

A key that we do not know may change what the model computes, so it is refused
by its name. Known keys either are read, or have no effect on the logits.
"""

import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from moh_jax.convert import moh_keys
from moh_jax.json_files import Size

OUR_ARCHITECTURE = "MoHLlamaForCausalLM"
OUR_KEY = "moh_jax"

# `hf_config` reads these, and refuses values that it cannot express.
_READ = frozenset(
  """
  architectures model_type vocab_size hidden_size intermediate_size
  num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
  max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias
  mlp_bias partial_rotary_factor quantization_config rope_theta rope_scaling
  rope_parameters sliding_window use_sliding_window max_window_layers
  layer_types
""".split()
) | {OUR_KEY}

# Initial values, training, dtypes, the shape of transformers' own outputs,
# other tasks' heads, defaults of generation, and notes of the programs that
# wrote the file.
_WITHOUT_EFFECT = frozenset(
  """
  initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop
  torch_dtype dtype use_cache pretraining_tp gradient_checkpointing
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

# Keys of our architecture that concern its loss and its outputs alone.
_OUR_OTHERS = {"router_aux_loss_coef", "output_router_logits"}

# Without effect while they are null, false, 0 or empty.
_OFF = frozenset(
  """
  is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size
  tie_encoder_decoder pruned_heads rope_interleaved use_mrope
""".split()
)


_Counts = list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]


class Keys(msgspec.Struct):
  """Types of the keys that are read, of which any may be null or missing."""

  architectures: list[str] | None = None
  model_type: str | None = None
  vocab_size: Size | None = None
  hidden_size: Size | None = None
  intermediate_size: Size | None = None
  num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
  num_attention_heads: Size | None = None
  num_key_value_heads: Size | None = None
  head_dim: Size | None = None
  hidden_act: str | None = None
  max_position_embeddings: Size | None = None
  rms_norm_eps: float | None = None
  tie_word_embeddings: bool | None = None
  attention_bias: bool | None = None
  mlp_bias: bool | None = None
  partial_rotary_factor: float | None = None
  rope_theta: float | None = None
  rope_scaling: dict | None = None
  rope_parameters: dict | None = None
  sliding_window: int | None = None
  use_sliding_window: bool | None = None
  max_window_layers: int | None = None
  layer_types: list[str] | None = None
  router: dict | None = None
  shared_heads: _Counts | None = None
  selected_heads: _Counts | None = None
  heads_per_layer: _Counts | None = None
  head_order: list[_Counts] | None = None
  ours: dict | None = msgspec.field(name=OUR_KEY, default=None)


def check_keys(stored: Mapping[str, Any]) -> None:
  """Refuses keys that may change what the model computes.

  Raises:
    ValueError: there is a key that we do not know; it is named. `auto_map` is
      no matter of the network, see `check_own_code`.
  """
  known = _READ | _WITHOUT_EFFECT | {"auto_map"}
  if OUR_ARCHITECTURE in (stored.get("architectures") or ()):
    known |= moh_keys.FIELDS.keys() | _OUR_OTHERS
  for name, value in stored.items():
    off = value is None or (name in _OFF and not value)
    if name not in known and not off:
      raise ValueError(
        f"unknown key {name!r}={value!r} may change the outputs; remove it "
        "from config.json if it does not"
      )


def check_own_code(stored: Mapping[str, Any], folder: pathlib.Path) -> None:
  """Refuses a folder that computes by Python code of its own.

  Args:
    stored: its config.json.
    folder: the folder.

  Raises:
    ValueError: config.json names code (`auto_map`), or a modeling file lies
      beside it; the message names the option for the folders that we know.
  """
  code = sorted(path.name for path in folder.glob("modeling_*.py"))
  if stored.get("auto_map"):
    found = f"auto_map={stored['auto_map']!r}"
  elif code:
    found = f"the file {code[0]!r} beside it"
  else:
    return
  raise ValueError(
    f"{found}: the model is computed by code of its own, which is not run; "
    "the release's MoH-LLaMA3 is --from moh-llama3; of a folder that stock "
    "LLaMA computes remove auto_map and the modeling file"
  )
