"""Language models of the LLaMA family: tensors, and folders of transformers.

The public names are those of `LlamaForCausalLM` and related classes in Hugging
Face's transformers. RoPE rotates the same pairs there, so no rows are permuted.
MoH-LLaMA3 of github.com/SkyworkAI/MoH has no further tensors. Router matrices
have no public names; we call them `model.layers.N.self_attn.router.*`.

An exported folder has beside the weights config.json, the tokenizer,
generation_config.json, the model card README.md, and for models of our own
architecture the code that computes them. What a checkpoint brought along, such
as its generation_config, is not replaced.
"""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers as hf

from moh_jax.config import Config, LLMConfig, TextDataConfig
from moh_jax.config.heads import HeadBudget, Units
from moh_jax.convert import llama_config, rules
from moh_jax.convert.rules import CONFIG_FILE, Converter, Rule
from moh_jax.data import tokenizers
from moh_jax.data.tokenizers import Tokenizer

_ROUTER_NAMES = {
  name: f"router.{name}" for name in ("routed", "group", "shared")
}
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SEQUENCE_LENGTH = 2048  # default for training a converted model further
_CODE = pathlib.Path(__file__).parent / "transformers_code"
_CARD = """\
---
{license}library_name: transformers
pipeline_tag: text-generation
---

# Mixture-of-Head language model

Tokens use {share} of the heads (https://arxiv.org/abs/2410.11842): {heads}.

`AutoModelForCausalLM.from_pretrained("FOLDER"{trust})` loads it{plain}.
"""
# Of the form of the release, whose own modeling file computes the routing.
_PLAIN = " as a LLaMA,\nwhose heads the code of github.com/SkyworkAI/MoH routes"


def model_rules(config: LLMConfig) -> list[Rule]:
  """Conversion rules of the whole network."""
  table = [
    rules.one(_EMBED, "embed/embedding"),
    rules.one("model.norm.weight", "norm/scale"),
  ]
  if not config.tie_embeddings:
    table += rules.linear("lm_head", "head", bias=False)
  block = functools.partial(_block_rules, config)
  return table + rules.stack_rules(config, block, "model.layers.{layer}.")


def _block_rules(config: LLMConfig, budget: HeadBudget) -> list[Rule]:
  heads, dim = budget.num_heads, budget.head_dim
  kv_heads = config.num_kv_heads
  project = functools.partial(
    rules.split_projection_rules, dim=dim, bias=config.qkv_bias
  )
  if kv_heads == heads:
    attention = project(("q_proj", "k_proj", "v_proj"), "qkv", heads)
  else:
    attention = [
      *project(("q_proj",), "q", heads),
      *project(("k_proj", "v_proj"), "kv", kv_heads),
    ]
  attention += rules.mix_rules(
    *("o_proj", "out", heads, dim),
    bias=config.out_bias,
    multiplier=config.attention_out_multiplier,
  )
  units = Units.of(budget, config.router, kv_heads)
  attention += rules.router_rules(units.budget, config.router, _ROUTER_NAMES)
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


def released_run(model: LLMConfig, tensors: Mapping[str, Any]) -> Config:
  """Config of a run with a released model."""
  del tensors  # the sizes of the model are those of its section
  length = min(_SEQUENCE_LENGTH, model.max_length)
  return Config(model=model, data=TextDataConfig(sequence_length=length))


def kept(model: LLMConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
  """The public tensors without redundant ones, which are not converted.

  Old checkpoints store RoPE's frequencies, which follow from the config. With
  tied embeddings the output layer is the embedding, which some store twice.

  Raises:
    ValueError: the two differ: versions of transformers disagree which counts.
  """
  out = {n: x for n, x in tensors.items() if not n.endswith("inv_freq")}
  if model.tie_embeddings and _HEAD in out:
    head = np.asarray(out.pop(_HEAD))
    embed = np.asarray(out.get(_EMBED, head))  # else it is told as missing
    if not np.array_equal(head, embed, equal_nan=True):  # NaN is told by name
      raise ValueError(
        f"tie_word_embeddings=True, but {_HEAD} differs from {_EMBED}: set it "
        "to false, or remove the one that does not count"
      )
  return out


def _described(kind: str, path: pathlib.Path) -> LLMConfig | None:
  """The model of transformers' config.json.

  Raises:
    FileNotFoundError: the format needs the file.
    ValueError: see `llama_config.read_config`.
  """
  if not path.is_file() and kind != "moh-hf":  # the shapes may tell
    return None
  model = llama_config.read_config(path, kind)
  if kind == "moh-llama3" and model.router.kind == "none":
    return llama_config.moh_llama3(model)
  return model


def folder_files(
  config: Config,
  folder: pathlib.Path,
  tokenizer: Tokenizer | None,
  dtype: str,
  license: str,
  form: str,
) -> dict[str, str]:
  """Makes the texts of the folder's small files, see `rules.Converter`.

  Raises:
    ValueError: the model cannot be written in this form.
  """
  is_released = form == "released"
  to_hf = llama_config.to_released if is_released else llama_config.to_hf
  stored = to_hf(config.model)
  balance_weight = llama_config.BALANCE_WEIGHT
  if balance_weight in stored:
    stored[balance_weight] = config.train.balance_weight
  stops = list(tokenizer.stop_ids) if tokenizer else []
  ids = {
    "bos_token_id": tokenizer and tokenizer.bos_id,
    "eos_token_id": stops if len(stops) > 1 else next(iter(stops), None),
  }
  stored |= {**ids, "torch_dtype": dtype}
  files = {CONFIG_FILE: _json(stored)}
  has_code = "auto_map" in stored
  if has_code:
    files |= {path.name: path.read_text() for path in _CODE.glob("*.py")}
  generation = {name: value for name, value in ids.items() if value is not None}
  if generation and not (folder / tokenizers.GENERATION_CONFIG).exists():
    files[tokenizers.GENERATION_CONFIG] = _json(generation)
  if tokenizer and not (folder / tokenizers.TOKENIZER_CONFIG).exists():
    files |= _tokenizer_files(folder, tokenizer)
  heads = (
    f"{group.depth} layers of {group.budget.num_heads}, {group.budget.shared} "
    f"of them always active and {group.budget.top_k} chosen by each token"
    for group in config.model.layer_groups()
  )
  files["README.md"] = _CARD.format(
    license=f"license: {license}\n" * bool(license),
    share=f"{config.model.activated_share:.1%}",
    heads="; ".join(heads),
    trust=", trust_remote_code=True" * has_code,
    plain=_PLAIN * is_released,
  )
  return files


def _json(value: Any) -> str:
  return json.dumps(value, indent=2) + "\n"


def _tokenizer_files(
  folder: pathlib.Path, tokenizer: Tokenizer
) -> dict[str, str]:
  """What transformers needs to load a tokenizer.json, {} for other kinds.

  Without a config the class of the tokenizer follows from the architecture,
  which it does not know. Where our prompts begin with the begin of text, the
  post-processor of the tokenizer.json adds it.
  """
  if tokenizer.kind != "tokenizer_json":
    return {}
  theirs = hf.Tokenizer.from_file(str(folder / tokenizer.file_name))
  ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
  tokens = {
    name: theirs.id_to_token(value)
    for name, value in ids.items()
    if value is not None
  }
  files = {}
  if tokenizer.add_bos and not theirs.encode("").ids:
    begin = hf.processors.TemplateProcessing(
      single=f"{tokens['bos_token']} $A",
      special_tokens=[(tokens["bos_token"], tokenizer.bos_id)],
    )
    before = [theirs.post_processor] if theirs.post_processor else []
    theirs.post_processor = hf.processors.Sequence([*before, begin])
    files[tokenizer.file_name] = theirs.to_str()
  if "eos_token" in tokens:  # for batches
    tokens |= {"pad_token": tokens["eos_token"], "padding_side": "left"}
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_bos_token": tokenizer.add_bos,
    "clean_up_tokenization_spaces": False,
    **tokens,
  }
  return {tokenizers.TOKENIZER_CONFIG: _json(config), **files}


CONVERTER = Converter(model_rules, released_run, kept, _described, folder_files)
