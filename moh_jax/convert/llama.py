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
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tokenizers as hf

from moh_jax.config import Config, LLMConfig, TextDataConfig
from moh_jax.config.heads import HeadBudget, Units
from moh_jax.convert import llama_config, rules
from moh_jax.convert.rules import CONFIG_FILE, Converter, Exported, Rule
from moh_jax.data import tokenizers
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.runtime.files import printable
from moh_jax.runtime.json_files import read_json

_ROUTER_NAMES = {
  name: f"router.{name}" for name in ("routed", "group", "shared")
}
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SEQUENCE_LENGTH = 2048  # default for training a converted model further
_CODE = pathlib.Path(__file__).parent / "transformers_code"
_PAPER = "https://arxiv.org/abs/2410.11842"
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER"{trust})
tokenizer = AutoTokenizer.from_pretrained("FOLDER"{trust})
```
"""
_USE_RELEASED = """\
The weights and `config.json` are those of a plain LLaMA. With the modeling file
of the MoH-LLaMA3 release (github.com/SkyworkAI/MoH) they are this model; with
transformers' own LLaMA they are a model without routing.
"""


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


def is_ignored(model: LLMConfig, tensors: Mapping[str, Any], name: str) -> bool:
  """Whether a public tensor is redundant and so not converted.

  Old checkpoints store RoPE's frequencies, which follow from the config. With
  tied embeddings the output layer is the embedding, which some store twice.

  Raises:
    ValueError: the two differ: versions of transformers disagree which counts.
  """
  if not model.tie_embeddings or name != _HEAD:
    return name.endswith("rotary_emb.inv_freq")
  if _EMBED not in tensors:  # which is told as missing
    return True
  head, embed = (np.asarray(tensors[key]) for key in (_HEAD, _EMBED))
  if not np.array_equal(head, embed, equal_nan=True):  # NaN is told by name
    raise ValueError(
      f"tie_word_embeddings=True, but {_HEAD} differs from {_EMBED}: set it to "
      "false, or remove the one that does not count"
    )
  return True


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


def folder_files(exported: Exported) -> dict[str, str]:
  """Makes the texts of the folder's small files, by name.

  Raises:
    FileNotFoundError: there is no file of scores.
    ValueError: the model cannot be written in this form, or the licence or the
      scores cannot stand in the model card.
  """
  config, folder = exported.config, exported.folder
  tokenizer = exported.tokenizer
  released = exported.form == "released"
  to_stored = llama_config.to_released if released else llama_config.to_hf
  stored, balance_weight = to_stored(config.model), llama_config.BALANCE_WEIGHT
  if balance_weight in stored:
    stored[balance_weight] = config.train.balance_weight
  ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
  if tokenizer is not None:
    stops = list(tokenizer.stop_ids)
    ids["bos_token_id"] = tokenizer.bos_id
    ids["eos_token_id"] = stops if len(stops) > 1 else next(iter(stops), None)
  stored |= {**ids, "torch_dtype": exported.dtype}
  files = {CONFIG_FILE: _json(stored)}
  has_code = "auto_map" in stored
  if has_code:
    files |= {path.name: path.read_text() for path in _CODE.glob("*.py")}
  generation = {name: value for name, value in ids.items() if value is not None}
  if generation and not (folder / tokenizers.GENERATION_CONFIG).exists():
    files[tokenizers.GENERATION_CONFIG] = _json(generation)
  if tokenizer and not (folder / tokenizers.TOKENIZER_CONFIG).exists():
    files |= _tokenizer_files(folder, tokenizer)
  return {**files, "README.md": _model_card(exported, has_code=has_code)}


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


def read_scores(path: str, step: int) -> dict[str, float]:
  """Reads what `evaluate --json` wrote.

  Args:
    path: the file.
    step: step of the checkpoint that is exported.

  Returns:
    The numbers by name; those within other objects as "task.metric".

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it holds no numbers, or those of another step.
  """
  try:
    stored = read_json(path)
  except ValueError as error:
    raise ValueError(f"--scores {error}") from error
  found = dict(_numbers("", stored))
  scored = found.pop("step", step)
  if scored != step:
    raise ValueError(
      f"--scores {path}: has the scores of step {scored:g}, the checkpoint is "
      f"of step {step}"
    )
  if not found:
    raise ValueError(f"--scores {path}: holds no numbers")
  return found


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
  """Yields all numbers of a parsed JSON value with their names."""
  if isinstance(value, dict | list):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
      yield from _numbers(f"{name}.{key}" if name else str(key), inner)
  elif isinstance(value, int | float) and not isinstance(value, bool):
    yield name, value


def _model_card(exported: Exported, *, has_code: bool) -> str:
  """The text of README.md; paths stay out of it."""
  license, model = exported.license, exported.config.model
  if license and not _LICENSE.fullmatch(license):
    raise ValueError(
      f"--license {license!r} must be an identifier of lower-case letters, "
      "digits and '.+-', such as apache-2.0, llama3 or other"
    )
  routed = model.router.kind != "none"
  router = "none, all heads are active"
  if routed:
    form = model.router.gate_form
    structure = model.router.structure.replace("_", " ")
    router = f"{model.router.kind}, gates as in the {form} form, {structure}"
  header = "---\n"
  if license:
    header += f"license: {license}\n"
  header += "library_name: transformers\npipeline_tag: text-generation\ntags:\n"
  header += f"- {'mixture-of-head' if routed else 'llama'}\n---\n"
  title = "Mixture-of-Head language model" if routed else "Language model"
  use = _USE.format(trust=", trust_remote_code=True" if has_code else "")
  parts = [
    header,
    f"# {title}\n",
    f"Layers choose heads for every token: {_PAPER}.\n" if routed else "",
    _table(
      ("", ""),
      [
        ("Parameters", f"{exported.parameters:,}"),
        ("Stored as", exported.dtype),
        ("Active heads", f"{model.activated_share:.1%}"),
        ("Router", router),
        ("Layers, width", f"{model.depth}, {model.width}"),
        ("Key/value heads of a layer", model.num_kv_heads),
        ("Vocabulary", f"{model.vocab_size:,}"),
        ("Longest text", f"{model.max_length:,} tokens"),
        ("License", license or "not stated"),
      ],
    ),
    "## Use\n\n" + (_USE_RELEASED if exported.form == "released" else use),
    "## Heads of each layer\n\n" + _budgets(model),
    "## Training\n\n" + _training(exported.config, exported.step),
  ]
  if exported.scores:
    scores = read_scores(exported.scores, exported.step)
    rows = [(name, f"{value:.6g}") for name, value in scores.items()]
    parts.append("## Scores\n\n" + _table(("metric", "value"), rows))
  return "\n".join(part for part in parts if part)


def _budgets(model: LLMConfig) -> str:
  rows, first = [], 0
  for group in model.layer_groups():
    budget, last = group.budget, first + group.depth - 1
    span = f"{first}-{last}" if last > first else str(first)
    first = last + 1
    heads = budget.num_heads, budget.shared, budget.top_k
    rows.append((span, *heads, f"{budget.share:.1%}"))
  return _table(
    ("layers", "heads", "always active", "chosen by a token", "active"), rows
  )


def _training(config: Config, step: int) -> str:
  """What the run's config says of the training."""
  if not step:
    return "Converted from other weights; not trained further.\n"
  data, optim, train = config.data, config.optim, config.train
  tokens = step * data.batch_size * data.sequence_length
  mix = ", ".join(f"{n} {r:g} %" for n, r in zip(data.mix, data.ratios))
  fall = f"to {optim.final_lr:g}"
  schedule = {
    "constant": "constant",
    "cosine": f"cosine {fall}",
    "wsd": f"constant, in the last {optim.decay(train.steps):,} steps {fall},",
  }[optim.schedule]
  warmup = optim.warmup(train.steps)
  rate = f"{optim.lr:g}, {schedule} after {warmup:,} steps of warm-up"
  optimizer = f"{optim.name}, weight decay {optim.weight_decay:g}"
  if optim.clip_norm:
    optimizer += f", gradients up to norm {optim.clip_norm:g}"
  if optim.ema_decay:
    optimizer += f", weights averaged with decay {optim.ema_decay:g}"
  tune = config.tune
  top_k = zip(tune.top_k_steps, tune.top_k_values)
  rows = [
    ("Steps", f"{step:,} of {train.steps:,}"),
    ("Batch", f"{data.batch_size:,} texts of {data.sequence_length:,} tokens"),
    ("Tokens", f"{tokens:,}"),
    ("Data", mix or data.source),
    ("Start", "other weights" if train.init_from else "random"),
    ("Learning rate", rate),
    ("Optimizer", optimizer),
    ("Weight of the balance loss", train.balance_weight),
    ("Heads chosen", ", ".join(f"{k} from step {n:,}" for n, k in top_k)),
  ]
  return _table(("", ""), [row for row in rows if row[1] != ""])


def _table(names: tuple[str, ...], rows: list[tuple]) -> str:
  lines = [names, ("---",) * len(names), *rows]
  return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(value: Any) -> str:
  """A value as a cell of a table, where nothing in it is Markdown."""
  text = printable(str(value), kept="")
  return re.sub(r"([\\`*\[\]<>|!])", r"\\\1", text)


CONVERTER = Converter(
  model_rules, released_run, is_ignored, _described, folder_files
)
