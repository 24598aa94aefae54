"""Direct preference optimization against its formula, term by term."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moh_jax.config import LoraConfig, RouterConfig, TuneConfig
from moh_jax.config.tune import DistillConfig, DpoConfig
from moh_jax.data.conversations import PreferenceSource
from moh_jax.inference.restore import restore
from moh_jax.models.adapters import join, without_adapters
from moh_jax.training.language_modeling import make_objective
from moh_jax.training.train import train
from tests import folders
from tests.data.tiny_chat import write_rows, write_tokenizer
from tests.training import tiny

_BETA = 0.5
_FAST = {"lr": 2e-2, "warmup_steps": 0}
_LORA = LoraConfig(rank=2, alpha=4.0, whole=())
_ROWS = [
  {"prompt": f"one {i}?", "chosen": "two one", "rejected": "three " * (i + 1)}
  for i in range(6)
]


def _config(folder):
  """A run of pairs, whose files it writes."""
  write_tokenizer(folder)
  for split in ("train", "val"):
    write_rows(folder / f"{split}.jsonl", *_ROWS)
  where = {"path": str(folder), "tokenizer_path": str(folder)}
  return tiny.llm_config(
    model={
      "vocab_size": 320,
      "max_length": 128,
      "router": RouterConfig("query_norm"),
    },
    data={"source": "preference", "sequence_length": 64, **where},
    tune={"lora": _LORA, "dpo": DpoConfig(_BETA)},
  )


def _base(folder, config):
  """The model before it is tuned; returns its path."""
  return tiny.save(folder, tiny.llm_config(model=config.model))


class PreferenceTest(folders.FolderTest):
  @pytest.mark.integration
  def test_loss_and_gradients_are_those_of_the_formula(self):
    config = tiny.changed(_config(self.root), model={"loss_chunk": 8})
    net, frozen, begun = tiny.adapted(config)
    trained = jax.tree.map(
      lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), begun
    )
    source = PreferenceSource(config.data, 320, "train")
    rows, batch = [source[0], source[1]], tiny.stacked(source, 2)

    def answer(params, row, segment):
      """Log-probability of one answer, read by itself."""
      place = row["segments"] == segment
      logits, _ = net.apply({"params": params}, row["inputs"][place][None])
      log_probs = jax.nn.log_softmax(logits[0])
      each = jnp.take_along_axis(log_probs, row["targets"][place][:, None], 1)
      return (each[:, 0] * row["weights"][place]).sum()

    def formula(trained):
      joined, losses = join(frozen, trained), []
      base = without_adapters(joined)
      for row in rows:
        better, worse = (
          answer(joined, row, segment) - answer(base, row, segment)
          for segment in (1, 2)
        )
        losses.append(-jax.nn.log_sigmoid(_BETA * (better - worse)))
      return jnp.mean(jnp.stack(losses))

    loss_fn = make_objective(config).loss_fn

    def ours(trained):
      joined = join(frozen, trained)
      loss, metrics = loss_fn(joined, batch, jax.random.key(0), jnp.int32(0))
      balance = config.train.balance_weight * metrics["balance_loss"]
      return loss - balance, metrics

    want, slopes = jax.jit(jax.value_and_grad(formula))(trained)
    both = jax.jit(jax.value_and_grad(ours, has_aux=True))
    (got, metrics), found = both(trained)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    self.assertNotAlmostEqual(float(want), float(np.log(2)), places=2)
    chex.assert_trees_all_close(found, slopes, atol=2e-5, rtol=1e-3)
    mean = metrics["preferred"]
    self.assertIn(mean.total / mean.weight, (0, 0.5, 1))
    # Adapters add nothing yet; the reference has the scheduled heads too.
    scheduled = {"top_k_steps": (0, 2), "top_k_values": (3, 2)}
    loss_fn = make_objective(tiny.changed(config, tune=scheduled)).loss_fn
    args = batch, jax.random.key(0), jnp.int32(0)
    _, metrics = jax.jit(loss_fn)(join(frozen, begun), *args)
    for name, value in (("margin", 0), ("task_loss", np.log(2))):
      np.testing.assert_allclose(metrics[name].total / 2, value, atol=1e-6)

  @pytest.mark.integration
  def test_a_run_learns_what_is_preferred_on_any_devices(self):
    config = _config(self.root)
    start = {"steps": 12, "init_from": _base(self.root, config)}
    config = tiny.changed(config, train=start, optim=_FAST)
    done = tiny.train(config, str(self.root / "one"))
    self.assertIn("bits_per_byte", done.evaluation)
    short = tiny.changed(config, train={"steps": 2}, mesh=tiny.MESH)
    train(short, str(self.root / "mesh"))
    one, mesh = (
      tiny.rows(self.root / name, "train") for name in ("one", "mesh")
    )
    self.assertEqual(one[-1]["preferred"], 1)
    margins = [[row["margin"] for row in rows[:2]] for rows in (one, mesh)]
    np.testing.assert_allclose(*margins, rtol=1e-3, atol=1e-6)
    self.assertGreater(margins[0][-1], 0)
    served = restore(str(self.root / "one"))  # without adapters in its config
    self.assertEqual(served.config.data.source, "preference")

  def test_what_does_not_fit_is_named(self):
    config = _config(self.root)
    with self.assertRaisesRegex(ValueError, "lora.rank=0 must be above 0"):
      tiny.train(tiny.changed(config, tune=TuneConfig()), str(self.root))
    taught = TuneConfig(lora=_LORA, distill=DistillConfig(1.0))
    with self.assertRaisesRegex(ValueError, "distill.weight=1.0 must be 0"):
      tiny.changed(config, tune=taught)
    # Neither the reference nor a teacher may change.
    start = {"init_from": _base(self.root, config)}
    lora = dataclasses.replace(_LORA, whole=("norm/*",))
    text = tiny.llm_config(model=config.model)
    for run, tune in (
      (config, TuneConfig(lora=lora, dpo=DpoConfig(_BETA))),
      (text, TuneConfig(lora=lora, distill=DistillConfig(1.0))),
    ):
      run = tiny.changed(run, train=start, tune=tune)
      with self.assertRaisesRegex(ValueError, "must not name norm/scale"):
        tiny.train(run, str(self.root / "run"))
