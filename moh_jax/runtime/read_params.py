"""Reads the parameters of a checkpoint, with little memory beside the result.

Orbax reads all arrays of a tree at once, and holds each as it is stored until
it has the wanted dtype: restoring float32 as bfloat16 takes twice the result.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

# Arrays are stored in chunks of at most so many bytes, which bounds what a
# reader holds of an array beside its own part.
CHUNK_BYTES = 1 << 22
_GROUP_BYTES = 1 << 25  # of arrays that are read at once


def read_params(folder: epath.Path, abstract: Any) -> Any:
  """Reads a tree of arrays, some at a time and the largest first.

  Each process reads only its own parts of them.

  Args:
    folder: item of a checkpoint.
    abstract: tree of ShapeDtypeStructs with shardings. Arrays are converted to
      its dtypes while they are read.

  Raises:
    Exception: Orbax raises many kinds where the stored tree is another or
      cannot be read.
  """
  leaves = traverse_util.flatten_dict(abstract)
  handler = ocp.PyTreeCheckpointHandler()
  try:
    _check_names(leaves, handler.metadata(folder).tree)
    for group in _groups(leaves):
      item = traverse_util.unflatten_dict(group)
      restore = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=True,
      )
      read = jax.block_until_ready(handler.restore(folder, args=restore))
      leaves |= traverse_util.flatten_dict(read)
  finally:
    handler.close()
  return traverse_util.unflatten_dict(leaves)


def save_args(tree: Any) -> Any:
  """Orbax's arguments for saving a tree so that it can be read in chunks."""
  return jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)


def _groups(leaves: dict[tuple, Any]) -> Iterator[dict[tuple, Any]]:
  """Arrays to read at once, the largest first.

  So the arrays that take most memory on their way are read while little of the
  result is there.
  """
  group, size = {}, 0
  for path in sorted(leaves, key=lambda p: -_bytes(leaves[p])):
    if group and size + _bytes(leaves[path]) > _GROUP_BYTES:
      yield group
      group, size = {}, 0
    group[path] = leaves[path]
    size += _bytes(leaves[path])
  if group:
    yield group


def _bytes(leaf: Any) -> int:
  """Bytes of a whole array."""
  return int(np.prod(leaf.shape)) * leaf.dtype.itemsize


def _check_names(leaves: dict[tuple, Any], stored: Any) -> None:
  """Refuses a checkpoint that holds other arrays."""
  names = set(traverse_util.flatten_dict(stored))
  if names != set(leaves):
    other = sorted("/".join(map(str, path)) for path in names ^ set(leaves))
    raise ValueError(f"it holds other arrays; differing: {', '.join(other)}")
