"""The classification task: its loss."""

import chex
import jax
import numpy as np
from absl.testing import absltest

from tests.training import tiny
from tests.training.tiny import make_task


class LossTest(absltest.TestCase):
  def test_loss_is_task_plus_weighted_balance(self):
    train = {"balance_weight": 0.5}
    plain = {"mixup": 0.0, "cutmix": 0.0}
    config = tiny.config(train=train, classifier=plain)
    rng = np.random.default_rng(3)
    batch = {
      "image": rng.normal(size=(16, 8, 8, 1)).astype(np.float32),
      "label": rng.integers(0, 10, 16, np.int32),
    }
    params = tiny.random_params(config)
    loss, metrics = jax.jit(make_task(config).loss_fn)(
      params, batch, jax.random.key(0), 0
    )
    want = metrics["task_loss"] + 0.5 * metrics["balance_loss"]
    chex.assert_trees_all_close(metrics["loss"], want, rtol=1e-6)
    self.assertEqual(loss, metrics["loss"])
    self.assertGreater(float(metrics["balance_loss"]), 0.5)


if __name__ == "__main__":
  absltest.main()
