"""The language task: its loss, its schedule, its figures and its text."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

from moh_jax.config import TuneConfig, apply_overrides
from moh_jax.data import sequences
from moh_jax.models.registry import make_model
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.mesh import use_mesh
from moh_jax.training import language_modeling
from moh_jax.training.language_modeling import make_loss, top_k_schedule
from moh_jax.training.step import HEAD_LOADS, metric_values
from tests import folders
from tests.data import tiny_text, tiny_words
from tests.training import meshes, tiny

_SCHEDULE = {"top_k_steps": (0, 2), "top_k_values": (3, 2)}
_CONFIG = tiny.llm_config(train={"balance_weight": 0.5})


def _batch():
  data = sequences.Text(_CONFIG.data, 60, "train").stream(0)
  return tiny.stacked(data, 4)


@jax.jit
def _loss(batch):
  loss_fn = make_loss(make_model(_CONFIG)[0], _CONFIG)
  params = tiny.random_params(_CONFIG)
  loss, metrics = loss_fn(params, batch, jax.random.key(0), 0)
  metrics.pop(HEAD_LOADS)
  return metric_values(metrics) | {"returned": loss}


def _metrics(batch):
  return jax.tree.map(float, _loss(batch))


class LossTest(absltest.TestCase):
  def test_loss_is_the_cross_entropy_plus_the_weighted_balance_loss(self):
    batch, (model, _) = _batch(), make_model(_CONFIG)
    params = tiny.random_params(_CONFIG)
    log_probs, aux = tiny.all_log_probs(model, params, batch)
    picked = np.take_along_axis(log_probs, batch["targets"][..., None], -1)
    weights = batch["weights"]
    self.assertLess(weights.sum(), weights.size)  # some documents begin
    nats = -(picked[..., 0] * weights).sum() / weights.sum()
    balance, metrics = float(aux.balance_loss), _metrics(batch)
    loss = nats + 0.5 * balance
    expected = {
      **{"task_loss": nats, "balance_loss": balance, "activated_share": 0.75},
      **{"loss": loss, "returned": loss},
    }
    found = {name: metrics[name] for name in expected}
    chex.assert_trees_all_close(found, expected, rtol=1e-5)
    nothing = {"weights": np.zeros_like(weights)}
    self.assertTrue(np.isfinite(_metrics(batch | nothing)["loss"]))

  def test_values_begin_at_their_steps_in_every_layer(self):
    config = TuneConfig(top_k_steps=(0, 3, 4), top_k_values=(5, 1, 2))
    at = top_k_schedule(config, 3)
    for step, expected in ((0, 5), (2, 5), (3, 1), (4, 2), (99, 2)):
      chex.assert_trees_all_equal(at(step), jnp.full(3, expected, jnp.int32))


def _write_sets(root, tokenizer=None):
  """Two sources, of 1 and of 2 documents a shard, with held-out parts."""
  used = tokenizer or tiny_words.tokenizer()
  for seed, name in enumerate(("web", "code")):
    for split, count in (("train", 12), ("val", 3 + 2 * seed)):
      documents = tiny_text.random_documents(2, count, 20, 27, seed=seed)
      tiny_text.write(root / name / split, documents, used)


def _word_config(root, **data):
  mix = {"mix": ("web", "code"), "ratios": (75.0, 25.0)}
  return tiny.llm_config(
    data={"source": "tokens", "path": str(root), **mix, **data},
    tune=_SCHEDULE,
    checkpoint={"every": 4},
  )


class TextTest(folders.FolderTest):
  """A run on two token sets, and figures of a uniform prediction there."""

  def setUp(self):
    super().setUp()
    _write_sets(self.root / "sets")
    self.config = _word_config(self.root / "sets")

  @pytest.mark.integration
  def test_run_has_metrics_of_language_and_keeps_its_text(self):
    workdir = self.root / "run"
    result = tiny.train(self.config, workdir)
    train, val = (tiny.rows(workdir, name) for name in ("train", "val"))
    shares = [round(row["activated_share"], 5) for row in train]
    self.assertEqual(shares, [1.0, 1.0, 0.75, 0.75])
    wanted = {"bits_per_byte", "perplexity", "accuracy"}
    self.assertContainsSubset(wanted, val[0])
    self.assertAlmostEqual(result.evaluation["activated_share"], 0.75)
    others = self.root / "others"
    _write_sets(others, tiny_words.tokenizer(("[NEW]",)))
    config = _word_config(others, ratios=(50.0, 50.0))
    with self.assertRaisesRegex(
      ValueError, r"another run's .*sha256 of the tokenizer"
    ):
      tiny.train(config, workdir)
    content = (workdir / "tokenizer.json").read_bytes()
    self.assertEqual(content, tiny_words.tokenizer().content)  # not touched

  def _figures(self, config, examples=0):
    config = apply_overrides(config, "eval", examples=examples)
    evaluate = language_modeling.make_evaluate(
      make_model(config)[0], config, Metadata(config)
    )
    params = jax.tree.map(jnp.zeros_like, tiny.random_params(config))
    mesh = meshes.mesh_of(config)
    with use_mesh(mesh):
      return evaluate(params, mesh)

  def test_uniform_prediction_needs_the_logarithm_of_the_vocabulary(self):
    held_out = sequences.Text(self.config.data, 60, "val")
    # A document's begin is read alone; its end is predicted.
    tokens = sum(
      len(ids) + 1
      for seed, count in enumerate((3, 5))
      for shard in tiny_text.random_documents(2, count, 20, 27, seed=seed)
      for ids in shard
    )
    self.assertLess(tokens, 16 * len(held_out))  # last sequences are padded
    size = held_out.bytes_of(np.arange(len(held_out)))
    expected = {
      "tokens": tokens,
      "loss": math.log(60),
      "perplexity": 60,
      "bits_per_byte": math.log2(60) * tokens / size,
      "accuracy": 1.0,  # ties
      "activated_share": 0.75,
    }
    figures = self._figures(self.config)  # of a float32 sum of many nats
    chex.assert_trees_all_close(figures, expected, rtol=5e-5, atol=0)
    # What compare counts with must be written as JSON.
    self.assertContainsSubset(set(map(type, figures.values())), {int, float})

  def test_parts_of_a_source_need_the_same_bits_per_byte(self):
    # The last sequence, of which most is padding, is no whole one's text.
    data = {"mix": ("code",), "ratios": (100.0,), "sequence_length": 25}
    config = apply_overrides(self.config, "data", **data)
    self.assertLen(sequences.Text(config.data, 60, "val"), 6)
    whole, part = (
      self._figures(config, examples)["bits_per_byte"] for examples in (0, 5)
    )
    np.testing.assert_allclose(part, whole, rtol=1e-5)

  def test_first_tokens_that_are_not_predicted_have_no_bytes(self):
    root, used = self.root / "no_begin", tiny_text.tokenizer(29, None, None)
    _write_sets(root, used)
    for separate in (True, False):
      config = _word_config(root, separate_documents=separate)
      # Each token of text has two bytes.
      bits = self._figures(config)["bits_per_byte"] / (math.log2(60) / 2)
      self.assertAlmostEqual(bits, 1, places=5 if separate else 1)
    for name in ("web", "code"):
      split = self.root / "nothing" / name / "val"
      tiny_text.write(split, [[[3], [4]], [[5]]], used)
    with self.assertRaisesRegex(ValueError, "no token that is predicted"):
      self._figures(_word_config(self.root / "nothing"))
