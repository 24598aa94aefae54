"""Tokenizers, and the files beside them."""

import json

from absl.testing import absltest
from hypothesis import given
from hypothesis import strategies as st

from moh_jax.data import tokenizer_files, tokenizers
from tests.fuzz import hostile

_CONTENT = tokenizers.train_bpe(["a house, a tree"] * 4, 270)
_BESIDE = {
  "tokenizer_config.json": {
    "bos_token": "<|begin_of_text|>",
    "eos_token": {"content": "<|end_of_text|>"},
    "add_bos_token": True,
    "chat_template": "{{ messages }}",
    "added_tokens_decoder": {"0": {"content": "<|begin_of_text|>"}},
  },
  "special_tokens_map.json": {"eos_token": "<|end_of_text|>"},
  "generation_config.json": {"eos_token_id": [1, 0]},
  "config.json": {"eos_token_id": 1},
  "added_tokens.json": {"<x>": 400},
}


class TokenizersTest(hostile.ReaderTest):
  def _read(self):
    found = tokenizers.load_tokenizer(self.folder)
    found.decode(found.encode("a house <|end_of_text|>"))

  def _write(self, content: bytes = _CONTENT):
    (self.folder / "tokenizer.json").write_bytes(content)
    for name, value in _BESIDE.items():
      (self.folder / name).write_text(json.dumps(value))

  @hostile.examples()
  @given(st.data())
  def test_tokenizer_json(self, data):
    self._write(data.draw(hostile.json_files(json.loads(_CONTENT))))
    self.check(self._read)

  @hostile.examples(60)
  @given(st.sampled_from(sorted(_BESIDE)), st.data())
  def test_files_beside_it(self, name, data):
    self._write()
    content = data.draw(hostile.json_files(_BESIDE[name]))
    (self.folder / name).write_bytes(content)
    self.check(self._read)
    self.check(tokenizer_files.read_files_beside, self.folder)


if __name__ == "__main__":
  absltest.main()
