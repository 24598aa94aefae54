import json
import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.config.llm import Sampling
from moh_jax.data.text_files import Prompts
from moh_jax.inference.generate import Generator, complete_file
from tests.data import tiny_words
from tests.inference import tiny_writer

_TEXTS = [
  "".join(tiny_words.WORDS[(i + j) % 26] for j in range(1 + i % 5))
  for i in range(23)
]
_SAMPLING = Sampling(max_new_tokens=4, temperature=2.0, seed=3)


class PromptFileTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    params = tiny_writer.random_params()
    model = tiny_writer.restored(tiny_writer.RANDOM, params)
    cls.generator = Generator(model, tiny_writer.WORDS, batch_size=2)

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.out = self.root / "out.jsonl"

  def _prompts(self, texts=_TEXTS, name="in.jsonl"):
    rows = [json.dumps({"prompt": text, "id": 7}) for text in texts]
    (self.root / name).write_text("\n".join(rows))
    return Prompts(str(self.root / name))

  def _complete(self, out=None, prompts=None, sampling=_SAMPLING, **settings):
    return complete_file(
      self.generator,
      prompts or self._prompts(),
      out or self.out,
      sampling,
      settings=settings,
    )

  def test_lines_are_those_of_one_call(self):
    self.assertEqual(self._complete(), 0)
    rows = [json.loads(line) for line in self.out.read_text().splitlines()]
    whole = self.generator.generate(_TEXTS, _SAMPLING)
    self.assertLen(rows, len(_TEXTS))
    for index, (row, text, completion) in enumerate(zip(rows, _TEXTS, whole)):
      self.assertEqual((row["index"], row["prompt"]), (index, text))
      self.assertEqual(row["text"], completion.text)
      self.assertEqual(tuple(row["tokens"]), completion.tokens)
      self.assertEqual(row["finish_reason"], completion.finish_reason)
      self.assertLen(row["log_probs"], len(row["tokens"]))
    self.assertGreater(len({row["text"] for row in rows}), 15)

  @parameterized.parameters(0, 16, 20)
  def test_a_killed_call_continues_to_the_same_file(self, whole_lines):
    self._complete()
    expected = self.out.read_bytes()
    lines = expected.splitlines(keepends=True)
    self.out.write_bytes(b"".join(lines[:whole_lines]) + lines[0][:9])
    self.assertEqual(self._complete(), whole_lines)
    self.assertEqual(self.out.read_bytes(), expected)
    self.assertEqual(self._complete(), len(_TEXTS))
    self.assertEqual(self.out.read_bytes(), expected)

  def test_lines_appear_before_the_last_chunk(self):
    generate = self.generator.generate

    def fail(chunk, sampling, first):
      if first:
        raise OSError("killed")
      return generate(chunk, sampling, first=first)

    with mock.patch.object(self.generator, "generate", fail):
      with self.assertRaisesRegex(OSError, "killed"):
        self._complete()
    self.assertLen(self.out.read_text().splitlines(), 16)
    self.assertEqual(self._complete(), 16)

  def test_output_of_other_settings_is_refused(self):
    self._complete(checkpoint="a")
    before = self.out.read_bytes()
    other = self._prompts(["xX"], "other.jsonl")
    reseeded = Sampling(4, temperature=2.0, seed=4)
    for message, options in (
      ("prompts: '.*' here, '.*' there", {"prompts": other}),
      ("checkpoint: 'b' here, 'a' there", {"checkpoint": "b"}),
      ("seed: 4 here, 3 there", {"sampling": reseeded}),
    ):
      with self.assertRaisesRegex(ValueError, f"other settings; {message}"):
        self._complete(**{"checkpoint": "a"} | options)
    self.assertEqual(self.out.read_bytes(), before)
    (self.root / "out.jsonl.settings.json").unlink()
    with self.assertRaisesRegex(ValueError, "exists, and no out.jsonl.set"):
      self._complete(checkpoint="a")

  def test_a_prompt_that_is_too_long_leaves_no_file(self):
    with self.assertRaisesRegex(ValueError, "prompt 1 has 101 tokens"):
      self._complete(prompts=self._prompts(["aA", "aA" * 100]))
    self.assertEqual(os.listdir(self.root), ["in.jsonl"])

  @parameterized.parameters(
    ("in.txt", "Hello\n", "in.txt: plain text is not taken .* such as"),
    ("in.jsonl", "Hello\n", "in.jsonl, line 1: not JSON"),
    ("in.jsonl", '{"messages": []}', "line 1: no field 'prompt', found"),
    ("in.jsonl", '{"prompt": 1}', "'prompt' is int, expected text"),
    ("in.jsonl", "\n", "in.jsonl: holds no prompt"),
  )
  def test_what_is_no_prompt_is_named(self, name, content, message):
    (self.root / name).write_text(content)
    with self.assertRaisesRegex(ValueError, message):
      Prompts(str(self.root / name))


if __name__ == "__main__":
  absltest.main()
