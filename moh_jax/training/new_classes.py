"""What a run of other classes takes from a model: heads and label tables."""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from moh_jax.runtime.checkpoint import Metadata


@dataclasses.dataclass(frozen=True)
class ClassRows:
  """The rows of a parameter that belong to classes which both models have.

  Attributes:
    axis: axis of the classes.
    ours: [K] rows in the run's parameter.
    theirs: [K] rows in the stored parameter, of the same classes.
    rows: rows of the run's parameter.
    stored: rows of the stored parameter.
  """

  axis: int
  ours: tuple[int, ...]
  theirs: tuple[int, ...]
  rows: int
  stored: int

  def take(self, given: jax.Array, own: jax.Array) -> jax.Array:
    """The run's initial parameter `own` with the rows that `given` has."""
    if not self.ours:
      return own
    ours = (slice(None),) * self.axis + (np.array(self.ours),)
    theirs = (slice(None),) * self.axis + (np.array(self.theirs),)
    return own.at[ours].set(given[theirs].astype(own.dtype))

  def __str__(self) -> str:
    taken = len(self.ours)
    return (
      f"took {taken} rows, initialised {self.rows - taken}, left out "
      f"{self.stored - taken}"
    )


def match_classes(
  ours: Metadata, theirs: Metadata, abstract: Any, stored: Any
) -> dict[tuple[str, ...], ClassRows]:
  """Finds what a run can take of the parameters that belong to classes.

  Classes are matched by name, or by position where a model has no names and
  equally many classes. Rows behind those of the classes, such as the one of "no
  label", are taken where both have them.

  Args:
    ours: metadata of the run.
    theirs: metadata of the model that it starts from.
    abstract: parameters of the run, or their shapes.
    stored: parameters of the other model in the layout of the run's.

  Returns:
    For each parameter that belongs to classes, by its path. It is empty where
    both have the same classes.
  """
  model, other = ours.config.model, theirs.config.model
  needed, given = flatten_dict(abstract), flatten_dict(stored)
  axes = {
    path: axis
    for path, axis in model.CLASS_AXES.items()
    if path in needed and path in given
  }
  alike = all(needed[path].shape == given[path].shape for path in axes)
  named = bool(ours.class_names and theirs.class_names)
  if alike and (not named or ours.class_names == theirs.class_names):
    return {}
  pairs: list[tuple[int, int]] = []
  if named:
    labels = {name: label for label, name in enumerate(theirs.class_names)}
    pairs = [
      (label, labels[name])
      for label, name in enumerate(ours.class_names)
      if name in labels
    ]
  elif model.num_classes == other.num_classes:
    pairs = [(label, label) for label in range(model.num_classes)]
  found = {}
  for path, axis in axes.items():
    rows, there = (tree[path].shape[axis] for tree in (needed, given))
    beyond = min(rows - model.num_classes, there - other.num_classes)
    more = [
      (model.num_classes + i, other.num_classes + i) for i in range(beyond)
    ]
    own_rows, their_rows = zip(*pairs, *more) if pairs or more else ((), ())
    found[path] = ClassRows(axis, own_rows, their_rows, rows, there)
  return found
