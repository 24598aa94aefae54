"""A family of another package, through the commands that all families have."""

import dataclasses
import json
import pathlib
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import moh_jax
from docs.examples.patch_family import PatchConfig, PatchNet
from moh_jax import config as config_lib
from moh_jax.config import registry
from tests.cli import tiny_checkpoint
from tests.cli.tiny_checkpoint import done
from tests.training import tiny


def _config() -> config_lib.Config:
  run = tiny.config(
    data={"batch_size": 64, "augment": "none"},
    optim={"lr": 1e-2, "warmup_steps": None},
    train={"steps": 60},
    mesh={"data": -1},
    checkpoint={"every": 30},
    log={"every": 30},
    classifier={"mixup": 0.0, "cutmix": 0.0},
  )
  return dataclasses.replace(run, model=PatchConfig())


class OwnFamilyTest(tiny_checkpoint.CommandTest):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.shared_folder()
    cls.workdir, module = folder / "run", "docs.examples.patch_family"
    cls.file = tiny_checkpoint.write_config(folder, _config(), module)
    train = ("train", f"--config={cls.file}", f"--workdir={cls.workdir}")
    done(*train, "--config.train.steps=30")
    done(*train, "--json", folder / "metrics.json")
    cls.metrics = json.loads((folder / "metrics.json").read_text())

  def test_trains_and_resumes(self):
    rows = tiny.rows(self.workdir, "train")
    losses = {row["step"]: row["loss"] for row in rows}
    self.assertEqual(list(losses), [30, 60])
    self.assertLess(losses[60], losses[30])
    self.assertGreater(self.metrics["accuracy"], 0.35)  # chance is 0.1
    self.assertEqual(self.metrics["activated_share"], 0.75)

  @pytest.mark.integration
  def test_commands_take_it(self):
    digit = pathlib.Path(__file__).parents[2] / "docs" / "digits" / "3.png"
    modes = r"(?m)^forward  .*\nforward_backward "
    for command, said in (
      ("evaluate", f"accuracy: {self.metrics['accuracy']:.4f}"),
      ("inspect", "activated share: 0.75"),
      ("heads --batches 1", "blocks0.1"),
      (f"classify {digit}", "3.png: "),
    ):
      out = done(*command.split(), "--checkpoint", self.workdir)
      self.assertRegex(out, said)
    changes = "--config.data.batch_size=2", "--rounds", "1"
    out = done("bench", "model", "--config", self.file, *changes)
    self.assertRegex(out, modes)

  @parameterized.parameters(
    ((4, 8), (2, 4)), ((8, 4), (4, 2)), ((6, 10), (3, 5)), ((8, 8), (4, 4))
  )
  def test_maps_have_the_shape_of_the_image(self, size, grid):
    self.assertEqual(PatchConfig(image_size=size).token_grids(), (grid,))

  def test_is_served_with_fewer_heads(self):
    restored = moh_jax.restore(str(self.workdir), top_k=(1, 1))
    self.assertIsInstance(restored.model, PatchNet)
    _, aux = restored.model.apply(
      {"params": restored.params}, jnp.zeros((2, 8, 8, 1))
    )
    np.testing.assert_allclose(aux.activated_share, 0.5)

  @parameterized.parameters(
    ("sample", "grid.png", "family 'patch'; `sample` needs 'dit'"),
    ("export", "x.safetensors", "family='patch' has no public tensor names"),
  )
  @pytest.mark.integration
  def test_commands_that_need_more_say_so(self, command, out, message):
    argv = command, "--checkpoint", self.workdir, "--out", out
    self.assert_refused(message, *argv)

  @pytest.mark.integration
  def test_heads_says_what_the_family_lacks(self):
    plain = moh_jax.Family("patch", PatchConfig, PatchNet, task=None)
    with mock.patch.dict(registry.FAMILIES._records, patch=plain):
      argv = "heads", "--checkpoint", self.workdir
      self.assert_refused("family='patch' has no probe", *argv)


class RegisterTest(parameterized.TestCase):
  @parameterized.parameters(("patch", "vit:Other"), ("vit", PatchConfig))
  def test_a_name_is_taken_once(self, name, model):
    other = moh_jax.Family(name, model, PatchNet, task=None)
    with self.assertRaisesRegex(ValueError, f"name='{name}' is taken"):
      moh_jax.register_family(other)

  def test_a_module_may_be_imported_again(self):
    record = moh_jax.get_family("patch")
    self.assertIs(moh_jax.register_family(record), record)
