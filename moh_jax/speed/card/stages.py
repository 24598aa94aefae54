"""The stages of `bench card`, in the order of what they are worth."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from moh_jax.ops.kernels.backends import (
  block_sizes,
  has_kernels,
  kernel_options,
)
from moh_jax.ops.kernels.sizes import Key
from moh_jax.ops.target import target
from moh_jax.speed import attention, decode, layer, programs, tiles
from moh_jax.speed.card import exact, model_step
from moh_jax.speed.card.scale import MODES, ModelCase, Scale
from moh_jax.speed.card.store import Store
from moh_jax.speed.options import (
  DecodeOptions,
  LayerOptions,
  SequenceOptions,
  Workload,
)
from moh_jax.speed.report import Row, with_peaks

PEAKS = "peaks"
TILES_FILE = "tiles.json"


@dataclasses.dataclass(frozen=True)
class Stage:
  """A part of the measurement, whose result is stored when it is done.

  Attributes:
    name: of its file.
    measure: returns the result, which JSON can hold.
  """

  name: str
  measure: Callable[[], dict[str, Any]]


def stages(scale: Scale, store: Store) -> Iterator[Stage]:
  """All stages, those of the most value first.

  Args:
    scale: the shapes.
    store: results of earlier stages, the device's peaks among them.
  """
  yield Stage(PEAKS, functools.partial(_peaks, scale))
  for dtype in scale.dtypes:
    for dim in _exact_dims(scale, dtype):
      forms = _exact_forms(dtype, dim, first=dim == scale.exact_head_dims[0])
      yield Stage(
        f"exact_{dtype}_{dim}",
        functools.partial(exact.measure, scale.exact_tokens, dtype, dim, forms),
      )
  first = scale.lengths[: scale.first_lengths]
  yield from _cores(scale, store, MODES[:1], first)
  models = [_model(store, scale, case) for case in scale.models]
  yield from models[:3]
  yield from _decodes(scale, store, scale.slots[:1])
  if has_kernels(target()):
    for dim in scale.head_dims:
      measure = functools.partial(_tiles, scale, store, dim)
      yield Stage(f"tiles_{dim}", measure)
  yield from _cores(scale, store, MODES[1:3], first)
  yield from _layers(scale, store)
  yield from _cores(scale, store, MODES[:3], scale.lengths[len(first) :])
  yield from _decodes(scale, store, scale.slots[1:])
  yield from models[3:]
  yield from _cores(scale, store, MODES[3:], scale.lengths)


def _peaks(scale: Scale) -> dict[str, Any]:
  return {
    "matrix_peak": programs.matrix_peak(scale.dtype),
    "memory_peak": programs.memory_peak(),
  }


def _exact_dims(scale: Scale, dtype: str) -> tuple[int, ...]:
  """Float32 takes other tiles, but no other path at larger head dims."""
  dims = scale.exact_head_dims
  return dims if dtype == scale.dtypes[0] else dims[:1]


def _exact_forms(dtype: str, dim: int, *, first: bool) -> tuple[str, ...]:
  """Forms whose exactness is checked with a head dim.

  Those of plain XLA are the same at all, so the first one does for them.
  """
  plain = ("dense", "packed") if first else ()
  if target().platform == "cpu":
    return plain  # a kernel would be interpreted, in minutes
  kernel = ("kernel",) if has_kernels(target(), dtype, dim) else ()
  return (*plain, *kernel, "cudnn")


def _cores(
  scale: Scale, store: Store, modes: tuple[str, ...], lengths: tuple[int, ...]
) -> Iterator[Stage]:
  for mode in modes:
    for length in lengths:
      for dim in scale.head_dims:
        yield Stage(
          f"core_{dim}_{mode}_{length}",
          functools.partial(_core, scale, store, dim, mode, length),
        )


def _core(
  scale: Scale, store: Store, dim: int, mode: str, length: int
) -> dict[str, Any]:
  options = SequenceOptions(
    lengths=(length,),
    shares=scale.shares,
    heads=scale.heads,
    head_dim=dim,
    batch=max(1, scale.tokens // length),
    dtype=scale.dtype,
    rounds=scale.rounds,
    modes=(mode,),
  )
  options = dataclasses.replace(options, implementations=_packing(options))
  return _result(options, store, attention.measure)


def _packing(options: SequenceOptions) -> tuple[str, ...]:
  """The fast forms that compute the active heads alone."""
  mode, length, share = options.modes[0], options.lengths[0], 0.5
  fast = [name for name in options.compared if name in ("kernel", "cudnn")]
  return tuple(
    name
    for name in fast or ["packed"]
    if attention.chosen_form(options, mode, length, share, name).packs
  )


def _layers(scale: Scale, store: Store) -> Iterator[Stage]:
  for length in scale.layer_lengths:
    yield Stage(
      f"layer_{scale.head_dims[0]}_forward_{length}",
      functools.partial(_layer, scale, store, length),
    )


def _layer(scale: Scale, store: Store, length: int) -> dict[str, Any]:
  options = LayerOptions(
    lengths=(length,),
    shares=scale.shares[:2],
    implementations=("auto",),
    heads=scale.heads,
    head_dim=scale.head_dims[0],
    batch=max(1, scale.tokens // length),
    dtype=scale.dtype,
    rounds=scale.rounds,
    modes=MODES[:1],
  )
  return _result(options, store, layer.measure)


def _decodes(
  scale: Scale, store: Store, lengths: tuple[int, ...]
) -> Iterator[Stage]:
  for length in lengths:
    for dim in scale.head_dims:
      yield Stage(
        f"decode_{dim}_{length}",
        functools.partial(_decode, scale, store, dim, length),
      )


def _decode(
  scale: Scale, store: Store, dim: int, length: int
) -> dict[str, Any]:
  options = DecodeOptions(
    lengths=(length,),
    shares=scale.shares,
    heads=scale.heads,
    head_dim=dim,
    batch=scale.texts,
    dtype=scale.dtype,
    rounds=scale.rounds,
  )
  return _result(options, store, decode.measure)


def _result(options: Any, store: Store, measure: Callable) -> dict[str, Any]:
  """Rows of a benchmark of heads, with its settings."""
  peaks = store.read(PEAKS) or {}
  with programs.exact_products(options.dtype):
    rows: list[Row] = measure(options)
  rows = with_peaks(rows, peaks.get("matrix_peak"), peaks.get("memory_peak"))
  return {
    "settings": dataclasses.asdict(options),
    "tuned": (store.folder / TILES_FILE).exists(),
    "rows": [dataclasses.asdict(row) for row in rows],
  }


def _model(store: Store, scale: Scale, case: ModelCase) -> Stage:
  def measure() -> dict[str, Any]:
    peaks = store.read(PEAKS) or _peaks(scale)
    return model_step.measure(case, peaks["matrix_peak"])

  return Stage(f"model_{case.name}", measure)


def _tiles(scale: Scale, store: Store, dim: int) -> dict[str, Any]:
  """Times a few tiles around the default ones, and stores the fastest."""
  device = target()
  backend = kernel_options(device)["backend"]
  default = block_sizes(backend, dim, scale.dtype)
  workload = Workload(
    batch=4,
    tokens=2048,
    heads=16,
    active=8,
    head_dim=dim,
    dtype=scale.dtype,
    rounds=scale.rounds,
  )
  lines: list[str] = []
  found = tiles.tune(
    workload, backend, tiles.near(default, backend), report=lines.append
  )
  key = Key(backend, device.kind, dim, scale.dtype)
  tiles.write(store.folder / TILES_FILE, {key: found})
  return {
    **key._asdict(),
    **dataclasses.asdict(found),
    "tried": lines,
  }
