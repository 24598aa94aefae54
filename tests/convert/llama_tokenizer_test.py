"""The tokenizer of a language model on the way in and out."""

import dataclasses
import hashlib
import json
import logging
import os
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.data.tokenizer_files import BEGIN, END
from moh_jax.data.tokenizers import train_bpe
from moh_jax.inference.text_checkpoint import load_checkpoint_tokenizer
from moh_jax.runtime import checkpoint
from tests.convert import folder_case, tiny_llm

_TOKENIZER = train_bpe(["one text", "and another one"], 270)
_WITH_TEXT = dataclasses.replace(tiny_llm.MHA, vocab_size=270)


class TokenizerTest(folder_case.FolderCase):
  def _source_with(self, **files):
    tiny_llm.write_folder(self.source, _WITH_TEXT)
    for name, content in files.items():
      (self.source / name.replace("__", ".")).write_bytes(content)

  def test_comes_along_there_and_back(self):
    self._source_with(tokenizer__json=_TOKENIZER, tokenizer_config__json=b"{}")
    self._convert()
    self.assertEqual((self.out / "tokenizer.json").read_bytes(), _TOKENIZER)
    metadata, _ = checkpoint.read_metadata(str(self.out))
    digest = hashlib.sha256(_TOKENIZER).hexdigest()
    self.assertEqual(metadata.tokenizer_sha256, digest)
    folder = self._export()
    self.assertEqual((folder / "tokenizer.json").read_bytes(), _TOKENIZER)
    self.assertEqual((folder / "tokenizer_config.json").read_bytes(), b"{}")
    stored = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads(_TOKENIZER)["model"]["vocab"]
    self.assertEqual(stored["bos_token_id"], vocabulary[BEGIN])
    self.assertEqual(stored["eos_token_id"], vocabulary[END])

  def test_stops_and_templates_come_along_there_and_back(self):
    self._source_with(tokenizer__json=_TOKENIZER, chat_template__jinja=b"x")
    config = self.source / "config.json"
    stored = json.loads(config.read_text()) | {"eos_token_id": [1, 5]}
    config.write_text(json.dumps(stored))
    self._convert()
    folder = self._export()
    self.assertEqual((folder / "chat_template.jinja").read_bytes(), b"x")
    generation = json.loads((folder / "generation_config.json").read_text())
    self.assertEqual(generation, {"eos_token_id": [1, 5]})
    tokenizer = load_checkpoint_tokenizer(str(self.out))
    self.assertEqual(tokenizer.stop_ids, (1, 5))

  @parameterized.parameters(
    ("tokenizer_config__json", b'{"bos_token": 3}', "bos_token=3 must be"),
    ("tokenizer_config__json", b"{", "tokenizer_config.json: not valid JSON"),
    ("generation_config__json", b'{"eos_token_id": 300}', "token_id 300 must"),
  )
  def test_damaged_file_is_named_and_nothing_written(
    self, name, content, message
  ):
    self._source_with(tokenizer__json=_TOKENIZER, **{name: content})
    with self.assertRaisesRegex(ValueError, message):
      self._convert()
    self.assertFalse(self.out.exists())

  def test_tokenizer_with_too_many_ids_is_refused(self):
    content = train_bpe(["the quick brown fox jumps " * 9], 271)
    self._source_with(tokenizer__json=content)
    with self.assertRaisesRegex(ValueError, "ids, more than model.vocab_size"):
      self._convert()
    self.assertFalse(self.out.exists())

  def test_one_that_cannot_be_read_is_copied_all_the_same(self):
    self._source_with(tokenizer__model=b"not a model")
    self._convert()
    folder = self._export()
    self.assertEqual((folder / "tokenizer.model").read_bytes(), b"not a model")
    stored = json.loads((folder / "config.json").read_text())
    self.assertIsNone(stored["eos_token_id"])

  def test_a_kill_leaves_no_part_of_it(self):
    self._source_with(tokenizer__json=_TOKENIZER)
    with (
      mock.patch.object(os, "replace", side_effect=KeyboardInterrupt),
      self.assertRaises(KeyboardInterrupt),
    ):
      self._convert()
    self.assertEmpty(list(self.out.iterdir()))
    self._convert()
    self.assertEqual((self.out / "tokenizer.json").read_bytes(), _TOKENIZER)

  def test_absence_is_said_and_no_obstacle(self):
    self._source_with()
    with self.assertLogs(level=logging.WARNING) as logs:
      self._convert()
    self.assertRegex(" ".join(logs.output), "hf has no tokenizer.json or")
    metadata, _ = checkpoint.read_metadata(str(self.out))
    self.assertEqual(metadata.tokenizer_sha256, "")
    folder = self._export()
    names = sorted(path.name for path in folder.iterdir())
    self.assertEqual(names, ["README.md", "config.json", "model.safetensors"])


if __name__ == "__main__":
  absltest.main()
