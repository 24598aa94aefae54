"""Predictions for every image of a split, and scores that are exact counts."""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from moh_jax.evaluation.metrics import one_late
from moh_jax.layers.router import count_examples
from moh_jax.runtime import sharding

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
  parts = [sharding.gather(result) for result in results]
  if not parts:
    raise ValueError("the split to evaluate is empty")
  whole = {
    name: np.concatenate([part[name] for part in parts]) for name in parts[0]
  }
  real = whole.pop("mask") > 0
  whole = {name: values[real] for name, values in whole.items()}
  share = float(whole.pop("activated_share").mean(dtype=np.float64))
  return Predictions(**whole, activated_share=share)


def scores(
  found: Predictions, right: Sequence[Collection[int]] | None = None
) -> dict[str, float]:
  """Accuracy, top-5 accuracy, loss, activated share and number of images.

  Of a model with five classes or fewer there is no top-5 accuracy.

  Args:
    found: the predictions.
    right: for each of them the classes that are right, such as ReaL's; images
      without any do not count. None is the label alone.

  Raises:
    ValueError: no image has a right class.
  """
  if right is None:
    right = [(label,) for label in found.label.tolist()]
  ranks = [
    next((place for place, c in enumerate(row) if c in classes), _TOP)
    for row, classes in zip(found.top.tolist(), right)
    if classes
  ]
  if not ranks:
    raise ValueError("no image has a right label")
  counted = np.array([bool(classes) for classes in right])
  ranks = np.array(ranks)
  top5 = {"top5_accuracy": int((ranks < _TOP).sum()) / len(ranks)}
  return {
    "accuracy": int((ranks == 0).sum()) / len(ranks),
    "activated_share": found.activated_share,
    "loss": float(found.loss[counted].mean(dtype=np.float64)),
    **(top5 if found.top.shape[1] > 1 else {}),
    "examples": len(ranks),
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


def read_right(
  stored: Mapping[str, Any] | Sequence[Any],
  names: Sequence[str],
  class_names: Sequence[str],
) -> list[frozenset[int]]:
  """The right classes of images from a file of labels.

  Args:
    stored: a list with an entry for each image in the order of the file names,
      as ReaL's, with their numbers by value (2.jpg before 10.jpg), or entries
      by file name, with or without its folder. An entry is a class or a list of
      classes; a class its number or its name.
    names: "CLASS/NAME" of the images.
    class_names: of the model.

  Returns:
    For each image its right classes.

  Raises:
    ValueError: an image has no entry, an entry names no class, or the file
      names do not tell the images apart.
  """
  files = [name.rpartition("/")[2] for name in names]
  twice = {f for f, n in collections.Counter(files).items() if n > 1}
  if not isinstance(stored, Mapping):
    if len(stored) != len(files):
      raise ValueError(
        f"{len(stored)} entries, must be one for each of the {len(files)} "
        "images"
      )
    if twice:
      raise ValueError(
        f"several images are called {min(twice)!r}, so a list has no order; "
        'name them in an object: {"CLASS/NAME": LABEL}'
      )
    stored = dict(zip(sorted(files, key=_by_number), stored))
  labels = {name: label for label, name in enumerate(class_names)}
  shared = {n for n, k in collections.Counter(class_names).items() if k > 1}
  right = []
  for name, file in zip(names, files):
    entry = stored.get(name, None if file in twice else stored.get(file))
    if entry is None:
      others = ", and others have that file name" * (file in twice)
      raise ValueError(f"no entry for the image {name!r}{others}")
    classes = entry if isinstance(entry, list) else [entry]
    if unclear := [c for c in classes if c in shared]:
      raise ValueError(
        f"{name!r} has the label {unclear[0]!r}, the name of several classes; "
        "give the number"
      )
    classes = [labels.get(c, c) for c in classes]
    known = range(len(class_names))
    if unknown := [c for c in classes if c not in known]:
      raise ValueError(
        f"{name!r} has the label {unknown[0]!r}, which is none of the model's "
        f"{len(class_names)} classes"
      )
    right.append(frozenset(classes))
  return right


def _by_number(name: str) -> tuple:
  """Sorts names by text, but the numbers in them by value."""
  parts = re.split("([0-9]+)", name)
  return [int(p) if i % 2 else p for i, p in enumerate(parts)], name
