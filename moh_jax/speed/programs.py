"""Compiled programs to time, and the device's peaks to judge them by."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.ops.target import target
from moh_jax.runtime.devices import absent_devices
from moh_jax.speed import timing

# On accelerators the call of a small function takes longer than its evaluation,
# so one call evaluates it this many times.
_LOOPS = 16
_PEAK_CALLS = 10
_CPU_SIZES = (1024, 2048)
_ACCELERATOR_SIZES = (4096, 8192)
_COPY_BYTES = 1 << 30
# An evaluation of so many FLOPs takes longer than its call, which the device
# does not wait for: 0.1 ms at 1 PFLOP/s.
_LONG_FLOPS = 1e11
_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"')
# Calls whose operands and results are all that they move: matrix products of
# libraries, and notes to the compiler.
_COUNTED_CALLS = ("__cublas", "__onednn", "AssumeGather", "ConcatBitcast")


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled function with its arguments.

  Attributes:
    run: calls it and returns its arrays; None if it was compiled for a device
      that is not here.
    loops: evaluations of the function in one call.
    bytes: memory that XLA allocates for one evaluation: arguments, outputs and
      temporaries; None where it is unknown.
    temporary_bytes: of these the temporaries.
    moved_bytes: bytes that the compiler counts as read and written by one
      evaluation; None where it does not count them, or not right: what a kernel
      reads again, and what a loop moves after its first iteration, is missing.
    kernels: how many calls of each kernel the program has that XLA did not
      make; matrix products of libraries are left out.
  """

  run: Callable[[], Any] | None
  loops: int = 1
  bytes: int | None = None
  temporary_bytes: int | None = None
  moved_bytes: int | None = None
  kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)


def compile_program(function: Callable, *args: Any, loops: int = 1) -> Program:
  """Compiles a function for its arguments, which the program keeps.

  Args:
    function: function of trees of arrays.
    *args: its arguments; `jax.ShapeDtypeStruct`s where the device is not here.
    loops: evaluations in one call, one after another; the call returns the
      value of the last one.
  """
  return lower_program(function, *args, loops=loops)()


def lower_program(
  function: Callable, *args: Any, loops: int = 1
) -> Callable[[], Program]:
  """Traces a function, and returns what compiles it: in any thread.

  Args:
    function: as for `compile_program`, as are all arguments.
    *args: its arguments.
    loops: evaluations in one call.
  """
  absent = is_absent()
  # Autotuning runs kernels, for which there is no device.
  quick = absent and target().platform == "gpu"
  options = {"xla_gpu_autotune_level": 0} if quick else None
  once, looped = jax.jit(function).lower(*args), None
  if loops > 1 and not absent:
    looped = jax.jit(_loop(function, loops)).lower(*args)

  def finish() -> Program:
    compiled = once.compile(compiler_options=options)
    program = _describe(compiled)
    if absent:
      return program
    run = compiled if looped is None else looped.compile()
    return dataclasses.replace(program, run=lambda: run(*args), loops=loops)

  return finish


def try_lowering(
  function: Callable, *args: Any, loops: int = 1
) -> Callable[[], Program]:
  """Like `lower_program`, but what is returned raises the errors of tracing."""
  try:
    return lower_program(function, *args, loops=loops)
  except Exception as error:  # compilers share no error class
    fault = error

  def fail() -> Program:
    raise fault

  return fail


def finish_all(
  lowered: Sequence[Callable[[], Program]],
) -> list[Program | Exception]:
  """Compiles programs at the same time; those that fail give their error."""

  def finish(compile_it: Callable[[], Program]) -> Program | Exception:
    try:
      return compile_it()
    except Exception as error:  # compilers and drivers share no error class
      return error

  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    return list(pool.map(finish, lowered))


def failure(error: Exception) -> str:
  """One line that says why a program does not run."""
  return textwrap.shorten(f"does not run: {type(error).__name__}: {error}", 300)


def _describe(compiled: jax.stages.Compiled) -> Program:
  """What the compiler tells of one evaluation."""
  text = compiled.as_text() or ""
  kernels = collections.Counter(
    name
    for name in _CUSTOM_CALL.findall(text)
    if not name.startswith(_COUNTED_CALLS)
  )
  moved = None
  if not kernels and " while(" not in text:
    moved = (compiled.cost_analysis() or {}).get("bytes accessed")
  memory = compiled.memory_analysis()
  return Program(
    None,
    bytes=memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    + memory.temp_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    moved_bytes=None if moved is None else int(moved),
    kernels=dict(kernels),
  )


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[None]:
  """Context in which programs are compiled for a device that is not here.

  Args:
    name: as for `runtime.devices.absent_devices`; "" is the device that is.

  Raises:
    ValueError: the target is unknown, or a package is missing.
  """
  if not name:
    yield
    return
  mesh = jax.sharding.Mesh(np.array(absent_devices(name)[:1]), ("data",))
  with jax.set_mesh(mesh):
    yield


def is_absent() -> bool:
  """Whether programs are compiled for a device that is not here."""
  mesh = jax.sharding.get_mesh()
  return not mesh.empty and mesh.devices.flat[0] not in jax.devices()


def make_arrays(make: Callable[[], Any]) -> Any:
  """Arguments of programs: arrays, or their shapes for an absent device.

  Args:
    make: makes a tree of arrays.
  """
  if not is_absent():
    return make()
  sharding = jax.NamedSharding(jax.sharding.get_mesh(), jax.P())
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    jax.eval_shape(make),
  )


def jit_once(function: Callable) -> Callable:
  """Jits a function that runs once, such as an initialization.

  On CPUs it is compiled without optimization: that takes longer than running.
  """
  on_cpu = target().platform == "cpu"
  quick = {"xla_backend_optimization_level": 0} if on_cpu else None
  return jax.jit(function, compiler_options=quick)


def default_loops(flops: float = 0.0) -> int:
  """How often one call evaluates a function.

  Args:
    flops: FLOPs of one evaluation.

  Returns:
    1 on CPUs and for long evaluations, else 16.
  """
  on_cpu = target().platform == "cpu"
  return 1 if on_cpu or flops > _LONG_FLOPS else _LOOPS


def exact_products(dtype: str) -> contextlib.AbstractContextManager:
  """Context in which float32 products are exact on devices that round them."""
  if target().platform == "cpu" or dtype != "float32":
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


def memory_peak() -> float | None:
  """Measures the speed of the device's memory in bytes/s, of one large copy.

  It is None on CPUs, whose caches hold most of what is measured.
  """
  if jax.default_backend() == "cpu":
    return None
  source = jnp.ones(_COPY_BYTES // 4, jnp.float32)
  return 2 * _COPY_BYTES / _fastest(compile_program(jnp.negative, source))


def _best_seconds(size: int, dtype: str) -> float:
  """Seconds of a product of square matrices."""
  matrix = jax.random.normal(jax.random.key(0), (size, size), dtype)
  return _fastest(compile_program(jnp.matmul, matrix, matrix))


def _fastest(program: Program) -> float:
  """Seconds of the fastest of ten calls."""
  timing.seconds(program.run)  # warms up
  return min(timing.seconds(program.run) for _ in range(_PEAK_CALLS))


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
