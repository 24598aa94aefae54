"""The language task: its loss, its schedule, its figures and its text."""

import dataclasses
import functools
import math
import pathlib
import tempfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import RotaryConfig, TuneConfig, apply_overrides
from moh_jax.data import sequences
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training import language_modeling
from moh_jax.training.language_modeling import make_loss, top_k_schedule
from moh_jax.training.step import HEAD_LOADS, metric_values
from tests.data import tiny_text, tiny_words
from tests.training import tiny
from tests.training.tiny import make_task

_SCHEDULE = {"top_k_steps": (0, 2), "top_k_values": (3, 2)}


def _batch(config=None, size=4):
  config = config or tiny.llm_config()
  data = sequences.Text(config.data, config.model.vocab_size, "train").stream(0)
  return jax.tree.map(lambda *x: np.stack(x), *[data[i] for i in range(size)])


@functools.cache
def _loss(config):
  loss_fn = make_loss(make_model(config)[0], config)

  @jax.jit
  def call(batch, step):
    params = tiny.random_params(config)
    loss, metrics = loss_fn(params, batch, jax.random.key(0), step)
    return metric_values(metrics) | {"returned": loss}

  return call


def _metrics(config=None, batch=None, step=0):
  config = config or tiny.llm_config()
  metrics = _loss(config)(batch or _batch(config), jnp.int32(step))
  return {
    name: float(value) for name, value in metrics.items() if name != HEAD_LOADS
  }


class LossTest(parameterized.TestCase):
  def test_task_loss_is_the_mean_cross_entropy_of_what_counts(self):
    config, batch = tiny.llm_config(), _batch()
    model, _ = make_model(config)
    logits, aux = jax.jit(model.apply)(
      {"params": tiny.random_params(config)},
      batch["inputs"],
      positions=batch["positions"],
      segments=batch["segments"],
    )
    log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    picked = np.take_along_axis(log_probs, batch["targets"][..., None], -1)
    weights = batch["weights"]
    self.assertLess(weights.sum(), weights.size)  # some documents begin
    expected = -(picked[..., 0] * weights).sum() / weights.sum()
    metrics = _metrics()
    self.assertAlmostEqual(metrics["task_loss"] / expected, 1, places=5)
    balance = float(aux.balance_loss)
    self.assertAlmostEqual(metrics["balance_loss"] / balance, 1, places=5)

  def test_loss_adds_the_weighted_balance_loss(self):
    metrics = _metrics(tiny.llm_config(train={"balance_weight": 0.5}))
    # Every place of the batch counts in the divisor, every target the same.
    share = _batch()["weights"].mean()
    expected = metrics["task_loss"] * share + 0.5 * metrics["balance_loss"]
    self.assertGreater(metrics["balance_loss"], 0.5)
    self.assertAlmostEqual(metrics["loss"] / expected, 1, places=5)
    self.assertEqual(metrics["loss"], metrics["returned"])
    self.assertAlmostEqual(metrics["activated_share"], 0.75, places=6)

  def test_targets_of_weight_zero_do_not_matter(self):
    batch = _batch()
    batch["weights"][:, 5:] = 0
    other = batch | {"targets": batch["targets"].copy()}
    other["targets"][batch["weights"] == 0] = 1
    self.assertEqual(_metrics(batch=batch), _metrics(batch=other))
    batch["weights"] = np.zeros_like(batch["weights"])  # nothing counts
    self.assertTrue(np.isnan(_metrics(batch=batch)["task_loss"]))
    self.assertTrue(np.isfinite(_metrics(batch=batch)["loss"]))

  def test_scheduled_top_k_is_that_of_the_step(self):
    config = tiny.llm_config(tune=_SCHEDULE)
    batch = _batch()
    shares = [_metrics(config, batch, step) for step in (0, 1, 2, 3)]
    shares = [round(m["activated_share"], 5) for m in shares]
    self.assertEqual(shares, [1.0, 1.0, 0.75, 0.75])
    last = _metrics(config, batch, 2)["loss"]
    self.assertAlmostEqual(last / _metrics(batch=batch)["loss"], 1, places=5)


class ScheduleTest(absltest.TestCase):
  def test_values_begin_at_their_steps_in_every_layer(self):
    config = TuneConfig(top_k_steps=(0, 3, 4), top_k_values=(5, 1, 2))
    at = jax.jit(top_k_schedule(config, 3))
    values = [at(jnp.int32(step)) for step in (0, 2, 3, 4, 99)]
    chex.assert_shape(values, (3,))
    chex.assert_type(values, jnp.int32)
    for value, expected in zip(values, (5, 5, 1, 2, 2)):
      np.testing.assert_array_equal(value, expected)
    # Without a schedule the model keeps its own.
    self.assertIsNone(top_k_schedule(TuneConfig(), 3)(jnp.int32(5)))


def _write_sets(root, tokenizer=None):
  """Two sources, of 1 and of 2 documents a shard, with held-out parts."""
  used = tokenizer or tiny_words.tokenizer()
  for seed, name in enumerate(("web", "code")):
    for split, count in (("train", 12), ("val", 3 + 2 * seed)):
      documents = tiny_text.random_documents(2, count, 20, 27, seed=seed)
      tiny_text.write(
        root / name / split, documents, used, gzip_bytes=100, xz_bytes=80
      )


def _word_config(root, **sections):
  data = {
    "source": "tokens",
    "path": str(root),
    "mix": ("web", "code"),
    "ratios": (75.0, 25.0),
    **sections.pop("data", {}),
  }
  return tiny.llm_config(
    data=data, tune=_SCHEDULE, checkpoint={"every": 4}, **sections
  )


class TextTest(parameterized.TestCase):
  """A run on two token sets, and figures of a uniform prediction there."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.sets, cls.workdir = root / "sets", root / "run"
    _write_sets(cls.sets)
    cls.config = _word_config(cls.sets)
    cls.result = tiny.train(cls.config, cls.workdir)
    cls.held_out = sequences.Text(cls.config.data, 60, "val")
    cls.figures = cls._figures()

  def test_rows_have_the_metrics_of_language_and_of_the_mix(self):
    train, val = (tiny.rows(self.workdir, name) for name in ("train", "val"))
    shares = [round(row["activated_share"], 5) for row in train]
    self.assertEqual(shares, [1.0, 1.0, 0.75, 0.75])
    for row in train:
      self.assertEqual(row["mix/web"] + row["mix/code"], 1.0)
    # 8 sequences a step: 32 in all, three quarters of them "web".
    self.assertEqual(train[-1]["mix/web"], 0.75)
    wanted = {"loss", "task_loss", "balance_loss", "lr"}
    self.assertContainsSubset(wanted, train[0])
    wanted = {"bits_per_byte", "perplexity", "accuracy", "gzip_bits_per_byte"}
    self.assertContainsSubset(wanted, val[0])
    self.assertAlmostEqual(self.result.evaluation["activated_share"], 0.75)

  def test_another_tokenizer_is_refused_on_resume(self):
    with tempfile.TemporaryDirectory() as root:
      _write_sets(pathlib.Path(root), tiny_words.tokenizer(("[NEW]",)))
      with self.assertRaisesRegex(
        ValueError, r"holds another run's .*sha256 of the tokenizer: '\w{16}'"
      ):
        tiny.train(_word_config(root), self.workdir)
    content = (self.workdir / "tokenizer.json").read_bytes()
    self.assertEqual(content, tiny_words.tokenizer().content)  # not touched

  @parameterized.parameters(
    ("data", {"ratios": (50.0, 50.0)}, r"data\.ratios: \(50.0, 50.0\) here"),
    ("data", {"mix": ("code", "web")}, r"data\.mix: \('code', 'web'\) here"),
    ("model", {"rope": RotaryConfig(theta=5.0)},
     r"model\.rope\.theta: 5.0 here, 10000.0"),
    ("tune", {"top_k_steps": (0, 3)}, r"tune\.top_k_steps: \(0, 3\) here"),
  )  # fmt: skip
  def test_what_would_change_the_run_is_refused_on_resume(
    self, section, fields, message
  ):
    config = apply_overrides(_word_config(self.sets), section, **fields)
    with self.assertRaisesRegex(ValueError, message):
      tiny.train(config, self.workdir)

  def test_model_must_have_the_tokenizers_ids(self):
    config = _word_config(self.sets, model={"vocab_size": 28})
    with self.assertRaisesRegex(
      ValueError, r"has 29 ids, more .*vocab_size=28"
    ):
      make_task(config)

  @classmethod
  def _figures(cls, examples=0, config=None):
    config = config or cls.config
    config = apply_overrides(config, "eval", examples=examples)
    evaluate = language_modeling.make_evaluate(
      make_model(config)[0], config, Metadata(config)
    )
    params = jax.tree.map(jnp.zeros_like, tiny.random_params(config))
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    with sharding.use_mesh(mesh):
      return evaluate(params, mesh)

  def test_every_token_of_every_document_counts_once(self):
    # A document's begin is read alone; its end is predicted.
    counted = 0
    for seed, count in enumerate((3, 5)):
      for shard in tiny_text.random_documents(2, count, 20, 27, seed=seed):
        counted += sum(len(ids) + 1 for ids in shard)
    self.assertEqual(self.figures["tokens"], counted)
    # And the last sequence of each source is padded.
    self.assertLess(counted, 16 * len(self.held_out))

  def test_uniform_prediction_needs_the_logarithm_of_the_vocabulary(self):
    # A float32 sum of hundreds of nats.
    self.assertAlmostEqual(self.figures["loss"] / math.log(60), 1, places=5)
    self.assertAlmostEqual(self.figures["perplexity"] / 60, 1, places=4)
    bits = math.log2(60) * self.figures["tokens"] / self.held_out.text_bytes
    self.assertAlmostEqual(self.figures["bits_per_byte"] / bits, 1, places=5)
    # 100 and 80 bytes for each of the two held-out sets.
    num_bytes = self.held_out.text_bytes
    for name, size in (("gzip", 200), ("xz", 160)):
      figure = self.figures[f"{name}_bits_per_byte"]
      self.assertAlmostEqual(figure, 8 * size / num_bytes)
    self.assertEqual(self.figures["accuracy"], 1.0)  # ties
    self.assertAlmostEqual(self.figures["activated_share"], 0.75, places=5)

  @parameterized.parameters(1, 5, 6)
  def test_parts_of_a_source_need_the_same_bits_per_byte(self, examples):
    # The last sequence, of which most is padding, is no whole one's text.
    data = {"mix": ("code",), "ratios": (100.0,), "sequence_length": 25}
    config = dataclasses.replace(
      self.config, data=dataclasses.replace(self.config.data, **data)
    )
    self.assertLen(sequences.Text(config.data, 60, "val"), 6)
    whole, part = self._figures(0, config), self._figures(examples, config)
    ratio = part["bits_per_byte"] / whole["bits_per_byte"]
    self.assertAlmostEqual(ratio, 1, places=5)

  def test_first_tokens_that_are_not_predicted_have_no_bytes(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    with self.assertLogs(level="WARNING") as logs:
      _write_sets(root, tiny_text.tokenizer(29, None, None))
    self.assertIn("web/train: the tokenizer has neither begin", logs.output[0])
    for separate, length in ((True, 16), (True, 30), (False, 16)):
      data = {"sequence_length": length, "separate_documents": separate}
      config = _word_config(root, data=data)
      with self.assertLogs(level="WARNING" if separate else "INFO") as logs:
        figures = self._figures(0, config)
      self.assertEqual("never predicted" in "".join(logs.output), separate)
      # Each token of text has two bytes.
      bits = figures["bits_per_byte"] / (math.log2(60) / 2)
      self.assertAlmostEqual(bits, 1, places=5 if separate else 1)

  def test_text_of_which_nothing_is_predicted_is_refused(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    used = tiny_text.tokenizer(29, None, None)
    for name in ("web", "code"):
      tiny_text.write(root / name / "val", [[[3], [4]], [[5]]], used)
    with self.assertRaisesRegex(ValueError, "no token that is predicted"):
      self._figures(0, _word_config(root))
