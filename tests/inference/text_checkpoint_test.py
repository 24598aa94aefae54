"""Which tokenizer belongs to a checkpoint."""

import hashlib
import io
import pathlib
import shutil
import tempfile

from absl.testing import absltest, parameterized

from moh_jax.data.tokenizers import BytesTokenizer, JsonTokenizer
from moh_jax.inference.restore import load_checkpoint_tokenizer
from moh_jax.runtime import checkpoint
from tests.data import tiny_words
from tests.inference import tiny_writer
from tests.training import tiny


class LoadTokenizerTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    where = self.enterContext(tempfile.TemporaryDirectory())
    self.root = pathlib.Path(where)

    self.other = tiny_words.tokenizer(("[NEW]",))
    self.file = self.root / "tokenizer.json"
    tiny_writer.save_alphabet(self.root)

  def test_finds_the_file_of_the_run_and_refuses_others(self):
    for folder in (self.root, self.root / "checkpoints"):
      tokenizer = load_checkpoint_tokenizer(str(folder))
      self.assertIsInstance(tokenizer, JsonTokenizer)
      self.assertEqual(tokenizer.sha256, tiny_writer.WORDS.sha256)
    self.file.write_bytes(self.other.content)
    ours, theirs = self.other.sha256[:16], tiny_writer.WORDS.sha256[:16]
    with self.assertRaisesRegex(
      ValueError, rf"tokenizer\.json has sha256 {ours}, .* of {theirs}"
    ):
      load_checkpoint_tokenizer(str(self.root))
    self.file.unlink()
    with self.assertRaisesRegex(
      FileNotFoundError, r"holds no tokenizer\.json or tokenizer\.model"
    ):
      load_checkpoint_tokenizer(str(self.root))

  def _save(self, sha256):
    shutil.rmtree(self.root / "checkpoints")
    tiny_writer.save_alphabet(self.root, tokenizer_sha256=sha256)

  def test_bytes_need_no_file(self):
    self._save(BytesTokenizer.sha256)
    tokenizer = load_checkpoint_tokenizer(str(self.root))
    self.assertIsInstance(tokenizer, BytesTokenizer)

  def test_any_file_fits_a_checkpoint_that_knows_of_none(self):
    self._save("")
    self.file.write_bytes(self.other.content)
    tokenizer = load_checkpoint_tokenizer(str(self.root))
    self.assertEqual(tokenizer.sha256, self.other.sha256)

  def test_the_right_file_beside_a_stale_one_with_sentencepiece(self):
    import sentencepiece

    words = [f"{a}{b}" for a in "abcdef" for b in "ghijkl"]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(words),
      model_writer=model,
      vocab_size=30,
      hard_vocab_limit=False,
      minloglevel=2,
    )
    content = model.getvalue()
    sha256 = hashlib.sha256(content).hexdigest()
    self._save(sha256)
    (self.root / "tokenizer.model").write_bytes(content)
    for stale in (self.other.content, b"{}"):
      self.file.write_bytes(stale)
      tokenizer = load_checkpoint_tokenizer(str(self.root))
      self.assertEqual(tokenizer.sha256, sha256)
    (self.root / "tokenizer.model").write_bytes(b"other")
    with self.assertRaisesRegex(
      ValueError, r"tokenizer\.json: not a .*; .*tokenizer\.model: not a"
    ):
      load_checkpoint_tokenizer(str(self.root))

  def test_model_of_another_family_is_refused(self):
    config = tiny.config()
    shutil.rmtree(self.root / "checkpoints")
    checkpoint.save_params(
      self.root, tiny.random_params(config), checkpoint.Metadata(config)
    )
    with self.assertRaisesRegex(ValueError, r"family 'vit'; .* needs 'llm'"):
      load_checkpoint_tokenizer(str(self.root))


if __name__ == "__main__":
  absltest.main()
