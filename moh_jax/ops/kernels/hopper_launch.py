"""How the Hopper kernels are launched: grid, warpgroups, shared memory.

The grid is as large as the GPU: a program takes one piece of work after the
other, and its copies for the next piece run while it finishes the last.

Shapes as in `hopper`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moh_jax.ops.kernels.hopper_program import Program, Ring, RingType
from moh_jax.ops.kernels.problem import Arrays
from moh_jax.ops.target import target

# Registers of a thread of the consumers and of the warpgroup that copies, where
# two consumers share a multiprocessor with it.
_REGISTERS = 240, 24
_CORES = 132  # multiprocessors of an H100 or H200, where JAX does not tell


class Turns(NamedTuple):
  """Keeps the consumers in step.

  In the forward pass two consumers take turns at the tensor cores: one computes
  products while the other one computes exponentials.

  Attributes:
    barrier: at which all consumers arrive; None for a single one.
  """

  barrier: Any

  def switch(self) -> None:
    """Waits until the others have come to their next switch."""
    if self.barrier is not None:
      plgpu.barrier_arrive(self.barrier)
      plgpu.barrier_wait(self.barrier)

  def start(self, consumer: jax.Array) -> None:
    """Puts the second consumer half a turn behind the first."""
    pl.when(consumer == 1)(self.switch)

  def stop(self, consumer: jax.Array) -> None:
    """Evens out the number of switches."""
    pl.when(consumer == 0)(self.switch)


@dataclasses.dataclass(frozen=True)
class Launch(Program):
  """Launch of one kernel of one call; attributes also as those of `Program`.

  Attributes:
    consumers: warpgroups that compute.
  """

  consumers: int

  @property
  def slots(self) -> int:
    """Tiles in shared memory that a piece of work holds: the next ones too."""
    return 2 if self.problem.head_dim <= 128 else 1

  @property
  def run(self) -> int:
    """Pieces of work that a program takes at a time.

    Causal attention has one long and one short piece follow each other.
    """
    return 2 if self.problem.visible.causal else 1

  @property
  def programs(self) -> int:
    """Programs of the grid."""
    # The interpreter runs one after the other: two show how they share work.
    return 2 if self.problem.interpret else target().cores or _CORES

  def mine(
    self, used: jax.Array | int
  ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """How many pieces of work this program has, and which.

    Args:
      used: pieces of all programs.

    Returns:
      The number, and the function from 0, 1, ... to the index of a piece.
    """
    program = lax.axis_index("program") * self.run
    stride = self.run * self.programs
    left = jnp.maximum(used - program, 0)
    count = lax.div(left, stride) * self.run
    count += jnp.minimum(lax.rem(left, stride), self.run)

    def index(m: jax.Array) -> jax.Array:
      return program + lax.div(m, self.run) * stride + lax.rem(m, self.run)

    return count, index

  def ring(self, slots: int, *buffers: tuple[int, jax.Array]) -> RingType:
    """A ring of so many rows each of arrays [X, D] or [X]."""
    return RingType(
      slots,
      tuple(
        jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
        for rows, x in buffers
      ),
    )

  def call(
    self,
    name: str,
    consume: Callable,
    copy: Callable,
    inputs: Any,
    outputs: tuple,
    rings: tuple[RingType, ...],
  ) -> Arrays:
    """Launches a kernel.

    Args:
      name: of the kernel.
      consume: run by each consumer with references to the inputs and outputs,
        the rings, its number and `Turns`.
      copy: run by the copying warpgroup with the inputs and rings.
      inputs: a pytree of arrays.
      outputs: shapes of the results.
      rings: the rings.
    """
    arrays, tree = jax.tree.flatten(inputs)

    def body(*references: Any) -> None:
      *references, buffers, barrier = references
      inputs = jax.tree.unflatten(tree, references[: len(arrays)])
      outputs = references[len(arrays) :]
      rings = tuple(Ring(*x) for x in buffers)
      group = lax.axis_index("warpgroup")

      @pl.when(group < self.consumers)
      def _() -> None:
        self._set_registers(_REGISTERS[0], "increase")
        for ring in rings:
          ring.open()
        consume(inputs, outputs, rings, group, Turns(barrier))

      @pl.when(group == self.consumers)
      def _() -> None:
        self._set_registers(_REGISTERS[1], "decrease")
        copy(inputs, rings)
        for ring in rings:
          ring.close()

    body.__name__ = name
    barrier = plgpu.Barrier(num_arrivals=self.consumers)
    launch = plgpu.kernel(
      body,
      out_type=outputs,
      scratch_types=(
        tuple(x.scratch(self.consumers) for x in rings),
        barrier if self.consumers > 1 else None,
      ),
      compiler_params=plgpu.CompilerParams(
        approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
      ),
      grid=(self.programs,),
      grid_names=("program",),
      num_threads=self.consumers + 1,
      thread_name="warpgroup",
      interpret=_interpreter() if self.problem.interpret else None,
    )
    return tuple(launch(*arrays))

  def _set_registers(self, number: int, action: str) -> None:
    if self.consumers > 1:  # else there are enough for all
      plgpu.set_max_registers(number, action=action)


def alternating(
  first: jax.Array | int, position: jax.Array, end: jax.Array | int
) -> jax.Array:
  """Orders [first, end): the last, the first, the last but one, the second."""
  half, odd = jnp.divmod(position - first, 2)
  return jnp.where(odd == 1, first + half, end - 1 - half)


def _interpreter() -> Any:
  """Parameters that make Pallas simulate the warpgroups and barriers."""
  # JAX 0.10 has them in a private module only.
  params = plgpu
  if not hasattr(plgpu, "InterpretGPUParams"):
    from jax._src.pallas.mosaic_gpu.interpret import params
  # Copies fill what is beyond the end of an array with zeros.
  return params.InterpretGPUParams(
    out_of_bounds_reads="uninitialized", uninitialized_memory="zero"
  )
