"""Continue-tuning a multi-head model into MoH, on a real text and small."""

import argparse
import dataclasses
import inspect
import json
import pathlib
import tempfile

import jax
from absl.testing import absltest

from moh_jax.config import RouterConfig, apply_overrides, without_router
from moh_jax.data.tokenize import tokenize
from moh_jax.data.tokenizers import load_tokenizer
from moh_jax.inference.restore import restore
from moh_jax.runtime import sharding
from moh_jax.training.language_modeling import make_evaluate
from tests.training import tiny

_STEPS = 150


class TuningTest(absltest.TestCase):
  def test_loss_jumps_when_the_router_turns_on_and_recovers(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    text, tokens = root / "text.jsonl", root / "tokens"
    parts = inspect.getsource(argparse).split("\ndef ")
    parts = [part[i : i + 800] for part in parts for i in range(0, 8000, 800)]
    text.write_text("".join(json.dumps({"text": p}) + "\n" for p in parts if p))
    tokenize([str(text)], load_tokenizer("bytes"), tokens, held_out=0.2)
    config = tiny.llm_config(
      model={"vocab_size": 257, "max_length": 64, "loss_chunk": 0},
      data={
        "source": "tokens",
        "path": str(tokens),
        "sequence_length": 64,
        "batch_size": 16,
      },
      optim={"lr": 1e-2, "ema_decay": 0.0},
      train={"steps": _STEPS},
      checkpoint={"every": 1000},
    )
    mha = dataclasses.replace(config, model=without_router(config.model))
    before = tiny.train(mha, root / "mha").evaluation
    self.assertEqual(before["activated_share"], 1.0)
    model = {
      "router": RouterConfig("query_norm"),
      "shared_heads": (1, 1),
      "top_k": (1, 1),
    }
    start = {"steps": 60, "init_from": str(root / "mha")}
    config = apply_overrides(mha, "model", **model)
    config = apply_overrides(config, "optim", lr=3e-3)
    config = apply_overrides(config, "train", **start)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    with sharding.use_mesh(mesh):
      restored = restore(str(root / "mha"), mesh=mesh, **model)
      evaluate = make_evaluate(restored.model, restored.config, restored)
      turned_on = evaluate(restored.params, mesh)["loss"]
    tuned = tiny.train(config, root / "half").evaluation["loss"]
    jump = turned_on - before["loss"]
    self.assertGreater(jump, 0.02)
    self.assertLess(tuned - before["loss"], jump / 2)
