"""The optimizer step: accumulation, averaging, randomness."""

import functools

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest

from moh_jax.training import optim, sharding
from moh_jax.training.state import make_state
from moh_jax.training.step import jit_train_step, train_step
from moh_jax.training.tasks import make_task
from tests.training import tiny

_PLAIN = {"mixup": 0.0, "cutmix": 0.0, "balance_weight": 0.0}


@functools.cache
def _batch() -> dict[str, jax.Array]:
  key = jax.random.key(3)
  return {
    "image": jax.random.normal(key, (16, 8, 8, 1)),
    "label": jax.random.randint(key, (16,), 0, 10),
  }


def _setup(config, **options):
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  optimizer = optim.make_optimizer(config.optim, config.train.steps)
  task = make_task(config)
  init, abstract = make_state(
    task.model, task.inputs, optimizer, mesh, seed=0,
    keep_ema=config.optim.ema_decay > 0,
  )  # fmt: skip
  step = functools.partial(
    train_step,
    loss_fn=task.loss_fn,
    optimizer=optimizer,
    schedule=optim.make_schedule(config.optim, config.train.steps),
    ema_decay=config.optim.ema_decay,
    **options,
  )
  return init, abstract, step


class StepTest(absltest.TestCase):
  def test_abstract_state_describes_the_initial_one(self):
    init, abstract, _ = _setup(tiny.config(optim={"ema_decay": 0.5}))
    state = init()
    chex.assert_trees_all_equal_shapes_and_dtypes(state, abstract)
    chex.assert_trees_all_equal(state.params, state.ema)

  def test_microbatches_give_the_whole_batchs_step(self):
    config = tiny.config(train=_PLAIN, model={"drop_path": 0.0})
    init, _, step = _setup(config)
    whole, metrics = jax.jit(step)(init(), _batch())
    parts_step = functools.partial(step, accumulation=4)
    parts, parts_metrics = jax.jit(parts_step)(init(), _batch())
    # The balance loss is a product of means over each microbatch by itself.
    parts_metrics.pop("balance_loss"), metrics.pop("balance_loss")
    chex.assert_trees_all_close(parts_metrics, metrics, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(parts.params, whole.params, atol=2e-4)

  def test_average_equals_a_hand_rolled_one_over_ten_steps(self):
    config = tiny.config(optim={"ema_decay": 0.8}, train={"steps": 10})
    init, _, step = _setup(config)
    step, state = jax.jit(step), init()
    mine = state.params
    for _ in range(10):
      state, _ = step(state, _batch())
      mine = jax.tree.map(lambda e, p: 0.8 * e + 0.2 * p, mine, state.params)
    chex.assert_trees_all_close(state.ema, mine, atol=1e-6)

  def test_random_choices_differ_between_steps(self):
    config = tiny.config(
      optim={"lr": 0.0, "weight_decay": 0.0, "warmup_steps": 0}
    )
    init, _, step = _setup(config)
    step = jax.jit(step)
    state, first = step(init(), _batch())
    _, second = step(state, _batch())
    self.assertNotEqual(float(first["loss"]), float(second["loss"]))

  def test_state_is_donated(self):
    init, _, step = _setup(tiny.config())
    state = init()
    jit_train_step(**step.keywords)(state, _batch())
    self.assertTrue(state.params["head"]["kernel"].is_deleted())

  def test_loss_is_task_plus_weighted_balance(self):
    config = tiny.config(train={**_PLAIN, "balance_weight": 0.5})
    init, _, step = _setup(config)
    _, metrics = jax.jit(step)(init(), _batch())
    want = metrics["task_loss"] + 0.5 * metrics["balance_loss"]
    chex.assert_trees_all_close(metrics["loss"], want, rtol=1e-6)
    self.assertGreater(float(metrics["balance_loss"]), 0.5)

  def test_reported_rate_is_the_schedules(self):
    config = tiny.config(optim={"lr": 1e-3, "warmup_steps": 2})
    init, _, step = _setup(config)
    state, first = jax.jit(step)(init(), _batch())
    _, second = jax.jit(step)(state, _batch())
    rates = jnp.stack([first["lr"], second["lr"]])
    chex.assert_trees_all_close(rates, jnp.array([0.0, 5e-4]), rtol=1e-6)

  def test_a_metric_without_value_in_a_microbatch_is_left_out_of_its_mean(self):
    config = tiny.dit_config()
    init, _, step = _setup(config, accumulation=2)

    def loss_fn(params, batch, rng, step):
      value = batch["label"].astype(jnp.float32).mean()
      missing = jnp.where(value > 0, value, jnp.nan)
      total = sum(jnp.square(x).sum() for x in jax.tree.leaves(params))
      return total, {"loss": total, "sometimes": missing}

    step = functools.partial(step, loss_fn=loss_fn)
    # Example i is in microbatch i % 2: one has the label 0, the other 6.
    batch = {"label": jnp.arange(16) % 2 * 6}
    _, metrics = jax.jit(step)(init(), batch)
    self.assertEqual(float(metrics["sometimes"]), 6.0)


if __name__ == "__main__":
  absltest.main()
