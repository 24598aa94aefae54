import dataclasses
import math
import types
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.data.tokenizers import BytesTokenizer
from moh_jax.evaluation import documents


@dataclasses.dataclass
class _Uniform:
  """Finds every one of 256 tokens as likely; windows of two tokens."""

  def __post_init__(self):
    self.sizes = []

  def log_likelihoods(self, pairs, progress):
    del progress
    self.sizes.append(len(pairs))
    return [
      types.SimpleNamespace(log_likelihood=-math.log(256) * len(scored))
      for _, scored in pairs
    ]

  def rolling(self, tokens, prefix_id):
    assert prefix_id == 256
    return [
      (tokens[i - 1 : i], tokens[i : i + 2]) for i in range(0, len(tokens), 2)
    ]


class ScoreDocumentsTest(parameterized.TestCase):
  def test_counts_and_metrics_are_those_of_all_documents(self):
    texts = ["one two\n", "caf\u00e9", ""]
    metrics = documents.score_documents(_Uniform(), BytesTokenizer(), texts)
    nats = 13 * math.log(256)
    self.assertAlmostEqual(metrics.pop("nats"), nats)
    self.assertAlmostEqual(metrics.pop("perplexity"), 256)
    self.assertAlmostEqual(metrics.pop("bits_per_byte"), 8)
    self.assertAlmostEqual(
      metrics.pop("word_perplexity") ** 3, 256**13, delta=1e25
    )
    counts = {"tokens": 13, "bytes": 13, "words": 3, "documents": 3}
    self.assertEqual(metrics, counts)

  def test_long_text_is_scored_in_parts(self):
    scorer = _Uniform()
    with mock.patch.object(documents, "_WINDOWS", 4):
      metrics = documents.score_documents(
        scorer, BytesTokenizer(), ["abcdef", "gh", "ij", "k"]
      )
    self.assertEqual(scorer.sizes, [4, 2])
    self.assertAlmostEqual(metrics["nats"], 11 * math.log(256))

  @parameterized.parameters(([],), ([""],), ([" \n"],))
  def test_nothing_to_score_is_refused(self, texts):
    with self.assertRaisesRegex(ValueError, "the text to score is empty"):
      documents.score_documents(_Uniform(), BytesTokenizer(), texts)

  def test_tokenizer_without_begin_and_end_is_refused(self):
    tokenizer = BytesTokenizer()
    tokenizer.bos_id = tokenizer.eos_id = None
    with self.assertRaisesRegex(ValueError, "neither begin nor end of text"):
      documents.score_documents(_Uniform(), tokenizer, ["a"])


if __name__ == "__main__":
  absltest.main()
