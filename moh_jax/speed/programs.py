"""Compiled programs to time, and the device's matrix peak to judge them by."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.speed import timing

# On accelerators the call of a small function takes longer than its evaluation,
# so one call evaluates it this many times.
_LOOPS = 16
_PEAK_CALLS = 10
_CPU_SIZES = (1024, 2048)
_ACCELERATOR_SIZES = (4096, 8192)


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled function with its arguments.

  Attributes:
    run: calls it and returns its arrays.
    loops: evaluations of the function in one call.
    bytes: memory that XLA allocates for one evaluation: arguments, outputs and
      temporaries; None where it is unknown.
  """

  run: Callable[[], Any]
  loops: int = 1
  bytes: int | None = None


def compile_program(function: Callable, *args: Any, loops: int = 1) -> Program:
  """Compiles a function for its arguments, which the program keeps.

  Args:
    function: function of trees of arrays.
    *args: its arguments.
    loops: evaluations in one call, one after another; the call returns the
      value of the last one.
  """
  compiled = jax.jit(function).lower(*args).compile()
  memory = compiled.memory_analysis()
  size = (
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes
  )
  if loops > 1:
    compiled = jax.jit(_loop(function, loops)).lower(*args).compile()
  return Program(lambda: compiled(*args), loops, size)


def jit_once(function: Callable) -> Callable:
  """Jits a function that runs once, such as an initialization.

  On CPUs it is compiled without optimization: that takes longer than running.
  """
  on_cpu = jax.default_backend() == "cpu"
  quick = {"xla_backend_optimization_level": 0} if on_cpu else None
  return jax.jit(function, compiler_options=quick)


def default_loops() -> int:
  """How often one call evaluates a small function: 1 on CPUs, else 16."""
  return 1 if jax.default_backend() == "cpu" else _LOOPS


def exact_products(dtype: str) -> contextlib.AbstractContextManager:
  """Context in which float32 products are exact on devices that round them."""
  if jax.default_backend() == "cpu" or dtype != "float32":
    return contextlib.nullcontext()
  return jax.default_matmul_precision("highest")


def matrix_peak(dtype: str) -> float:
  """Measures the device's matrix peak in FLOP/s.

  It is the rate of the fastest call among square products of a few sizes, where
  n x n times n x n counts 2 n^3 FLOPs.

  Args:
    dtype: dtype of the matrices.
  """
  sizes = _CPU_SIZES if jax.default_backend() == "cpu" else _ACCELERATOR_SIZES
  return max(2 * n**3 / _best_seconds(n, dtype) for n in sizes)


def _best_seconds(size: int, dtype: str) -> float:
  """Seconds of the fastest of ten products of square matrices."""
  matrix = jax.random.normal(jax.random.key(0), (size, size), dtype)
  product = compile_program(jnp.matmul, matrix, matrix)
  timing.seconds(product.run)  # warms up
  return min(timing.seconds(product.run) for _ in range(_PEAK_CALLS))


def _loop(function: Callable, loops: int) -> Callable:
  """Makes a function that evaluates another one `loops` times in sequence."""

  def run(*args: Any) -> Any:
    def body(_, out: Any) -> Any:
      # XLA sees arguments that depend on the last value: it merges nothing.
      again, _ = jax.lax.optimization_barrier((args, out))
      return function(*again)

    shapes = jax.eval_shape(function, *args)
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, loops, body, start)

  return run
