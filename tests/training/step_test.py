"""The optimizer step: accumulation, averaging, randomness.

What holds for every family is tested with the one that compiles fastest.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.evaluation.metrics import language_step
from moh_jax.models.registry import make_model
from moh_jax.runtime.batches import shard_batch
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.training import optim
from moh_jax.training.step import Mean, make_program, mean_gradients, train_step
from tests.training import meshes, tiny
from tests.training.tiny import make_task

# Of the tests that leave the config as it is: they share what is compiled.
_CONFIG = tiny.llm_config(optim={"lr": 1e-3, "ema_decay": 0.8})


@functools.cache
def _setup(config=_CONFIG):
  """The run's program, `train_step` with its loss, and its first batch."""
  mesh = make_mesh(config.mesh, jax.devices()[:1])
  task = make_task(config)
  step = functools.partial(
    train_step,
    gradients=functools.partial(mean_gradients, task.loss_fn, 1),
    optimizer=optim.make_optimizer(config.optim, config.train.steps),
    schedule=optim.make_schedule(config.optim, config.train.steps),
  )
  return make_program(config, task, mesh), step, next(task.batches(mesh))


@functools.cache
def _trained_batch():
  """Conversations, as it were: few of their targets are trained, or none."""
  _, _, batch = _setup(tiny.llm_config(data={"batch_size": 32}))
  share = np.random.RandomState(0).uniform(size=(32, 1)) ** 3
  trained = np.random.RandomState(1).uniform(size=(32, 16)) < share
  trained[::4] = False  # the first of four microbatches has none
  return {**batch, "weights": trained * batch["weights"]}


@functools.cache
def _chat_step(axes, accumulation):
  """Loss of a step, that of an evaluation, and the first moments.

  These are the gradients of the step, times a constant.
  """
  config = meshes.config_of(
    mesh=dict(axes), model={"vocab_size": 60}, data={"batch_size": 32},
    train={"balance_weight": 0.0}, optim={"accumulation": accumulation},
  )  # fmt: skip
  mesh, batch = meshes.mesh_of(config), _trained_batch()
  program = make_program(config, make_task(config), mesh)
  with use_mesh(mesh):
    batch = shard_batch(batch, mesh)
    state = program.init()
    evaluate = language_step(make_model(config)[0], config.model)
    mask = shard_batch(np.ones(32, np.float32), mesh)
    sums = evaluate(state.params, {**batch, "mask": mask})
    state, metrics = program.step(state, batch)
  moments = state.opt_state[1][0].mu
  held_out = sums["nats"] / sums["tokens"]
  return jax.device_get((metrics["loss"], held_out, moments))


class StepTest(parameterized.TestCase):
  def test_state_is_as_described_and_averaged_and_the_rate_reported(self):
    program, _, batch = _setup()
    state, rates = program.init(), []
    chex.assert_trees_all_equal_shapes_and_dtypes(state, program.state)
    chex.assert_trees_all_equal(state.params, state.ema)
    mine = jax.device_get(state.params)
    for _ in range(4):
      state, metrics = program.step(state, batch)
      mine = jax.tree.map(
        lambda e, p: 0.8 * e + 0.2 * p, mine, jax.device_get(state.params)
      )
      rates.append(metrics["lr"])
    chex.assert_trees_all_close(state.ema, mine, atol=1e-6)
    np.testing.assert_allclose(rates[:3], [0.0, 5e-4, 1e-3], rtol=1e-6)

  def test_a_step_that_is_skipped_changes_nothing(self):
    optim = {"lr": 1e-3, "ema_decay": 0.8, "skip_nonfinite": 9}
    program, step, batch = _setup(tiny.llm_config(optim=optim))
    step = jax.jit(functools.partial(step, ema_decay=0.8))
    bad = {**batch, "weights": batch["weights"] * np.nan}
    found = []
    for given in ((batch, batch, batch), (batch, batch, bad, batch)):
      state, rates = program.init(), []
      for one in given:
        state, metrics = step(state, one)
        rates.append(metrics["lr"])
      np.testing.assert_allclose(rates, [0.0, 5e-4, 1e-3, 1e-3][: len(given)])
      found.append((state.params, state.ema))
    chex.assert_trees_all_equal(*found)

  @parameterized.parameters(
    ({}, 4), ({"data": 8}, 1), ({"fsdp": 4}, 2),
  )  # fmt: skip
  @pytest.mark.integration
  def test_a_target_weighs_the_same_on_any_devices(self, mesh, accumulation):
    """And the loss is that of an evaluation of the same examples."""
    one, many = _chat_step((), 1), _chat_step(tuple(mesh.items()), accumulation)
    for ours, theirs in zip(*map(jax.tree.leaves, (many, one))):
      scale = np.abs(theirs).max()
      np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * scale)
    np.testing.assert_allclose(many[0], many[1], rtol=1e-6)

  @pytest.mark.integration
  def test_a_metric_is_the_whole_batchs_and_each_microbatch_has_a_key(self):
    program, step, _ = _setup()
    traced = []

    def loss_fn(params, batch, rng, step):
      traced.append(len(batch["label"]))
      value = batch["label"].astype(jnp.float32)
      total = sum(jnp.square(x).sum() for x in jax.tree.leaves(params))
      noise = jax.random.uniform(rng)
      return total, {
        "loss": total,
        "some": Mean(value.sum(), (value > 0).sum()),
        "none": Mean(jnp.zeros(()), jnp.zeros(())),
        "noise": noise,
        "squared": jnp.square(noise),
      }

    gradients = functools.partial(mean_gradients, loss_fn, 2)
    step = functools.partial(step, gradients=gradients)
    # Example i is in microbatch i % 2: one has only the label 0.
    batch = {"label": jnp.arange(16) % 2 * jnp.arange(16)}
    state, metrics = jax.jit(step)(program.init(), batch)
    self.assertEqual(traced, [8])  # once, whatever the microbatches
    self.assertEqual(float(metrics["some"]), 8.0)
    self.assertTrue(np.isnan(metrics["none"]))  # nothing weighs
    variance = metrics["squared"] - jnp.square(metrics["noise"])
    self.assertGreater(float(variance), 1e-4)
    _, other = jax.jit(step)(state, batch)
    self.assertNotEqual(float(metrics["noise"]), float(other["noise"]))
