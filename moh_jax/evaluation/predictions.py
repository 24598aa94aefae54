"""Predictions for every image of a split, and scores that are exact counts."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from moh_jax.evaluation.metrics import one_late
from moh_jax.layers.router import count_examples
from moh_jax.runtime.batches import gather

_TOP = 5


@dataclasses.dataclass(frozen=True)
class Predictions:
  """What a classifier takes the N images of a split for, in their order.

  Attributes:
    index: [N] position of each image in the split.
    label: [N] its label in the data.
    top: [N, 5] its most probable classes, the first the best, or [N, 1] of a
      model with five classes or fewer; -1 where the model gives NaN.
    loss: [N] cross-entropy of the label.
    activated_share: heads used over all heads.
  """

  index: np.ndarray
  label: np.ndarray
  top: np.ndarray
  loss: np.ndarray
  activated_share: float


# (params, mesh) -> the predictions for a split, on every process.
Predict = Callable[[Any, Mesh], Predictions]


def predict_step(model: nn.Module) -> Callable[[Any, Any], dict[str, Any]]:
  """Makes the jitted function (params, batch) -> arrays of `Predictions`."""

  @jax.jit
  def step(params: Any, batch: Any) -> dict[str, jax.Array]:
    with count_examples(batch["mask"]):
      logits, aux = model.apply({"params": params}, batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["label"]
    )
    shown = _TOP if logits.shape[-1] > _TOP else 1
    top = jax.lax.top_k(logits, shown)[1]
    broken = jnp.isnan(logits).any(-1, keepdims=True)
    return {
      **{name: rows for name, rows in batch.items() if name != "image"},
      "top": jnp.where(broken, -1, top),
      "loss": loss,
      "activated_share": jnp.broadcast_to(aux.activated_share, loss.shape),
    }

  return step


def predict_all(
  step: Callable[[Any, Any], dict[str, Any]],
  params: Any,
  batches: Iterable[Any],
) -> Predictions:
  """Predicts every image of a split once, whatever devices share the work.

  Args:
    step: of `predict_step`.
    params: the parameters.
    batches: global batches with "index" and "mask", on the devices.

  Raises:
    ValueError: there is no image.
  """
  results = one_late(step(params, batch) for batch in batches)
  parts = [gather(result) for result in results]
  if not parts:
    raise ValueError("the split to evaluate is empty")
  whole = {
    name: np.concatenate([part[name] for part in parts]) for name in parts[0]
  }
  real = whole.pop("mask") > 0
  whole = {name: values[real] for name, values in whole.items()}
  share = float(whole.pop("activated_share").mean(dtype=np.float64))
  return Predictions(**whole, activated_share=share)


def scores(found: Predictions) -> dict[str, float]:
  """Accuracy, top-5 accuracy, loss, activated share and number of images.

  Of a model with five classes or fewer there is no top-5 accuracy.
  """
  hits = found.top == found.label[:, None]
  count = len(hits)
  top5 = {"top5_accuracy": int(hits.sum()) / count}
  return {
    "accuracy": int(hits[:, 0].sum()) / count,
    "activated_share": found.activated_share,
    "loss": float(found.loss.mean(dtype=np.float64)),
    **(top5 if found.top.shape[1] > 1 else {}),
    "examples": count,
  }


def by_class(
  found: Predictions, class_names: Sequence[str]
) -> list[dict[str, Any]]:
  """Scores of every class, and what it is taken for most often.

  Args:
    found: the predictions.
    class_names: a name for each class.

  Returns:
    A row per class in the order of the labels; shares are None for a class
    without images.
  """
  rows = []
  for label, name in enumerate(class_names):
    top = found.top[found.label == label]
    total = len(top)
    first = top[:, 0].tolist()
    wrong = [c for c in first if c not in (label, -1)]
    taken = max(set(wrong), key=lambda c: (wrong.count(c), -c), default=None)
    hits = int((top == label).sum())
    top5 = {"top5_accuracy": hits / total if total else None}
    rows.append(
      {
        "class": name,
        "examples": total,
        "accuracy": first.count(label) / total if total else None,
        **(top5 if top.shape[1] > 1 else {}),
        "taken_for": "" if taken is None else class_names[taken],
        "times": wrong.count(taken),
      }
    )
  return rows
