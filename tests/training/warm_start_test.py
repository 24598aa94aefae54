"""Starting a run from another run's parameters."""

import ast
import dataclasses
import pathlib
import re
import tempfile
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import traverse_util

from moh_jax.config import Config, RotaryConfig, RouterConfig, without_router
from moh_jax.data import sequences
from moh_jax.models.registry import grow_vocabulary, make_model, restack
from moh_jax.runtime import checkpoint, sharding
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.sharding import abstract_on
from moh_jax.training.language_modeling import make_loss
from moh_jax.training.step import metric_values
from moh_jax.training.train import Log, train
from moh_jax.training.warm_start import warm_start
from tests.training import tiny


def _plain(**model) -> Config:
  """The run of the multi-head baseline."""
  config = tiny.llm_config()
  return dataclasses.replace(config, model=without_router(tiny.LLM, **model))


def _flat(params):
  return traverse_util.flatten_dict(params, sep="/")


class WarmStartTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.directory = str(cls.root / "routed")
    cls.stored = cls._save(cls.directory, tiny.llm_config())
    cls.baseline = str(cls.root / "plain")
    cls.stored_baseline = cls._save(cls.baseline, _plain())

  @classmethod
  def _save(cls, directory, config):
    params = tiny.random_params(config)
    checkpoint.save_params(directory, params, checkpoint.Metadata(config))
    return params

  def _start(self, config, mesh=None, source=None):
    """A run of the config that starts from what was saved."""
    train = dataclasses.replace(
      config.train, init_from=source or self.directory
    )
    config = dataclasses.replace(config, train=train)
    mesh = mesh or sharding.make_mesh(tiny.llm_config().mesh, jax.devices()[:1])
    return warm_start(
      Metadata(config), abstract_on(*make_model(config), mesh), mesh
    )

  def _load(self, config, mesh=None, source=None):
    sampled = tiny.random_params(config, seed=1)
    return self._start(config, mesh, source)(sampled), sampled

  def test_same_model_gets_the_stored_parameters(self):
    loaded, _ = self._load(tiny.llm_config())
    chex.assert_trees_all_equal(loaded, self.stored)

  def test_router_that_the_baseline_lacks_is_sampled(self):
    stored = _flat(self.stored_baseline)
    both = self._load(tiny.llm_config(), source=self.baseline)
    loaded, sampled = map(_flat, both)
    self.assertEqual(loaded.keys(), sampled.keys())
    routers = [path for path in loaded if "/router/" in path]
    self.assertLen(routers, 2)
    for path, leaf in loaded.items():
      expected = sampled[path] if path in routers else stored[path]
      np.testing.assert_array_equal(leaf, expected, path)

  def test_router_that_the_model_lacks_is_left_out(self):
    stored = _flat(self.stored)
    loaded, _ = self._load(
      tiny.llm_config(model={"router": RouterConfig("query_norm")})
    )
    for path, leaf in _flat(loaded).items():
      np.testing.assert_array_equal(leaf, stored[path], path)

  def test_vocabulary_is_grown(self):
    loaded, _ = self._load(tiny.llm_config(model={"vocab_size": 70}))
    expected = grow_vocabulary(self.stored, 70)
    chex.assert_trees_all_close(loaded, expected, atol=1e-6)

  def test_layers_are_regrouped(self):
    config = tiny.llm_config(model={"top_k": (1, 3)})
    loaded, _ = self._load(config)
    expected = restack(self.stored, tiny.LLM, config.model)
    chex.assert_trees_all_equal(loaded, expected)

  def test_parameters_lie_on_the_runs_mesh(self):
    config = tiny.llm_config(mesh=tiny.MESH)
    loaded, _ = self._load(config, mesh=sharding.make_mesh(config.mesh))
    kernel = loaded["head"]["kernel"]
    self.assertEqual(tuple(kernel.sharding.spec), (None, ("tensor", "fsdp")))
    chex.assert_trees_all_equal(jax.device_get(loaded), self.stored)

  def test_all_heads_on_continue_the_baseline_exactly(self):
    model = {"router": RouterConfig("query_norm"), "top_k": (3, 3)}
    config = tiny.llm_config(model=model)
    loaded, _ = self._load(config, source=self.baseline)
    data = sequences.Text(config.data, 60, "train").stream(0)
    batch = jax.tree.map(lambda *x: np.stack(x), *[data[i] for i in range(4)])

    def loss(config, params):
      loss_fn = make_loss(make_model(config)[0], config)
      args = (batch, jax.random.key(0), jnp.int32(0))
      values = jax.jit(lambda p: metric_values(loss_fn(p, *args)[1]))(params)
      return values["task_loss"]

    plain = loss(_plain(), self.stored_baseline)
    self.assertEqual(float(loss(config, loaded)), float(plain))

  @parameterized.parameters(
    ({"prediction": "v"}, "prediction: 'v' here, 'epsilon' there"),
    ({"schedule": "cosine"}, "schedule: 'cosine' here, 'linear' there"),
    ({"steps": 60}, "steps: 60 here, 50 there"),
  )
  def test_another_process_is_refused(self, diffusion, message):
    source = str(self.root / f"dit{len(message)}")
    self._save(source, tiny.dit_config())
    with self.assertRaisesRegex(ValueError, rf"diffusion\.{message}"):
      self._start(tiny.dit_config(diffusion=diffusion), source=source)

  def test_another_objective_is_none_of_its_business(self):
    source = str(self.root / "objective")
    self._save(source, tiny.dit_config())
    config = tiny.dit_config(diffusion={"loss_weight": "min_snr"})
    self._start(config, source=source)

  @parameterized.parameters(
    ({"rope": RotaryConfig(theta=500.0)}, r"rope\.theta: 500.0 here"),
    ({"rope": RotaryConfig(scaling="linear")}, r"rope\.scaling: 'linear' here"),
    ({"norm_eps": 1e-3}, r"norm_eps: 0.001 here, 1e-05 there"),
    (
      {"router": RouterConfig(gate_form="paper")},
      r"router\.gate_form: 'paper' here, 'released' there",
    ),
    (
      {"router": RouterConfig(two_stage=False)},
      r"router\.two_stage: False here, True there",
    ),
    (
      {"head_order": ((1, 2, 3, 0),) * 2},
      r"head_order: \(\(1, .* here, \(\) t",
    ),
  )
  def test_other_numbers_without_parameters_are_refused(self, model, message):
    with self.assertRaisesRegex(ValueError, rf"model\.{message}"):
      self._start(tiny.llm_config(model=model))

  @parameterized.parameters(
    ("window", "5", "3"), ("sr_ratios", "(4, 1)", "(2, 1)")
  )
  def test_other_neighbours_are_refused(self, field, here, there):
    source = str(self.root / field)
    self._save(source, tiny.config())
    message = re.escape(f"model.{field}: {here} here, {there} there")
    with self.assertRaisesRegex(ValueError, message):
      model = {field: ast.literal_eval(here)}
      self._start(tiny.config(model=model), source=source)

  @parameterized.parameters("query_norm", "two_stage")
  def test_shared_heads_of_a_baseline_are_chosen_freely(self, kind):
    model = {"head_order": ((1, 2, 3, 0),) * 2}
    router = RouterConfig(kind, two_stage=False)
    self._start(
      tiny.llm_config(model={**model, "router": router}), source=self.baseline
    )
    self._start(_plain(**model))

  def test_another_tokenizer_is_refused_unless_the_vocabulary_grows(self):
    directory = str(self.root / "words")
    config = tiny.llm_config()
    checkpoint.save_params(
      directory,
      self.stored,
      Metadata(config, tokenizer_sha256="a" * 64),
    )
    train = dataclasses.replace(config.train, init_from=directory)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])

    def start(config):
      config = dataclasses.replace(config, train=train)
      ours = Metadata(config, tokenizer_sha256="b" * 64)
      return warm_start(ours, abstract_on(*make_model(config), mesh), mesh)

    with self.assertRaisesRegex(ValueError, "sha256 a{16}, .* with b{16}"):
      start(config)
    with self.assertLogs(level="WARNING"):
      start(tiny.llm_config(model={"vocab_size": 70}))

  def test_another_family_is_refused(self):
    images = str(self.root / "images")
    self._save(images, tiny.config())
    with self.assertRaisesRegex(
      ValueError,
      rf"train\.init_from='{images}' .* 'vit', model\.family='llm'",
    ):
      self._start(tiny.llm_config(), source=images)

  @parameterized.parameters(
    (
      {"mlp_dim": 20},
      r"blocks0/mlp/gate/kernel \(2, 32, 24\), \(2, 32, 20\) needed",
    ),
    ({"vocab_size": 50}, r"embed/embedding \(60, 32\), \(50, 32\) needed"),
    (
      {"qkv_bias": True},
      r"blocks0/attn/q/bias missing, \(2, 1, 4, 8\) needed",
    ),
    ({"tie_embeddings": True}, "head/kernel not used"),
    ({"num_kv_heads": 4}, r"blocks0/attn/qkv/kernel missing"),
    (
      {"num_heads": (4,), "shared_heads": (1,), "top_k": (2,)},
      r"blocks0/attn/kv/kernel \(2, .*\), \(1, .*\) needed.*, and \d+ more",
    ),
  )
  def test_another_shape_is_refused_by_name(self, model, message):
    pattern = f"does not fit the model: .*{message}"
    with self.assertRaisesRegex(ValueError, pattern):
      self._start(tiny.llm_config(model=model))

  def test_missing_checkpoint_is_named(self):
    with self.assertRaisesRegex(FileNotFoundError, "nowhere"):
      self._start(tiny.llm_config(), source=str(self.root / "nowhere"))


class RunTest(absltest.TestCase):
  """A whole run that starts from another."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.source, cls.workdir = root / "source", str(root / "run")
    metadata = checkpoint.Metadata(tiny.llm_config())
    cls.stored = tiny.random_params(tiny.llm_config())
    checkpoint.save_params(cls.source, cls.stored, metadata)
    cls.config = tiny.llm_config(
      train={"init_from": str(cls.source), "steps": 2}
    )
    started = []
    begin = Log.begin

    def keep(log, step, state, stop):
      started.append(jax.device_get((state.step, state.params, state.ema)))
      return begin(log, step, state, stop)

    with mock.patch.object(Log, "begin", keep):
      train(cls.config, cls.workdir, devices=jax.devices()[:1])
    ((cls.step, cls.params, cls.ema),) = started

  def test_begins_at_step_zero_from_the_stored_parameters(self):
    self.assertEqual(int(self.step), 0)
    chex.assert_trees_all_equal(self.params, self.stored)
    chex.assert_trees_all_equal(self.ema, self.stored)

  def test_resumed_run_goes_on_and_does_not_start_anew(self):
    sections = {"train": {"init_from": "/nowhere", "steps": 3}}
    config = tiny.llm_config(**sections)
    resumed = train(config, self.workdir, devices=jax.devices()[:1])
    self.assertEqual(int(resumed.state.step), 3)

  def test_missing_source_is_named_before_any_step(self):
    config = tiny.llm_config(train={"init_from": "/nowhere"})
    workdir = self.create_tempdir().full_path
    with self.assertRaisesRegex(FileNotFoundError, "/nowhere"):
      train(config, workdir, devices=jax.devices()[:1])


if __name__ == "__main__":
  absltest.main()
