"""Runs that train adapters: the base, resuming, meshes, serving, tuning."""

import dataclasses
import pathlib
import shutil
import tempfile

import chex
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax.traverse_util import flatten_dict

from moh_jax.config import LoraConfig, TuneConfig, without_router
from moh_jax.inference.restore import restore
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.train import train
from tests.training import tiny

_LORA = LoraConfig(rank=2, alpha=4.0)
_DENSE = dataclasses.replace(tiny.llm_config(), model=without_router(tiny.LLM))


def _save(folder, config, names=()):
  """Random parameters, as a checkpoint; returns its path."""
  path = str(pathlib.Path(folder, "base"))
  params = tiny.random_params(config)
  checkpoint.save_params(path, params, Metadata(config, names))
  return path


def _tuned(config, base, lora=_LORA, **sections):
  sections.setdefault("train", {})["init_from"] = base
  tuned = {
    name: dataclasses.replace(getattr(config, name), **fields)
    for name, fields in sections.items()
  }
  return dataclasses.replace(config, tune=TuneConfig(lora=lora), **tuned)


class AdaptersRunTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = self.enterContext(tempfile.TemporaryDirectory())

  def _folder(self, name):
    return str(pathlib.Path(self.root, name))

  @parameterized.parameters("float32", "int8")
  def test_a_dense_model_becomes_moh_by_adapters(self, dtype):
    base = _save(self.root, _DENSE)
    before = tiny.random_params(_DENSE)
    lora = dataclasses.replace(_LORA, base_dtype=dtype)
    config = _tuned(tiny.llm_config(), base, lora)
    done = tiny.train(config, self._folder("run"))
    names = {path[-1] for path in flatten_dict(done.state.params)}
    self.assertEqual(names, {"lora_a", "lora_b", "routed", "group"})
    stored = steps.step_folder(self._folder("run"), 4)
    self.assertLess(
      sum(f.stat().st_size for f in pathlib.Path(stored, "params").rglob("*")),
      sum(f.stat().st_size for f in pathlib.Path(base).rglob("params/**/*")),
    )
    served = restore(self._folder("run"))
    self.assertEqual(served.config.tune.lora.rank, 0)
    flat, old = map(flatten_dict, (served.params, before))
    for path, leaf in flat.items():
      if "router" in path:
        continue
      adapted = {"attn", "mlp"} & set(path) and path[-1] == "kernel"
      same = np.allclose(leaf, old[path], rtol=0, atol=1e-7)
      quantized = dtype == "int8" and path[-1] in ("kernel", "embedding")
      self.assertEqual(same, not (adapted or quantized), path)
    # What is served computes as the run did.
    model, tokens = served.model, np.arange(12)[None] % 9
    out, _ = model.apply({"params": served.params}, tokens)
    self.assertTrue(np.isfinite(out).all())

  def test_a_killed_run_goes_on_exactly(self):
    base = _save(self.root, _DENSE)
    lora = dataclasses.replace(_LORA, dropout=0.2)
    config = _tuned(tiny.llm_config(), base, lora)
    whole = tiny.train(config, self._folder("whole"))
    shutil.copytree(self._folder("whole"), self._folder("cut"))
    shutil.rmtree(steps.step_folder(self._folder("cut"), 4))
    again = tiny.train(config, self._folder("cut"))
    chex.assert_trees_all_equal(whole.state, again.state)
    self.assertEqual(whole.evaluation, again.evaluation)

  def test_another_or_no_base_is_refused(self):
    base = _save(self.root, _DENSE)
    config = _tuned(tiny.llm_config(), base)
    run = self._folder("run")
    tiny.train(config, run)
    moved = self._folder("moved")
    shutil.move(base, moved)
    with self.assertRaisesRegex(FileNotFoundError, "init_from=.*name its new"):
      restore(run)
    served = restore(run, changes=[f"train.init_from={moved}"])
    other = tiny.random_params(_DENSE, seed=1)
    checkpoint.save_params(base, other, Metadata(_DENSE))
    with self.assertRaisesRegex(
      ValueError, "holds parameters of hash .* others"
    ):
      restore(run)
    with self.assertRaisesRegex(
      ValueError, "holds parameters of hash .* others"
    ):
      tiny.train(
        dataclasses.replace(
          config, train=dataclasses.replace(config.train, steps=6)
        ),
        run,
      )
    # Adapters on a run with adapters.
    twice = _tuned(tiny.llm_config(), run)
    with self.assertRaisesRegex(ValueError, "holds parameters of hash"):
      tiny.train(twice, self._folder("twice"))
    shutil.rmtree(base)
    shutil.move(moved, base)
    tiny.train(twice, self._folder("twice"))
    second = restore(self._folder("twice"))
    chex.assert_trees_all_equal_shapes(second.params, served.params)

  def test_without_a_base_nothing_is_trained(self):
    config = dataclasses.replace(tiny.llm_config(), tune=TuneConfig(lora=_LORA))
    with self.assertRaisesRegex(ValueError, "rank=2 needs train.init_from"):
      tiny.train(config, self._folder("run"))

  def test_new_classes_are_trained_whole(self):
    names = tuple("abcdefghij")
    base = _save(self.root, tiny.config(), names)
    config = _tuned(tiny.config(), base)
    with self.assertRaisesRegex(
      ValueError, "lacks head/bias, head/kernel: tune"
    ):
      tiny.train(config, self._folder("run"))
    lora = dataclasses.replace(_LORA, whole=("*/router/*", "head/*"))
    done = tiny.train(_tuned(tiny.config(), base, lora), self._folder("run"))
    self.assertIn("head", done.state.params)

  @pytest.mark.slow
  @parameterized.parameters("vit", "dit")
  def test_meshes_of_image_models_equal_one_device(self, family):
    self._compare_mesh(family)

  def test_mesh_equals_one_device(self):
    self._compare_mesh("llm")

  def _compare_mesh(self, family):
    config = tiny.CONFIGS[family]()
    base = _save(self.root, config)
    lora = dataclasses.replace(_LORA, dropout=0.25)
    config = _tuned(config, base, lora)
    tiny.train(config, self._folder("one"))
    mesh = dataclasses.replace(config.mesh, **tiny.MESH)
    train(dataclasses.replace(config, mesh=mesh), self._folder("many"))
    rows = [tiny.rows(self._folder(n), "train") for n in ("one", "many")]
    losses = [[row["loss"] for row in each] for each in rows]
    np.testing.assert_allclose(*losses, rtol=2e-5)


if __name__ == "__main__":
  absltest.main()
