"""Compiled programs, with the memory that they take."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# On accelerators a small function takes less time than to call it: there a
# call evaluates it so many times.
_LOOPS = 16


@dataclasses.dataclass(frozen=True)
class Program:
  """What is timed.

  Attributes:
    run: one call; what it returns are arrays.
    loops: evaluations of the function in one call.
    bytes: what XLA allocates for one evaluation: arguments, outputs and
      temporaries; None where it is not known.
  """

  run: Callable[[], Any]
  loops: int = 1
  bytes: int | None = None


def compile_program(function: Callable, *args: Any, loops: int = 1) -> Program:
  """Compiles a function for its arguments, which are kept.

  Args:
    function: of arrays.
    args: its arguments.
    loops: evaluations of one call, each after the one before; the call returns
      the last one's value.
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
  """Jits what runs once, such as an initialization: compiles it quickly."""
  on_cpu = jax.default_backend() == "cpu"
  quick = {"xla_backend_optimization_level": 0} if on_cpu else None
  return jax.jit(function, compiler_options=quick)


def default_loops() -> int:
  """Evaluations of one call of a small function on the default device."""
  return 1 if jax.default_backend() == "cpu" else _LOOPS


def exact_products(dtype: str) -> contextlib.AbstractContextManager:
  """Makes float32 products exact where a device would round their inputs."""
  if jax.default_backend() == "cpu" or dtype != "float32":
    return contextlib.nullcontext()
  return jax.default_matmul_precision("highest")


def _loop(function: Callable, loops: int) -> Callable:
  """Evaluates a function again and again, each time after the last."""

  def run(*args: Any) -> Any:
    def body(_, out: Any) -> Any:
      # The arguments seem to depend on the last value, so nothing is merged.
      again, _ = jax.lax.optimization_barrier((args, out))
      return function(*again)

    shapes = jax.eval_shape(function, *args)
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, loops, body, start)

  return run
