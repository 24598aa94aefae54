import functools

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax import config as config_lib
from moh_jax.inference.score import Score, Scorer
from moh_jax.models.registry import make_model
from moh_jax.runtime.mesh import make_mesh
from tests.inference import tiny_text_model, tiny_writer

_CONFIG = tiny_text_model.CONFIG
_LIMIT = _CONFIG.model.max_length


def _scorer(config=_CONFIG, params=None, mesh=None, **options):
  model, _ = make_model(config)
  one = config_lib.MeshConfig(), jax.devices()[:1]
  mesh = mesh or make_mesh(*one)
  params = tiny_text_model.params(config) if params is None else params
  return Scorer(model, params, config.model, mesh=mesh, **options)


@functools.cache
def _log_softmax(config):
  """A function from the tokens of one text to log-probabilities [N, V]."""
  params, (model, _) = tiny_text_model.params(config), make_model(config)

  @jax.jit
  def log_softmax(tokens):
    logits, _ = model.apply({"params": params}, tokens[None])
    return jax.nn.log_softmax(logits[0])

  return log_softmax


def _rows(tokens, config=_CONFIG):
  """Log-probabilities [n, V] after each token, by one program for all n."""
  padded = np.zeros(_LIMIT, np.int32)
  padded[: len(tokens)] = tokens
  return np.asarray(_log_softmax(config)(padded))[: len(tokens)]


def _plain(pairs, config=_CONFIG):
  """Scores from the whole logits of each pair by itself."""
  scores = []
  for context, continuation in pairs:
    ids = [*context, *continuation][-(_LIMIT + 1) :]
    rows = _rows(ids[:-1], config)[-len(continuation) :]
    picked = [rows[i, token] for i, token in enumerate(continuation)]
    greedy = [rows[i].argmax() == t for i, t in enumerate(continuation)]
    scores.append(Score(sum(picked), all(greedy), len(continuation)))
  return scores


def _pairs(lengths, seed=0):
  rng = np.random.RandomState(seed)
  return [
    (rng.randint(0, 256, a).tolist(), rng.randint(0, 256, b).tolist())
    for a, b in lengths
  ]


# Short and long, before and at both bounds of the shapes and of the tail, and
# contexts that lose their beginning.
_LENGTHS = (
  *((1, 1), (5, 3), (9, 16), (9, 17), (9, 18), (31, 1), (32, 1), (33, 1)),
  *((16, 16), (17, 16), (1, 48), (30, 19), (47, 1), (48, 1), (60, 2), (90, 48)),
)


class ScorerTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.scorer = _scorer(batch_size=4)  # its programs are those of many tests

  def _assert_close(self, ours, theirs):
    for our, their in zip(ours, theirs, strict=True):
      self.assertEqual((our.greedy, our.tokens), (their.greedy, their.tokens))
      np.testing.assert_allclose(
        our.log_likelihood, their.log_likelihood, rtol=1e-5, atol=1e-5
      )

  def test_scores_equal_those_of_whole_logits(self):
    pairs = _pairs(_LENGTHS)
    self._assert_close(self.scorer.log_likelihoods(pairs), _plain(pairs))

  @pytest.mark.integration
  def test_batch_size_and_order_change_no_score(self):
    pairs = _pairs([(5, 3), (9, 1), (20, 9), (1, 16), (3, 4)])
    tied = config_lib.apply_overrides(_CONFIG, "model", tie_embeddings=True)
    for config in (_CONFIG, tied):
      scorer = _scorer(config, batch_size=1)
      ours = scorer.log_likelihoods(pairs[::-1])[::-1]
      self._assert_close(ours, _plain(pairs, config))

  @pytest.mark.integration
  def test_padding_changes_no_score_of_dynamic_scaling(self):
    rope = {"scaling": "dynamic", "factor": 4.0, "original_length": 4}
    config = config_lib.apply_overrides(_CONFIG, "model", rope=rope)
    pairs = _pairs([(5, 3), (5, 3), (9, 8), (3, 40)], seed=1)
    scores = _scorer(config, batch_size=4).log_likelihoods(pairs)
    for (context, continuation), score in zip(pairs, scores):
      tokens = np.array([*context, *continuation])
      rows = np.asarray(_log_softmax(config)(tokens[:-1]))
      picked = rows[np.arange(len(context) - 1, len(rows)), continuation]
      self.assertAlmostEqual(score.log_likelihood / picked.sum(), 1, places=5)

  def test_greedy_is_whether_every_token_is_the_most_likely(self):
    context = _pairs([(6, 1)])[0][0]
    written = []
    for _ in range(3):
      written.append(int(_rows(context + written)[-1].argmax()))
    other = [*written[:2], (written[2] + 1) % 264]
    wrong_start = [(written[0] + 1) % 264, *written[1:]]
    scores = self.scorer.log_likelihoods(
      [(context, written), (context, other), (context, wrong_start)]
    )
    self.assertEqual([s.greedy for s in scores], [True, False, False])

  def test_pairs_that_read_the_same_are_kept_apart(self):
    # The same tokens, cut elsewhere; the same pair twice; more choices than a
    # row holds; a choice of the same prefix but another length.
    ids = _pairs([(12, 1)])[0][0]
    pairs = [(ids[:cut], ids[cut:]) for cut in (1, 6, 11)]
    pairs += [pairs[1], (ids[:6], [*ids[6:], 7]), (ids[:6], ids[6:7])]
    pairs += [(ids[:-1], [token]) for token in range(40)]
    self._assert_close(self.scorer.log_likelihoods(pairs), _plain(pairs))

  def test_empty_continuation_is_certain(self):
    for pairs in ([([1], [])], []):
      expected = [Score(0, True, 0)] * len(pairs)
      self.assertEqual(self.scorer.log_likelihoods(pairs), expected)

  def test_pair_that_cannot_be_scored_is_named(self):
    message = "pair 1 has 49 tokens, more than model.max_length=48"
    with self.assertRaisesRegex(ValueError, message):
      self.scorer.log_likelihoods([([1], [1]), ([1], [1] * 49)])

  def test_mesh_shares_batch_and_parameters(self):
    mesh = make_mesh(config_lib.MeshConfig(data=2, fsdp=2, tensor=2))
    split = tiny_writer.restored(_CONFIG, tiny_text_model.params(), mesh)
    pairs = _pairs([(5, 3), (9, 2), (2, 1), (4, 4), (20, 6)])
    scorer = _scorer(params=split.params, batch_size=4, mesh=mesh)
    self._assert_close(scorer.log_likelihoods(pairs), _plain(pairs))
