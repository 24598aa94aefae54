"""A router of another package, in every family, through the commands."""

import pathlib
import tempfile
from unittest import mock

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import traverse_util

import moh_jax
from docs.examples import my_router  # registers "sigmoid"
from moh_jax.config import registry
from tests.cli import tiny_checkpoint
from tests.cli.tiny_checkpoint import done
from tests.training import tiny


def _config(family):
  router = moh_jax.RouterConfig(kind="sigmoid")
  model = {**tiny.ALIKE[family], "router": router}
  return tiny.CONFIGS[family](model=model, mesh={"data": -1})


class OwnRouterTest(parameterized.TestCase):
  @parameterized.parameters("vit", "dit")
  @pytest.mark.slow
  def test_works_with_the_commands_in_other_families(self, family):
    self.test_works_with_the_commands(family)

  @pytest.mark.integration
  def test_works_with_the_commands(self, family="llm"):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    file = tiny_checkpoint.write_config(
      folder, _config(family), "docs.examples.my_router"
    )
    config, workdir = f"--config={file}", folder / "run"
    for steps in (2, 4):  # from the start, and on from a checkpoint
      last = f"--config.train.steps={steps}"
      done("train", config, f"--workdir={workdir}", last)
    steps = [row["step"] for row in tiny.rows(workdir, "train")]
    self.assertEqual(steps, [1, 2, 3, 4])
    restored = moh_jax.restore(str(workdir), top_k=1)
    self.assertEqual(restored.config.model.router.kind, "sigmoid")
    leaves = traverse_util.flatten_dict(restored.params).items()
    biases = [x for path, x in leaves if {"router", "bias"} <= {*path}]
    self.assertNotEmpty(biases)
    for bias in biases:
      self.assertGreater(float(jnp.abs(bias).max()), 0)
    for command, said in (
      (("evaluate",), "activated_share"),
      (("heads", "--batches", 1), r"(stage1|blocks0)\.1 "),
      (("inspect",), "router: sigmoid"),
    ):
      self.assertRegex(done(*command, "--checkpoint", workdir), said)
    out = done("plan", config, "--topology=v5e-4", "--no-compile")
    self.assertIn("may fit", out)
    self._check_unknown(
      *("export", "--checkpoint", workdir, "--out", folder / "w.safetensors")
    )
    self.assertFalse((folder / "w.safetensors").exists())

  def _check_unknown(self, *argv):
    status, _, err = tiny_checkpoint.call(*argv)
    self.assertEqual(status, 2)
    self.assertIn("router.kind='sigmoid' must be one of ('two_stage', ", err)
    return err

  def test_its_checkpoint_says_what_to_import(self):
    folder = self.enter_context(tempfile.TemporaryDirectory())
    tiny_checkpoint.save_random(folder, _config("vit"))
    kinds = registry.ROUTERS._records
    known = {k: v for k, v in kinds.items() if k != "sigmoid"}
    with mock.patch.dict(kinds, known, clear=True):
      err = self._check_unknown("inspect", "--checkpoint", folder)
    self.assertIn("--import MODULE", err)


class ExampleTest(absltest.TestCase):
  """What docs/extend.md says of its example, and how it tests it."""

  def setUp(self):
    super().setUp()
    self.budget = moh_jax.HeadBudget(6, shared=2, top_k=2, head_dim=4)
    config = moh_jax.RouterConfig(kind="sigmoid")
    self.layer = moh_jax.HeadRouter(self.budget, config)
    self.x = jax.random.normal(jax.random.key(0), (2, 9, 8))
    self.variables = nn.unbox(self.layer.init(jax.random.key(1), self.x))

  def _loss(self, variables):
    return self.layer.apply(variables, self.x)[1].balance_loss

  @pytest.mark.integration
  def test_scores_may_all_underflow(self):
    low = jax.tree.map(lambda leaf: leaf - 1000, self.variables)
    chex.assert_tree_all_finite(jax.value_and_grad(self._loss)(low))

  @pytest.mark.integration
  def test_bias_alone_follows_the_load(self):
    _, aux = self.layer.apply(self.variables, self.x)
    grads = jax.grad(self._loss)(self.variables)
    np.testing.assert_array_equal(grads["params"]["routed"], 0)
    load = np.asarray(aux.load[self.budget.shared :])
    expected = self.budget.routed * (load - load.mean())
    np.testing.assert_allclose(grads["params"]["bias"], expected, atol=1e-6)
    self.assertIs(
      registry.get_router("sigmoid").module, my_router.SigmoidRouter
    )
