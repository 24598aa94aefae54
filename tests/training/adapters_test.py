"""Runs that train adapters: the base, resuming, meshes, serving, tuning."""

import contextlib
import dataclasses
import os
import pathlib
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from moh_jax.config import (
  DistillConfig,
  LoraConfig,
  RouterConfig,
  TuneConfig,
  without_router,
)
from moh_jax.data import sequences
from moh_jax.inference.restore import restore
from moh_jax.models.adapters import join
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.language_modeling import make_loss
from moh_jax.training.train import train
from tests import folders
from tests.training import tiny

_LORA, _NONE = LoraConfig(rank=2, alpha=4.0), DistillConfig()
_DENSE = tiny.llm_config(model=without_router(tiny.LLM))


def _size(workdir):
  """Bytes of the parameters of checkpoints."""
  files = pathlib.Path(workdir).rglob("params/**/*")
  return sum(file.stat().st_size for file in files)


def _tuned(config, base, lora=_LORA, **train):
  tune = TuneConfig(lora=lora)
  return tiny.changed(config, tune=tune, train={"init_from": base, **train})


class AdaptersRunTest(folders.FolderTest):
  def _folder(self, name):
    return str(self.root / name)

  @pytest.mark.integration
  def test_a_dense_model_becomes_moh_by_adapters(self):
    base = os.path.relpath(tiny.save(self.root, _DENSE))
    before = tiny.random_params(_DENSE)
    lora = dataclasses.replace(_LORA, base_dtype="int8", dropout=0.2)
    config, run = _tuned(tiny.llm_config(), base, lora), self._folder("run")
    done = tiny.train(config, run)
    names = {path[-1] for path in flatten_dict(done.state.params)}
    self.assertEqual(names, {"lora_a", "lora_b", "routed", "group"})
    self.assertLess(_size(steps.step_folder(run, 4)), _size(base))
    served = restore(run)
    self.assertEqual(served.config.tune.lora.rank, 0)
    flat, old = map(flatten_dict, (served.params, before))
    for path in old:  # norms alone are held as they were
      same = np.allclose(flat[path], old[path], rtol=0, atol=1e-7)
      self.assertEqual(same, path[-1] == "scale", path)
    # What is served computes as the run did.
    tokens = np.arange(12)[None] % 9
    out, _ = jax.jit(served.model.apply)({"params": served.params}, tokens)
    self.assertTrue(np.isfinite(out).all())
    # A killed run goes on exactly.
    shutil.rmtree(steps.step_folder(run, 4))
    again = tiny.train(config, run)
    chex.assert_trees_all_equal(done.state, again.state)
    self.assertEqual(done.evaluation, again.evaluation)
    # From another folder too.
    with contextlib.chdir(self.root):
      self.assertTrue(os.path.isabs(restore(run).config.train.init_from))

  @pytest.mark.integration
  def test_another_or_no_base_is_refused(self):
    base = tiny.save(self.root, _DENSE)
    config, run = _tuned(tiny.llm_config(), base), self._folder("run")
    tiny.train(config, run)
    moved = self._folder("moved")
    shutil.move(base, moved)
    with self.assertRaisesRegex(FileNotFoundError, "init_from=.*name its new"):
      restore(run)
    served = restore(run, changes=[f"train.init_from={moved}"])
    other = tiny.random_params(_DENSE, seed=1)
    checkpoint.save_params(base, other, Metadata(_DENSE))
    longer = _tuned(tiny.llm_config(), base, steps=6)
    # Adapters on a run with adapters.
    twice = _tuned(tiny.llm_config(), run)
    for use in (
      lambda: restore(run),
      lambda: tiny.train(longer, run),
      lambda: tiny.train(twice, self._folder("twice")),
    ):
      with self.assertRaisesRegex(ValueError, "holds other parameters"):
        use()
    shutil.rmtree(base)
    shutil.move(moved, base)
    tiny.train(twice, self._folder("twice"))
    second = restore(self._folder("twice"))
    chex.assert_trees_all_equal_shapes(second.params, served.params)

  @pytest.mark.integration
  def test_new_classes_are_trained_whole(self):
    names = tuple("abcdefghij")
    plain = tiny.config(model=tiny.ALIKE["vit"])
    base = tiny.save(self.root, plain, names)
    config = _tuned(plain, base)
    with self.assertRaisesRegex(
      ValueError, "lacks head/bias, head/kernel: tune"
    ):
      tiny.train(config, self._folder("run"))
    lora = dataclasses.replace(_LORA, whole=("*/router/*", "head/*"))
    done = tiny.train(_tuned(plain, base, lora), self._folder("run"))
    self.assertIn("head", done.state.params)

  @pytest.mark.integration
  def test_teacher_is_the_model_without_adapters(self):
    temperature, model = 2.0, {"router": RouterConfig("query_norm")}
    tune = TuneConfig(lora=_LORA, distill=DistillConfig(0.5, temperature, 3))
    config = tiny.llm_config(model=model, tune=tune)
    net, frozen, begun = tiny.adapted(config)
    params = tiny.random_params(config)
    trained = jax.tree.map(lambda x: x + 0.1, begun)
    joined = join(frozen, trained)
    data = sequences.Text(config.data, 60, "train").stream(0)
    batch = tiny.stacked(data, 4)

    def loss(config):
      loss_fn = make_loss(make_model(config)[0], config)

      def of_step(trained, step):
        return loss_fn(join(frozen, trained), batch, jax.random.key(0), step)

      both = jax.jit(jax.value_and_grad(of_step, has_aux=True))
      return lambda step: both(trained, jnp.int32(step))

    (plain, _), before = loss(tiny.changed(config, tune={"distill": _NONE}))(0)
    distilled = loss(config)
    ((taught, metrics), grads), ((off, other), _) = map(distilled, (3, 4))
    np.testing.assert_allclose(off, plain, rtol=1e-6)
    self.assertEqual(float(other["distill_loss"].weight), 0)
    plain_model = without_router(config.model)
    dense, _ = make_model(tiny.changed(config, model=plain_model))
    places = {name: batch[name] for name in ("positions", "segments")}
    ours, theirs = (
      jax.nn.log_softmax(
        jax.jit(one.apply)({"params": tree}, batch["inputs"], **places)[0]
        / temperature
      )
      for one, tree in ((net, joined), (dense, params))
    )
    each = (jnp.exp(theirs) * (theirs - ours)).sum(-1) * temperature**2
    weights = batch["weights"]
    want = (each * weights).sum() / weights.sum()
    np.testing.assert_allclose(taught - plain, 0.5 * want, rtol=2e-4)
    mean = metrics["distill_loss"]
    np.testing.assert_allclose(mean.total / mean.weight, want, rtol=1e-5)
    # Gradients come through the student alone.
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), grads, before)
    self.assertGreater(min(jax.tree.leaves(moved)), 0)

  @pytest.mark.integration
  def test_mesh_equals_one_device(self):
    config = tiny.llm_config(optim={"lr": 1e-3})
    lora = dataclasses.replace(_LORA, dropout=0.25)
    config = _tuned(config, tiny.save(self.root, config), lora)
    one, many = self._folder("one"), self._folder("many")
    tiny.train(config, one)
    train(tiny.changed(config, mesh=tiny.MESH), many)
    losses = map(tiny.losses, (one, many))
    np.testing.assert_allclose(*losses, rtol=2e-5)
