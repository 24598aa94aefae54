"""Writes checkpoints piece by piece, in bounded memory.

In an 8B model one MLP matrix of all layers is a leaf of 7.5 GB in float32,
three times the largest tensor of its source, so that no leaf should exist as
one array. Orbax saves whole arrays, but lets users register a `TypeHandler`
that writes leaves of a type of their own. Our handler writes a leaf as
`ocp.type_handlers.NumpyHandler` does (the same array format, names and type
string, from Orbax's own specs), but block by block, each read from the source
when it is written. All else is Orbax's, such as the rename that makes a
complete step folder visible, and the result is an ordinary checkpoint.

A conversion holds some 0.45 GB (Python, JAX, a few blocks of 32 MiB) and the
tensors of the source that form one of our projections; the largest is the
embedding.

Orbax exports `get_json_tspec_write`, which is used here, without documenting
it; tests/convert/stream_test.py tests what it and the handler do.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import traverse_util

from moh_jax.convert import rules
from moh_jax.convert.rules import Path, Rule
from moh_jax.runtime import checkpoint

BLOCK_BYTES = 2**25
_Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class SourceLeaf:
  """A parameter of ours that is made of public tensors when it is read.

  Attributes:
    rules: conversion rules that make it, one or one a layer, each with the
      index of the parameter among those of the rule.
    tensors: public tensors by name; `np.asarray` maps one into memory.
    source: where the tensors come from, for messages.
    shape: shape of the parameter.
    dtype: dtype of the parameter.
  """

  rules: list[tuple[Rule, int]]
  tensors: Mapping[str, Any]
  source: str
  shape: tuple[int, ...]
  dtype: np.dtype

  @property
  def block_shape(self) -> tuple[int, ...]:
    """Shape of the blocks that are written; at the edges they are smaller."""
    is_stack = self.rules[0][0].layer is not ...
    shape = (1, *self.shape[1:]) if is_stack else self.shape
    return block_shape(shape, self.dtype.itemsize)

  def blocks(self) -> Iterator[tuple[_Index, np.ndarray]]:
    """Yields every block with its index in the parameter."""
    for rule, place in self.rules:
      arrays = [np.asarray(self.tensors[name]) for name in rule.theirs]
      part, layer = rule.load(arrays)[place], rule.layer
      stack = () if layer is ... else (slice(layer, layer + 1),)
      for index in _tiles(part.shape, self.block_shape[len(stack) :]):
        block = np.array(part[index], self.dtype, order="C")
        if not np.isfinite(block).all():
          names = ", ".join(rule.theirs)
          raise FloatingPointError(
            f"{self.source}: {names}: holds NaN or infinity"
          )
        yield (*stack, *index), block[None] if stack else block
      del arrays, part  # before the next are read


class _Handler(ocp.type_handlers.NumpyHandler):
  """Writes `SourceLeaf`s in the format of NumPy arrays."""

  async def serialize(
    self,
    values: Sequence[SourceLeaf],
    infos: Sequence[ocp.type_handlers.ParamInfo],
    args: Sequence[ocp.SaveArgs] | None = None,
  ) -> Sequence[ocp.future.Future]:
    del args
    for leaf, info in zip(values, infos):  # one at a time bounds the memory
      await info.await_path_creation()
      spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=info.is_ocdbt_checkpoint,
        global_shape=leaf.shape,
        local_shape=leaf.block_shape,
        dtype=leaf.dtype,
        process_index=0,
      )
      store = await ts.open(
        ts.Spec(spec), create=True, open=True, context=info.ts_context
      )
      waiting, size = [], 0
      for index, block in leaf.blocks():
        # The next block was read meanwhile. Small ones are committed together,
        # since a commit takes as long for a bias as for a matrix.
        if waiting and size + block.nbytes > BLOCK_BYTES:
          await _commit(waiting)
          waiting, size = [], 0
        written = store[index].write(
          block, can_reference_source_data_indefinitely=True
        )
        waiting.append(written)
        size += block.nbytes
      await _commit(waiting)
    return []  # all is written


async def _commit(writes: Sequence[ts.WriteFutures]) -> None:
  for write in writes:
    await write.commit


def source_params(
  table: Sequence[Rule],
  tensors: Mapping[str, Any],
  abstract: Any,
  *,
  source: str,
) -> Any:
  """Describes our parameters by the public tensors that make them.

  Args:
    table: conversion rules.
    tensors: public tensors by name.
    abstract: our parameter tree as ShapeDtypeStructs.
    source: where the tensors come from, for messages.

  Returns:
    Our parameter tree of `SourceLeaf`s; no weights are read.

  Raises:
    ValueError: tensors are missing, unexpected, or of a wrong shape or dtype;
      the message lists them.
  """
  rules.check_tensors(table, tensors, abstract, source=source)
  leaves = {
    path: SourceLeaf([], tensors, source, x.shape, np.dtype(x.dtype))
    for path, x in traverse_util.flatten_dict(abstract).items()
  }
  for rule in table:
    for place, path in enumerate(rule.ours):
      leaves[path].rules.append((rule, place))
  return traverse_util.unflatten_dict(leaves)


def save_params(
  directory: str, params: Any, metadata: checkpoint.Metadata
) -> None:
  """Writes a tree of `SourceLeaf`s as the checkpoint of step 0.

  Raises:
    FloatingPointError: a tensor holds NaN or infinity.
    ValueError: the directory already holds checkpoints.
  """
  registry = ocp.type_handlers.create_type_handler_registry(
    (SourceLeaf, _Handler()),
    # Orbax asks the handler of jax.Array how it stores metadata.
    (jax.Array, ocp.type_handlers.ArrayHandler()),
  )
  handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
  checkpoint.save_params(directory, params, metadata, handler=handler)


def open_params(
  directory: str, step: int, *, use_ema: bool
) -> Callable[[Path], np.ndarray]:
  """Reads a checkpoint's parameters one at a time.

  Args:
    directory: working directory of a run, or output of `convert`.
    step: step of the checkpoint.
    use_ema: prefer averaged parameters where there are any.

  Returns:
    A function from the path of a parameter to the parameter. The last two, of
    which one rule may make its tensors, are kept.
  """
  item = checkpoint.params_item(directory, step, use_ema=use_ema)
  handler = ocp.PyTreeCheckpointHandler()

  @functools.lru_cache(maxsize=2)
  def read(path: Path) -> np.ndarray:
    how = ocp.RestoreArgs(restore_type=np.ndarray)
    one = traverse_util.unflatten_dict({path: how})
    args = ocp.args.PyTreeRestore(one, restore_args=one, partial_restore=True)
    (array,) = jax.tree.leaves(handler.restore(item, args=args))
    return array

  return read


def block_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
  """Shape of blocks that cut an array along its first axes.

  A block has at most `BLOCK_BYTES` bytes, unless one element has more.

  Args:
    shape: shape of the array.
    itemsize: bytes of an element.
  """
  block = list(shape)
  for axis, size in enumerate(shape):
    rest = math.prod(block[axis + 1 :]) * itemsize
    block[axis] = max(1, min(size, BLOCK_BYTES // max(rest, 1)))
    if rest <= BLOCK_BYTES:
      break
  return tuple(block)


def _tiles(shape: tuple[int, ...], block: tuple[int, ...]) -> Iterator[_Index]:
  """Yields the index of every block of an array."""
  starts = [range(0, n, b) for n, b in zip(shape, block)]
  for start in itertools.product(*starts):
    yield tuple(slice(s, min(s + b, n)) for s, b, n in zip(start, block, shape))
