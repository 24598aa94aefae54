"""Image classification: the task of MoH-ViT, its targets and losses."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from moh_jax.config import ClassifierConfig, Config
from moh_jax.evaluation.metrics import classification_step
from moh_jax.layers.partitioning import reverse_examples
from moh_jax.models.generation import Decode
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training import task
from moh_jax.training.step import LossFn, Metrics, add_balance_loss


def make_task(config: Config, decode: Decode | None = None) -> task.Task:
  """Opens the data and builds the task.

  Raises:
    FileNotFoundError: data is missing.
    ValueError: the data does not fit the model.
  """
  del decode  # previews are for models that make images
  objective = make_objective(config)
  return task.image_task(config, objective, make_evaluate, shown=("accuracy",))


def make_objective(config: Config) -> task.Objective:
  """Builds the network and its loss; no data are read."""
  return task.image_objective(config, make_loss)


def make_evaluate(
  model: nn.Module, config: Config, trained: Metadata
) -> task.Evaluate:
  """Opens the held-out split and prepares its evaluation.

  Args:
    model: maps images to (logits, aux).
    config: the run.
    trained: its class names must be those of the held-out split.
  """
  return task.image_evaluation(config, trained, classification_step(model))


def make_loss(model: nn.Module, config: Config) -> LossFn:
  """Cross-entropy of an image classifier plus the weighted balance loss.

  Args:
    model: maps images to (logits, aux).
    config: the run; its section `classifier` says how targets are made.

  Returns:
    The loss function; its metrics log the task loss and the balance loss apart.
  """
  classifier, train = config.classifier, config.train

  def loss_fn(
    params: Any, batch: Any, rng: jax.Array, step: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    del step
    mix_rng, dropout_rng = jax.random.split(rng)
    labels = batch["label"]
    targets = jax.nn.one_hot(labels, config.model.num_classes)
    targets = optax.smooth_labels(targets, classifier.label_smoothing)
    images, targets = mix_images(mix_rng, batch["image"], targets, classifier)
    logits, aux = model.apply(
      {"params": params}, images, train=True, rngs={"dropout": dropout_rng}
    )
    chex.assert_equal_shape((logits, targets))  # a family's own network
    losses = optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)
    correct = (logits.argmax(-1) == labels).astype(jnp.float32)
    return add_balance_loss(
      losses.mean(), aux, train.balance_weight, accuracy=correct.mean()
    )

  return loss_fn


def mix_images(
  rng: jax.Array,
  images: jax.Array,
  targets: jax.Array,
  config: ClassifierConfig,
) -> tuple[jax.Array, jax.Array]:
  """Mixup (arXiv:1710.09412) or CutMix (arXiv:1905.04899) of a whole batch.

  As in the DeiT recipe, the method, the weight and the box are sampled once for
  the batch, and example i is mixed with example B - 1 - i.

  Args:
    rng: key of this step.
    images: [B, X, Y, channels].
    targets: [B, K].
    config: section with `mixup`, `cutmix` and `cutmix_prob`; with both alphas 0
      nothing is mixed.

  Returns:
    Mixed images and targets.
  """
  if not (config.mixup or config.cutmix):
    return images, targets
  choose, draw, place = jax.random.split(rng, 3)
  cut_prob = config.cutmix_prob if config.mixup else 1.0
  if not config.cutmix:
    cut_prob = 0.0
  cut = jax.random.uniform(choose) < cut_prob
  # An alpha of 0 is never chosen, but Beta needs positive values to compile.
  alpha = jnp.where(cut, config.cutmix or 1.0, config.mixup or 1.0)
  share = jax.random.beta(draw, alpha, alpha)  # weight of the example itself

  inside = _cut_box(place, images.shape[1:3], share)  # [X, Y]
  cut_share = 1.0 - inside.mean()  # clipping at the border changes the area
  weight = jnp.where(cut, 1.0 - inside, share)[..., None]  # [X, Y, 1]
  weight = jax.lax.broadcast_to_rank(weight.astype(images.dtype), images.ndim)
  images = images * weight + reverse_examples(images) * (1 - weight)
  share = jnp.where(cut, cut_share, share)
  return images, targets * share + reverse_examples(targets) * (1 - share)


def _cut_box(
  rng: jax.Array, shape: tuple[int, int], share: jax.Array
) -> jax.Array:
  """Samples a box of relative area 1 - share: [X, Y] float32, 1 inside."""
  centre = jax.random.uniform(rng, (2,)) * jnp.asarray(shape)
  half = jnp.sqrt(1.0 - share) * jnp.asarray(shape) / 2
  low, high = jnp.floor(centre - half), jnp.floor(centre + half)
  rows, columns = (jnp.arange(size) for size in shape)
  in_rows = (rows >= low[0]) & (rows < high[0])
  in_columns = (columns >= low[1]) & (columns < high[1])
  return (in_rows[:, None] & in_columns[None, :]).astype(jnp.float32)
