"""How fast a device multiplies large matrices: what speeds are measured by."""

import time

import jax
import jax.numpy as jnp

_CALLS = 10
_CPU_SIZES = (1024, 2048)
_ACCELERATOR_SIZES = (4096, 8192)


def matrix_peak(dtype: str) -> float:
  """The device's measured matrix peak, FLOP/s.

  The best call of square products of a few sizes: n x n times n x n is
  2 n^3 FLOPs.

  Args:
    dtype: of the matrices.
  """
  sizes = _CPU_SIZES if jax.default_backend() == "cpu" else _ACCELERATOR_SIZES
  return max(2 * n**3 / _best_seconds(n, dtype) for n in sizes)


def _best_seconds(size: int, dtype: str) -> float:
  matrix = jax.random.normal(jax.random.key(0), (size, size), dtype)
  product = jax.jit(jnp.matmul).lower(matrix, matrix).compile()
  jax.block_until_ready(product(matrix, matrix))
  best = float("inf")
  for _ in range(_CALLS):
    start = time.perf_counter()
    jax.block_until_ready(product(matrix, matrix))
    best = min(best, time.perf_counter() - start)
  return best
