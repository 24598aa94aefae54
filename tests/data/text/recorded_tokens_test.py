"""Tokens and conversations against those that transformers made.

tests/tools/record_tokenizers.py recorded them.
"""

import functools
import hashlib
import json
import pathlib

import pytest
from absl.testing import absltest, parameterized

from moh_jax.data.chat import load_chat_template
from moh_jax.data.tokenizers import (
  TokenizerFileError,
  load_tokenizer,
  prompt_ids,
)
from tests.tools.random_texts import random_texts

_RECORDED = pathlib.Path(__file__).parent / "recorded"
_VERSIONS = ("4.57.6", "5.23.0")
_NAMES = ("gpt2", "llama2_json", "llama3", "qwen2")
_texts = functools.cache(random_texts)


@functools.cache
def _encoded(name):
  """Tokens of all texts by how they are encoded."""
  tokenizer = load_tokenizer(_RECORDED / "tokenizers" / name)
  return {
    "as_text": tokenizer.encode_batch(_texts()),
    "parsed": [tokenizer.encode(t, parse_special=True) for t in _texts()],
    "prompt": [prompt_ids(tokenizer, t, parse_special=True) for t in _texts()],
  }


@functools.cache
def _recorded(folder, version):
  path = _RECORDED / folder / f"transformers_{version}.json"
  return json.loads(path.read_text())


class TokensTest(parameterized.TestCase):
  @parameterized.product(name=_NAMES, version=_VERSIONS)
  def test_a_thousand_texts_have_the_same_tokens(self, name, version):
    for how, recorded in _recorded("tokenizers", version)[name].items():
      ours = _encoded(name)[how]
      self.assertEqual(ours[:3], recorded["first"], how)
      digest = hashlib.sha256(json.dumps(ours).encode()).hexdigest()
      self.assertEqual(digest, recorded["sha256"], how)

  def test_legacy_model_is_that_of_version_4(self):  # version 5 has none
    recorded = _recorded("tokenizers", "4.57.6")["llama2_legacy"]
    for how, ours in _encoded("llama2_legacy").items():
      digest = hashlib.sha256(json.dumps(ours).encode()).hexdigest()
      self.assertEqual(digest, recorded[how]["sha256"], how)

  @parameterized.parameters(*_NAMES)
  def test_texts_without_special_tokens_agree_with_themselves(self, name):
    encoded = _encoded(name)
    differ = sum(a != b for a, b in zip(encoded["as_text"], encoded["parsed"]))
    self.assertBetween(differ, 1, 500)  # the texts hold names of special tokens
    tokenizer = load_tokenizer(_RECORDED / "tokenizers" / name)
    one_by_one = [tokenizer.encode(text) for text in _texts()[:50]]
    self.assertEqual(one_by_one, encoded["as_text"][:50])

  @parameterized.parameters(
    ("gpt2", 340, 340, False),
    ("llama2_legacy", 1, 2, True),
    ("llama2_json", 1, 2, True),
    ("llama3", 340, 342, True),
    ("qwen2", None, 342, False),
  )
  def test_begin_and_end(self, name, bos_id, eos_id, add_bos):
    tokenizer = load_tokenizer(_RECORDED / "tokenizers" / name)
    found = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos)
    self.assertEqual(found, (bos_id, eos_id, add_bos))
    self.assertEqual(tokenizer.stop_ids, (eos_id,))

  @parameterized.parameters(
    ("llama2", "'legacy' is false"), ("llama2_added", "adds tokens to it")
  )
  def test_models_that_need_a_tokenizer_json_are_refused(self, name, message):
    with self.assertRaisesRegex(TokenizerFileError, message):
      load_tokenizer(_RECORDED / "tokenizers" / name)


class ChatTest(parameterized.TestCase):
  @parameterized.product(
    name=("llama2", "llama3", "chatml", "mistral", "gemma"), version=_VERSIONS
  )
  def test_conversations_have_the_same_text_and_tokens(self, name, version):
    pytest.importorskip("transformers")
    folder = _RECORDED / "chat"
    conversations = json.loads((folder / "messages.json").read_text())
    tokenizer = load_tokenizer(_RECORDED / "tokenizers" / "llama2_json")
    source = (folder / f"{name}.jinja").read_bytes()
    tokenizer.files = tokenizer.files | {"chat_template.jinja": source}
    template = load_chat_template(tokenizer)
    cases = 0
    for key, expected in _recorded("chat", version).items():
      style, conversation, prompt = key.split("/")
      if style != name:
        continue
      cases += 1
      render = functools.partial(
        template.render,
        conversations[conversation],
        add_generation_prompt=prompt == "True",
      )
      if "refused" in expected:
        with self.assertRaises(ValueError) as caught:
          render()
        self.assertEndsWith(str(caught.exception), expected["refused"])
        continue
      text = render()
      self.assertEqual(text, expected["text"], key)
      ids = tokenizer.encode(text, parse_special=True)
      self.assertEqual(ids, expected["ids"], key)
    self.assertEqual(cases, 14)


if __name__ == "__main__":
  absltest.main()
