"""Pallas' back end Triton, which JAX is going to remove.

This is the one module that imports it. Without it the Triton kernels do not
run, and everything else does.
"""

import concurrent.futures
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from moh_jax.ops.kernels.sizes import Tile

try:
  from jax.experimental.pallas import triton as plgpu
except ImportError:
  plgpu = None

MISSING = "" if plgpu else f"Pallas' Triton, which jax {jax.__version__} lacks"


def launch(kernel: Callable, tile: Tile, **options: Any) -> Callable:
  """Returns the `pl.pallas_call` of a kernel with a tile's warps and stages."""
  # JAX warns whenever it lowers a Triton kernel, after this has returned: a
  # line on a user's terminal, an error where warnings are errors.
  warnings.filterwarnings(
    "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
  )
  params = plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)
  return pl.pallas_call(kernel, compiler_params=params, **options)


@functools.cache
def problem() -> str:
  """What compiling Triton kernels needs and this JAX has not; else empty.

  The smallest kernel is lowered once for a GPU, which need not be here.
  """
  if MISSING:
    return MISSING

  def lower() -> None:
    x = jax.ShapeDtypeStruct((16,), "float32")
    copy = lambda x, out: plgpu.store(out, plgpu.load(x))  # noqa: E731
    call = jax.jit(launch(copy, Tile(16, 16), out_shape=x))
    gpu = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
      call.trace(x).lower(lowering_platforms=("cuda",))

  # A thread of its own has neither the mesh nor the trace of the caller.
  error = concurrent.futures.ThreadPoolExecutor(1).submit(lower).exception()
  if error is None:
    return ""
  reason = f"{type(error).__name__}: {error}".splitlines()[0]
  return f"Pallas' Triton, which jax {jax.__version__} refuses ({reason})"
