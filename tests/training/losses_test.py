import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized

from moh_jax.config import ClassifierConfig
from moh_jax.training.classification import (
  class_targets,
  mix_images,
  soft_cross_entropy,
)

# Example i is an image of constant value i and of class i, so that a mixed
# image shows how much of which example it holds.
_BATCH = 4
_SIZE = (8, 12)
_VALUES = np.arange(_BATCH, dtype=np.float32)
_IMAGES = np.broadcast_to(_VALUES[:, None, None, None], (_BATCH, *_SIZE, 1))


@functools.cache
def _mix(config, draws=32, batch=_BATCH):
  """Mixed images [draws, B, X, Y, 1] and targets [draws, B, B]."""
  keys = jax.random.split(jax.random.key(0), draws)
  images, targets = jnp.array(_IMAGES[:batch]), jnp.eye(batch)
  mix = jax.vmap(lambda key: mix_images(key, images, targets, config))
  return jax.tree.map(np.asarray, jax.jit(mix)(keys))


def _own_share(images):
  """Per image, the mean share of its own value rather than its mirror's."""
  own = _VALUES.reshape(-1, 1, 1, 1)
  mirror = own[::-1]
  return ((images - mirror) / (own - mirror)).mean((-3, -2, -1))


def _is_constant(images):
  """Per draw, whether each image has one value."""
  spread = np.ptp(images, axis=(-3, -2, -1))
  return (spread < 1e-5).all(-1)


class TargetsTest(parameterized.TestCase):
  @parameterized.parameters(0.0, 0.1, 1.0)
  def test_rows_sum_to_one(self, smoothing):
    targets = class_targets(jnp.array([0, 4, 2]), 5, smoothing)
    chex.assert_shape(targets, (3, 5))
    chex.assert_trees_all_close(targets.sum(-1), jnp.ones(3), atol=1e-6)

  def test_smoothing_is_spread_over_all_classes(self):
    targets = class_targets(jnp.array([2]), 4, 0.2)
    expected = jnp.array([[0.05, 0.05, 0.85, 0.05]])
    chex.assert_trees_all_close(targets, expected, atol=1e-6)

  def test_no_smoothing_is_one_hot(self):
    targets = class_targets(jnp.array([1, 0]), 3)
    chex.assert_trees_all_equal(targets, jnp.array([[0, 1, 0], [1, 0, 0.0]]))


class CrossEntropyTest(parameterized.TestCase):
  def test_one_hot_targets_give_the_integer_loss(self):
    logits = jax.random.normal(jax.random.key(0), (6, 5)) * 3
    labels = jnp.array([0, 1, 2, 3, 4, 0])
    ours = soft_cross_entropy(logits, class_targets(labels, 5))
    theirs = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-6)

  def test_formula(self):
    logits = np.array([[1.0, 2.0, -1.0]], np.float32)
    targets = np.array([[0.2, 0.5, 0.3]], np.float32)
    logp = logits - np.log(np.exp(logits).sum())
    ours = soft_cross_entropy(jnp.array(logits), jnp.array(targets))
    np.testing.assert_allclose(ours, -(targets * logp).sum(-1), rtol=1e-6)

  def test_is_float32_for_low_precision_logits(self):
    logits = jnp.array([[300.0, 301.0]], jnp.bfloat16)
    ours = soft_cross_entropy(logits, jnp.array([[1.0, 0.0]]))
    self.assertEqual(ours.dtype, jnp.float32)
    expected = soft_cross_entropy(
      logits.astype(jnp.float32), jnp.array([[1.0, 0.0]])
    )
    chex.assert_trees_all_equal(ours, expected)

  def test_shapes_must_agree(self):
    with self.assertRaises(AssertionError):
      soft_cross_entropy(jnp.zeros((2, 3)), jnp.zeros((1, 3)))


class MixImagesTest(parameterized.TestCase):
  @parameterized.parameters((0.8, 0.0), (0.0, 1.0), (0.8, 1.0))
  def test_target_rows_sum_to_one(self, mixup, cutmix):
    _, targets = _mix(ClassifierConfig(mixup=mixup, cutmix=cutmix))
    np.testing.assert_allclose(targets.sum(-1), 1, atol=1e-5)
    self.assertGreaterEqual(targets.min(), 0)

  @parameterized.parameters((0.8, 0.0), (0.0, 1.0), (0.8, 1.0))
  def test_targets_weigh_what_the_pixels_show(self, mixup, cutmix):
    images, targets = _mix(ClassifierConfig(mixup=mixup, cutmix=cutmix))
    share = _own_share(images)  # [draws, B]
    rows = np.arange(_BATCH)
    np.testing.assert_allclose(targets[:, rows, rows], share, atol=1e-5)
    np.testing.assert_allclose(
      targets[:, rows, rows[::-1]], 1 - share, atol=1e-5
    )
    self.assertGreater(np.ptp(share), 0.5)  # not always the same mixture

  def test_alphas_of_zero_change_nothing(self):
    targets = jnp.eye(_BATCH)
    images, mixed = mix_images(
      jax.random.key(0), jnp.array(_IMAGES), targets, ClassifierConfig()
    )
    chex.assert_trees_all_equal((images, mixed), (_IMAGES, targets))

  @parameterized.parameters(0.0, 0.5, 1.0)
  def test_mixup_alone_never_cuts(self, prob):
    images, _ = _mix(ClassifierConfig(mixup=0.8, cutmix_prob=prob))
    self.assertTrue(_is_constant(images).all())
    self.assertLess(_own_share(images).min(), 0.9)

  @parameterized.parameters(0.0, 0.5, 1.0)
  def test_cutmix_alone_never_blends(self, prob):
    images, _ = _mix(ClassifierConfig(cutmix=1.0, cutmix_prob=prob))
    own = np.isclose(images, _VALUES.reshape(-1, 1, 1, 1))
    mirror = np.isclose(images, _VALUES[::-1].reshape(-1, 1, 1, 1))
    self.assertTrue((own | mirror).all())
    self.assertTrue(mirror.any())

  @parameterized.parameters((0.0, 1.0, 1.0), (0.5, 0.25, 0.75), (1.0, 0.0, 0.2))
  def test_cutmix_prob_chooses_between_both(self, prob, low, high):
    config = ClassifierConfig(mixup=0.8, cutmix=1.0, cutmix_prob=prob)
    images, _ = _mix(config, draws=128)
    # A box may be empty or whole, which leaves a constant image too.
    self.assertBetween(_is_constant(images).mean(), low, high)

  def test_cutmix_pastes_one_box(self):
    images, _ = _mix(ClassifierConfig(cutmix=1.0))
    pasted = ~np.isclose(images[:, 0, ..., 0], _VALUES[0])
    for mask in pasted:
      box = np.outer(mask.any(1), mask.any(0))
      np.testing.assert_array_equal(mask, box)
      for edge in (mask.any(1), mask.any(0)):
        self.assertLessEqual(np.abs(np.diff(edge.astype(int))).sum(), 2)

  def test_batch_shares_one_draw(self):
    images, _ = _mix(ClassifierConfig(mixup=0.8, cutmix=1.0))
    share = _own_share(images)
    np.testing.assert_allclose(share, share[:, :1] * np.ones(_BATCH), atol=1e-5)

  def test_large_alpha_mixes_by_halves(self):
    images, _ = _mix(ClassifierConfig(mixup=1e4))
    np.testing.assert_allclose(_own_share(images), 0.5, atol=0.05)

  def test_middle_of_an_odd_batch_is_itself(self):
    images, targets = _mix(ClassifierConfig(mixup=0.8), batch=3)
    np.testing.assert_allclose(images[:, 1], 1, atol=1e-6)
    np.testing.assert_allclose(targets[:, 1, 1], 1, atol=1e-6)

  def test_keeps_the_images_dtype(self):
    config = ClassifierConfig(mixup=0.8, cutmix=1.0)
    images, _ = jax.eval_shape(
      functools.partial(mix_images, config=config),
      jax.random.key(0),
      jnp.array(_IMAGES, jnp.bfloat16),
      jnp.eye(_BATCH),
    )
    self.assertEqual(images.dtype, jnp.bfloat16)


if __name__ == "__main__":
  absltest.main()
