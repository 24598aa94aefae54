"""Batches on a mesh: the rows that each process reads, and global arrays."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from moh_jax.runtime.mesh import batch_shards, split_by_batch


def batch_rows(mesh: Mesh, size: int, process: int | None = None) -> np.ndarray:
  """Rows of every global batch that a process reads: those of its devices.

  They need not follow each other. In a TPU slice of 4 x 4 chips, with the order
  of devices that JAX gives for mesh.data=16, process 0 of 4 holds the shards 0,
  1, 6 and 15. Processes whose devices hold the same shards read the same rows,
  for example where the tensor axis spans hosts.

  Args:
    mesh: the devices.
    size: examples in the batch, see `check_batch`.
    process: index of the process; None is this one.

  Returns:
    [rows] int64, ascending.
  """
  shards = batch_shards(mesh)
  held = _held_shards(mesh, process)
  each = size // shards
  return (held[:, None] * each + np.arange(each)).reshape(-1)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
  """Makes global arrays from this process's rows of a batch.

  Args:
    batch: tree of host arrays [b, ...], the rows that `batch_rows` tells.
    mesh: the devices.

  Returns:
    Tree of arrays [B, ...], split over the axes data and fsdp.
  """
  sharding = split_by_batch(mesh)
  shards, held = batch_shards(mesh), len(_held_shards(mesh))

  def one(x: np.ndarray) -> jax.Array:
    size = len(x) // held * shards
    rows = batch_rows(mesh, size)
    return jax.make_array_from_callback(
      (size, *x.shape[1:]), sharding, lambda index: x[local_rows(rows, index)]
    )

  return jax.tree.map(one, batch)


def local_rows(rows: np.ndarray, index: tuple[slice, ...]) -> slice:
  """Where a process's part of a batch has the rows of one device.

  Args:
    rows: of the global batch that the process holds, see `batch_rows`.
    index: the device's part of the global array.
  """
  start, stop, _ = index[0].indices(rows[-1] + 1)
  first = int(np.searchsorted(rows, start))
  return slice(first, first + stop - start)


def put_batch(array: np.ndarray, mesh: Mesh) -> jax.Array:
  """Splits an array over the axes data and fsdp; every process has all of it.

  Args:
    array: [B, ...], the same on every process.
    mesh: the devices.
  """
  sharding = split_by_batch(mesh)
  return jax.make_array_from_callback(
    array.shape, sharding, lambda index: array[index]
  )


def pad_to_shards(array: np.ndarray, mesh: Mesh) -> np.ndarray:
  """Repeats the last example until the axes data and fsdp divide the length.

  Args:
    array: [B, ...] with B of at least 1.
    mesh: the devices.
  """
  missing = -len(array) % batch_shards(mesh)
  return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])


def gather(arrays: Any) -> Any:
  """Copies the arrays of a tree to the host, global ones to every process."""

  def copy(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
      return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)  # a process's own, which others need not have

  return jax.tree.map(copy, arrays)


def _held_shards(mesh: Mesh, process: int | None = None) -> np.ndarray:
  """Indices of the batch's shards that a process's devices hold, ascending."""
  process = jax.process_index() if process is None else process
  # The axes of the batch are the first ones of the mesh.
  by_shard = mesh.devices.reshape(batch_shards(mesh), -1)
  mine = [any(d.process_index == process for d in row) for row in by_shard]
  return np.flatnonzero(mine)
