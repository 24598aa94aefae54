"""Begin, end and stops as the files beside a tokenizer say them."""

import json
import pathlib
import tempfile

import tokenizers as hf
from absl.testing import absltest, parameterized

from moh_jax.data import tokenizers
from moh_jax.data.tokenizer_files import copy_tokenizer_files, read_files_beside


def _content(template=None):
  """A tokenizer.json with the ids "a" 0, "<s>" 1, "</s>" 2 and "<e>" 3."""
  made = hf.Tokenizer(hf.models.WordLevel({"a": 0}, unk_token="a"))
  made.add_special_tokens(["<s>", "</s>", "<e>"])
  if template:
    ids = [(token, made.token_to_id(token)) for token in ("<s>", "</s>", "<e>")]
    made.post_processor = hf.processors.TemplateProcessing(
      single=template, special_tokens=ids
    )
  return made.to_str().encode()


def _tokenizer(template=None, **files):
  named = {f"{name}.json": json.dumps(v).encode() for name, v in files.items()}
  return tokenizers.JsonTokenizer(_content(template), named)


class SpecialIdsTest(parameterized.TestCase):
  @parameterized.parameters(
    # Nothing says anything: by name.
    (None, {}, (1, 2, True)),
    # The tokenizer's own file does.
    ("<e>:0 $A:0", {}, (3, 2, True)),
    ("<s>:0 $A:0 <e>:0", {}, (1, 3, True)),
    # tokenizer_config.json says tokens, and the own file where they go.
    (None, {"bos_token": "<s>", "eos_token": "<e>"}, (1, 3, False)),
    ("<s>:0 $A:0", {"bos_token": "<s>", "eos_token": "<e>"}, (1, 3, True)),
    (
      None,
      {"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
      (1, 2, False),
    ),
    (None, {"bos_token": None, "eos_token": "<e>"}, (None, 3, False)),
    (None, {"eos_token": "<e>"}, (None, 3, False)),
    # It says both.
    (None, {"bos_token": "<s>", "add_bos_token": True}, (1, None, True)),
    (
      "<s>:0 $A:0",
      {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
      (1, 2, False),
    ),
    (None, {"bos_token": None, "add_bos_token": True}, (None, None, False)),
    # It names no token.
    (None, {"model_max_length": 8}, (1, 2, False)),
  )
  def test_what_a_file_says_comes_first(self, template, config, expected):
    files = {"tokenizer_config": config} if config else {}
    found = _tokenizer(template, **files)
    self.assertEqual((found.bos_id, found.eos_id, found.add_bos), expected)

  def test_special_tokens_map_speaks_where_the_config_does_not(self):
    found = _tokenizer(
      tokenizer_config={"bos_token": "<s>"},
      special_tokens_map={"bos_token": "<e>", "eos_token": {"content": "<e>"}},
    )
    self.assertEqual((found.bos_id, found.eos_id), (1, 3))

  @parameterized.parameters((0, (0, 2)), ([3, 0, 3], (3, 0, 2)), (None, (2,)))
  def test_stops_are_those_of_generation_and_the_end(self, stored, expected):
    found = _tokenizer(generation_config={"eos_token_id": stored})
    self.assertEqual(found.stop_ids, expected)

  @parameterized.parameters(
    ("tokenizer_config", [], "config.json: must be 'object', not array"),
    ("tokenizer_config", {"bos_token": 3}, "bos_token=3 must be 'str . obj"),
    ("tokenizer_config", {"bos_token": {}}, "bos_token: has no entry 'conten"),
    ("tokenizer_config", {"bos_token": ""}, "bos_token='' must be .* length"),
    ("tokenizer_config", {"add_bos_token": 1}, "add_bos_token=1 must be 'bool"),
    ("tokenizer_config", {"eos_token": "<x>"}, "eos_token='<x>' is no token"),
    ("special_tokens_map", {"eos_token": []}, "eos_token=.. must be 'str . o"),
    ("generation_config", {"eos_token_id": "2"}, "='2' must be 'int . array"),
    (
      "generation_config",
      {"eos_token_id": [2, -1]},
      "1.=-1 must be .* >= 0",
    ),
    ("generation_config", {"eos_token_id": True}, "=True must be 'int . array"),
  )
  def test_damage_is_named(self, name, value, message):
    with self.assertRaisesRegex(ValueError, message):
      _tokenizer(**{name: value})

  def test_ids_beyond_the_model_are_named(self):
    tokenizer = _tokenizer(generation_config={"eos_token_id": [2, 9]})
    tokenizers.check_vocabulary(tokenizer, 10)
    with self.assertRaisesRegex(
      ValueError, "here: generation_config.json: eos_token_id 9 must be below"
    ):
      tokenizers.check_vocabulary(tokenizer, 9, "here")
    with self.assertRaisesRegex(ValueError, "4 ids, more than .*vocab_size=3"):
      tokenizers.check_vocabulary(tokenizer, 3)


class TextFilesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.source = pathlib.Path(root) / "source"
    self.target = pathlib.Path(root) / "target"
    self.source.mkdir()

  def _write(self, **files):
    for name, value in files.items():
      (self.source / f"{name}.json").write_text(json.dumps(value))

  def test_everything_that_belongs_to_a_tokenizer_is_copied(self):
    (self.source / "tokenizer.json").write_bytes(_content())
    self._write(tokenizer_config={}, added_tokens={}, unrelated={})
    (self.source / "chat_template.jinja").write_text("x")
    (self.source / "additional_chat_templates").mkdir()
    (self.source / "additional_chat_templates" / "rag.jinja").write_text("y")
    sha256 = copy_tokenizer_files(self.source, self.target)
    found = tokenizers.load_tokenizer(self.target)
    self.assertEqual(sha256, found.sha256)
    self.assertEqual(
      sorted(found.files),
      [
        "added_tokens.json",
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "tokenizer_config.json",
      ],
    )
    self.assertFalse((self.target / "unrelated.json").exists())

  def test_nothing_is_written_without_a_tokenizer(self):
    self._write(tokenizer_config={})
    self.assertEqual(copy_tokenizer_files(self.source, self.target), "")
    self.assertFalse(self.target.exists())

  @parameterized.parameters(
    (None, [1, 2], [1, 2]), ({"top_p": 0.5}, 7, 7), ({"eos_token_id": 3}, 7, 3)
  )
  def test_stops_of_the_model_stand_in(self, generation, stops, expected):
    if generation is not None:
      self._write(generation_config=generation)
    self._write(config={"eos_token_id": stops})
    files = read_files_beside(self.source)
    made = json.loads(files["generation_config.json"])
    self.assertEqual(made, {**(generation or {}), "eos_token_id": expected})

  def test_damage_names_the_file(self):
    (self.source / "tokenizer.json").write_bytes(_content())
    (self.source / "tokenizer_config.json").write_text("{")
    with self.assertRaisesRegex(
      ValueError, r"source/tokenizer.json: tokenizer_config.json: not valid"
    ):
      tokenizers.load_tokenizer(self.source)


if __name__ == "__main__":
  absltest.main()
