"""Continue-tuning a multi-head model into MoH, on a real text and small."""

import argparse
import dataclasses
import inspect
import json
import pathlib
import tempfile

import jax
from absl.testing import absltest

from moh_jax.config import RouterConfig, without_router
from moh_jax.data.tokenize import tokenize
from moh_jax.data.tokenizers import load_tokenizer
from moh_jax.inference.restore import restore
from moh_jax.runtime import sharding
from moh_jax.training.language_modeling import make_evaluate
from moh_jax.training.train import train
from tests.training import tiny

_STEPS = 150


class TuningTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.root = pathlib.Path(folder)
    parts = inspect.getsource(argparse).split("\ndef ")
    parts = [part[i : i + 800] for part in parts for i in range(0, 8000, 800)]
    text = cls.root / "text.jsonl"
    text.write_text("".join(json.dumps({"text": p}) + "\n" for p in parts if p))
    tokenize(
      [str(text)],
      load_tokenizer("bytes"),
      cls.root / "tokens",
      held_out=0.2,
    )
    mha = dataclasses.replace(
      without_router(tiny.LLM), vocab_size=257, max_length=64, loss_chunk=0
    )
    base = tiny.llm_config()
    cls.base = dataclasses.replace(
      base,
      model=mha,
      data=dataclasses.replace(
        base.data,
        source="tokens",
        path=str(cls.root / "tokens"),
        sequence_length=64,
        batch_size=16,
      ),
      optim=dataclasses.replace(base.optim, lr=1e-2, ema_decay=0.0),
      train=dataclasses.replace(base.train, steps=_STEPS),
      checkpoint=dataclasses.replace(base.checkpoint, every=1000),
    )
    cls.before = train(
      cls.base, str(cls.root / "mha"), devices=jax.devices()[:1]
    ).evaluation["loss"]

  def _tuned(self, name, **model):
    """Loss when the router turns on, and after tuning."""
    router = RouterConfig("query_norm")
    changed = dataclasses.replace(self.base.model, router=router, **model)
    config = dataclasses.replace(
      self.base,
      model=changed,
      optim=dataclasses.replace(self.base.optim, lr=3e-3),
      train=dataclasses.replace(
        self.base.train,
        steps=60,
        init_from=str(self.root / "mha"),
      ),
    )
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    with sharding.use_mesh(mesh):
      restored = restore(
        str(self.root / "mha"), mesh=mesh, router=router, **model
      )
      evaluate = make_evaluate(restored.model, restored.config, restored)
      turned_on = evaluate(restored.params, mesh)["loss"]
    result = train(config, str(self.root / name), devices=jax.devices()[:1])
    return turned_on, result.evaluation["loss"]

  def test_loss_jumps_when_the_router_turns_on_and_recovers(self):
    turned_on, tuned = self._tuned("half", shared_heads=(1, 1), top_k=(1, 1))
    jump = turned_on - self.before
    self.assertGreater(jump, 0.02)
    self.assertLess(tuned - self.before, jump / 2)

  def test_all_heads_on_change_nothing(self):
    turned_on, _ = self._tuned("all", shared_heads=(1, 1), top_k=(3, 3))
    self.assertEqual(turned_on, self.before)
