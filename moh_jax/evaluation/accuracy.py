"""Accuracy of an image classifier."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from moh_jax.evaluation.means import EvalStep, batch_sums


def make_eval_step(model: nn.Module) -> EvalStep:
  """Jitted sums over one batch; padded examples (mask 0) count nothing.

  Args:
    model: maps images to (logits, aux).

  Returns:
    (params, batch) -> {name: [] float32 sum over the batch's examples}.
  """

  @jax.jit
  def eval_step(params: Any, batch: Any) -> dict[str, jax.Array]:
    logits, aux = model.apply({"params": params}, batch["image"])
    labels = batch["label"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    label_logits = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    # Classes that beat the right one: higher, or equal with a lower index, as
    # argmax decides; NaN beats everything, so a broken model scores nothing.
    earlier = jnp.arange(logits.shape[-1])[None] < labels[:, None]
    beaten_by = ~(logits <= label_logits) | ((logits == label_logits) & earlier)
    rank = beaten_by.sum(-1)
    right = {"accuracy": rank == 0, "top5_accuracy": rank < 5}
    return batch_sums(batch["mask"], aux, loss=losses, **right)

  return eval_step
