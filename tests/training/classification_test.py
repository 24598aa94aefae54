"""The classification task: its targets, mixed images and loss."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import ClassifierConfig
from moh_jax.training.classification import mix_images
from tests.training import tiny
from tests.training.tiny import make_task

# Example i is an image of constant value i and of class i, so that a mixed
# image shows how much of which example it holds.
_BATCH = 4
_SIZE = (8, 12)
_VALUES = np.arange(_BATCH, dtype=np.float32)
_IMAGES = np.broadcast_to(_VALUES[:, None, None, None], (_BATCH, *_SIZE, 1))


@functools.cache
def _mix(draws=32, **fields):
  """Mixed images [draws, B, X, Y, 1] and targets [draws, B, B]."""
  config = ClassifierConfig(**fields)
  keys = jax.random.split(jax.random.key(0), draws)
  images, targets = jnp.array(_IMAGES), jnp.eye(_BATCH)
  mix = jax.vmap(lambda key: mix_images(key, images, targets, config))
  return jax.tree.map(np.asarray, jax.jit(mix)(keys))


def _own_share(images):
  """Per image, the mean share of its own value rather than its mirror's."""
  own = _VALUES.reshape(-1, 1, 1, 1)
  mirror = own[::-1]
  return ((images - mirror) / (own - mirror)).mean((-3, -2, -1))


class MixImagesTest(parameterized.TestCase):
  @parameterized.parameters((0.8, 0.0), (0.0, 1.0), (0.8, 1.0))
  def test_targets_weigh_what_the_pixels_show(self, mixup, cutmix):
    images, targets = _mix(mixup=mixup, cutmix=cutmix)
    share = _own_share(images)[..., None]  # [draws, B, 1]
    own = np.eye(_BATCH)
    expected = own * share + own[::-1] * (1 - share)
    np.testing.assert_allclose(targets, expected, atol=1e-5)
    self.assertGreater(np.ptp(share), 0.5)  # not always the same mixture
    # The batch shares one sample.
    np.testing.assert_allclose(np.ptp(share, axis=1), 0, atol=1e-5)

  def test_alphas_of_zero_change_nothing(self):
    images, targets = _mix(draws=1)
    chex.assert_trees_all_equal((images[0], targets[0]), (_IMAGES, np.eye(4)))

  @parameterized.parameters((0.0, 1.0, 1.0), (0.5, 0.25, 0.75), (1.0, 0.0, 0.2))
  def test_cutmix_prob_chooses_between_both(self, prob, low, high):
    images, _ = _mix(mixup=0.8, cutmix=1.0, cutmix_prob=prob, draws=128)
    # A box may be empty or whole, which leaves a constant image too.
    constant = (np.ptp(images, axis=(-3, -2, -1)) < 1e-5).all(-1)
    self.assertBetween(constant.mean(), low, high)

  def test_cutmix_pastes_one_box(self):
    images, _ = _mix(cutmix=1.0)
    pasted = ~np.isclose(images[:, 0, ..., 0], _VALUES[0])
    for mask in pasted:
      rows, columns = mask.any(1), mask.any(0)
      np.testing.assert_array_equal(mask, np.outer(rows, columns))
      for edge in (rows, columns):
        self.assertLessEqual(np.abs(np.diff(edge.astype(int))).sum(), 2)


class LossTest(absltest.TestCase):
  def test_loss_is_the_cross_entropy_plus_the_weighted_balance_loss(self):
    config = tiny.deterministic_config(
      model=tiny.ALIKE["vit"],
      train={"balance_weight": 0.5},
      classifier={"label_smoothing": 0.2},
    )
    rng = np.random.default_rng(3)
    images = rng.normal(size=(16, 8, 8, 1)).astype(np.float32)
    labels = rng.integers(0, 10, 16, np.int32)
    params, task = tiny.random_params(config), make_task(config)
    loss, metrics = jax.jit(task.loss_fn)(
      params, {"image": images, "label": labels}, jax.random.key(0), 0
    )
    logits, aux = jax.jit(task.model.apply)({"params": params}, images)
    logp = np.float64(jax.nn.log_softmax(logits))
    targets = 0.8 * np.eye(10)[labels] + 0.02
    expected = -(targets * logp).sum(-1).mean()
    self.assertAlmostEqual(float(metrics["task_loss"]) / expected, 1, places=5)
    total = expected + 0.5 * float(aux.balance_loss)
    self.assertAlmostEqual(float(loss) / total, 1, places=5)
    self.assertEqual(loss, metrics["loss"])
    accuracy = (logits.argmax(-1) == labels).mean()
    self.assertAlmostEqual(metrics["accuracy"], accuracy, places=6)
