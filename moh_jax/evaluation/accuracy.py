"""Accuracy of an image classifier."""

from typing import Any

import flax.linen as nn
import jax

from moh_jax.evaluation.means import EvalStep, batch_sums
from moh_jax.evaluation.predictions import predict_step


def make_eval_step(model: nn.Module) -> EvalStep:
  """Jitted sums over one batch; padded examples (mask 0) count nothing.

  Args:
    model: maps images to (logits, aux).

  Returns:
    (params, batch) -> {name: [] float32 sum over the batch's examples}.
  """
  predict = predict_step(model)

  @jax.jit
  def eval_step(params: Any, batch: Any) -> dict[str, jax.Array]:
    found = predict(params, batch)
    right = found["top"] == batch["label"][:, None]
    return batch_sums(
      batch["mask"],
      loss=found["loss"],
      accuracy=right[:, 0],
      top5_accuracy=right.any(-1),
      activated_share=found["activated_share"],
    )

  return eval_step
