"""The small files of a language model's folder for transformers.

Beside the weights and the tokenizer: config.json, generation_config.json, the
model card README.md, and for models of our own architecture the code that
computes them. What a checkpoint brought along, such as its generation_config,
is not replaced.
"""

import json
import logging
import pathlib
from typing import Any

import tokenizers as hf

from moh_jax.convert import hf_config, hf_config_writer, model_card
from moh_jax.convert.converter import CONFIG_FILE, Exported
from moh_jax.data.tokenizer_files import GENERATION_CONFIG, TOKENIZER_CONFIG
from moh_jax.data.tokenizers import (
  Tokenizer,
  TokenizerFileError,
  load_tokenizer,
)

_LOG = logging.getLogger(__name__)

_CODE = pathlib.Path(__file__).parent / "transformers_code"
_CONFIGS = {
  "hf": hf_config_writer.to_hf,
  "released": hf_config_writer.to_released,
}


def folder_files(exported: Exported, folder: pathlib.Path) -> dict[str, str]:
  """Makes the texts of the files, by name.

  Args:
    exported: the model.
    folder: where the tokenizer's files are.

  Raises:
    ValueError: the model cannot be written in this form.
  """
  config = exported.config
  tokenizer = open_tokenizer(folder)
  ids: dict[str, Any] = {}
  if tokenizer is not None:
    first, *others = tokenizer.stop_ids or (None,)
    ids["bos_token_id"] = tokenizer.bos_id
    ids["eos_token_id"] = [first, *others] if others else first
  stored = _CONFIGS[exported.form](
    config.model,
    dtype=exported.dtype,
    balance_weight=config.train.balance_weight,
    bos_id=ids.get("bos_token_id"),
    eos_id=ids.get("eos_token_id"),
  )
  files = {CONFIG_FILE: _json(stored)}
  has_code = stored["architectures"] == [hf_config.OUR_ARCHITECTURE]
  if has_code:
    files |= {path.name: path.read_text() for path in _CODE.glob("*.py")}
  generation = {name: value for name, value in ids.items() if value is not None}
  if generation and not (folder / GENERATION_CONFIG).exists():
    files[GENERATION_CONFIG] = _json(generation)
  if tokenizer and not (folder / TOKENIZER_CONFIG).exists():
    files |= _tokenizer_files(folder, tokenizer)
  card = model_card.model_card(exported, has_code=has_code)
  return {**files, "README.md": card}


def _json(value: Any) -> str:
  return json.dumps(value, indent=2) + "\n"


def open_tokenizer(folder: pathlib.Path) -> Tokenizer | None:
  """Opens a tokenizer; None if there is none, or its own file is damaged.

  Raises:
    ValueError: a file beside the tokenizer's own is damaged.
  """
  try:
    return load_tokenizer(folder)
  except FileNotFoundError:
    return None
  except TokenizerFileError as error:  # the library may be missing
    _LOG.warning("%s; begin and end of text are not known", error)
    return None


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
  return {TOKENIZER_CONFIG: _json(config), **files}
