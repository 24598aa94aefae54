"""What a checkpoint says of its texts survives training."""

import dataclasses
import json
import pathlib
import tempfile

import jax
import numpy as np
from absl.testing import absltest

from moh_jax.convert.checkpoints import export
from moh_jax.data.token_sets import TokenSet
from moh_jax.data.tokenizers import copy_tokenizer_files, load_tokenizer
from moh_jax.inference.restore import load_checkpoint_tokenizer
from moh_jax.training.train import train
from tests.cli import tiny_checkpoint
from tests.convert import tiny_llm
from tests.data import tiny_text
from tests.training import tiny

_TOKENIZERS = pathlib.Path(__file__).parents[1] / "data/recorded/tokenizers"
_TEMPLATE = "chat_template.jinja"


class SurvivalTest(absltest.TestCase):
  """A Qwen2-like folder: no begin of text, two stops, a template."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.root, cls.source, cls.ours = root, root / "hf", root / "ours"
    model = dataclasses.replace(tiny_llm.MHA, vocab_size=352)
    tiny_llm.write_folder(cls.source, model)
    copy_tokenizer_files(_TOKENIZERS / "qwen2", cls.source)
    (cls.source / _TEMPLATE).write_text("{{ messages[0].content }}")
    config = cls.source / "config.json"
    stops = {"eos_token_id": [340, 342]}
    config.write_text(json.dumps(json.loads(config.read_text()) | stops))
    status, _, err = tiny_checkpoint.call(
      *("convert", "--from", "llama", "--source", cls.source),
      *("--out", cls.ours),
    )
    assert status == 0, err

  def _train(self, name, tokenizer, **options):
    """A run on two splits of a set made with the tokenizer."""
    for split in ("train", "val"):
      folder = self.root / f"{name}_tokens" / split
      tiny_text.write(folder, [[[5, 6] * 90]], tokenizer)
    trained = tiny.llm_config()
    config = dataclasses.replace(
      trained,
      model=dataclasses.replace(tiny_llm.MHA, vocab_size=352),
      data=dataclasses.replace(
        trained.data, source="tokens", path=str(self.root / f"{name}_tokens")
      ),
      train=dataclasses.replace(trained.train, steps=2, **options),
    )
    workdir = self.root / name
    train(config, str(workdir), devices=jax.devices()[:1])
    return workdir

  def test_run_that_starts_from_the_model_keeps_its_files(self):
    # The tokenizer's own file alone, without what lies beside it.
    plain = self.root / "plain"
    plain.mkdir()
    content = (self.source / "tokenizer.json").read_bytes()
    (plain / "tokenizer.json").write_bytes(content)
    workdir = self._train(
      "tuned", load_tokenizer(plain), init_from=str(self.ours)
    )
    kept = load_checkpoint_tokenizer(str(workdir))
    self.assertEqual(kept.stop_ids, (340, 342))
    self.assertFalse(kept.add_bos)
    folder = self.root / "exported"
    export(str(workdir), str(folder))
    exported = load_tokenizer(folder)
    self.assertEqual(exported.stop_ids, kept.stop_ids)
    self.assertIn(_TEMPLATE, exported.files)
    # A run that is started again needs the model no more.
    (workdir / _TEMPLATE).write_text("mine")
    self._train("tuned", load_tokenizer(plain), init_from=str(self.ours))
    self.assertEqual((workdir / _TEMPLATE).read_text(), "mine")

  def test_set_carries_the_files_into_a_new_run(self):
    workdir = self._train("new", load_tokenizer(self.ours))
    kept = load_checkpoint_tokenizer(str(workdir))
    self.assertEqual(kept.stop_ids, (340, 342))
    tokens = TokenSet(self.root / "new_tokens" / "train")
    self.assertIsNone(tokens.metadata["bos_id"])
    # Without a begin of text, the end stands before a document.
    first = tokens.tokens(0, 2)
    np.testing.assert_array_equal(first, [342, 5])

  def test_another_tokenizer_takes_no_files(self):
    (self.root / "other").mkdir()
    other = self.root / "other" / "tokenizer.json"
    other.write_bytes((_TOKENIZERS / "llama3" / "tokenizer.json").read_bytes())
    with self.assertRaisesRegex(ValueError, "the same ids mean other text"):
      self._train("refused", load_tokenizer(other), init_from=str(self.ours))
    self.assertFalse((self.root / "refused" / _TEMPLATE).exists())


if __name__ == "__main__":
  absltest.main()
