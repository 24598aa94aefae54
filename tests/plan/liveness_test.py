"""The peak of a program's arrays, counted by hand."""

import math

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.plan.liveness import peak_bytes

_X = jax.ShapeDtypeStruct((16, 16), jnp.float32)
_BYTES = 16 * 16 * 4


def _size(aval):
  return math.prod(aval.shape) * aval.dtype.itemsize


def _two_products(x):
  return (x @ x) @ x  # the first is not needed after the second


def _kept(x):
  first = x @ x
  return (first @ x) + first @ first


def _elements(x):
  return jnp.exp(jnp.sin(x) + 1)  # one loop over the elements


def _scan(x):
  def step(carry, _):
    carry = carry @ x
    return carry, carry

  return jax.lax.scan(step, x, length=5)


class PeakTest(parameterized.TestCase):
  @parameterized.parameters(
    (_two_products, 2),
    (_kept, 3),
    (_elements, 1),
    # The last carry, five results, and a product inside.
    (_scan, 7),
    (jax.jit(_two_products), 2),
  )
  def test_counts_what_lives_at_one_time(self, function, arrays):
    jaxpr = jax.make_jaxpr(function)(_X).jaxpr
    self.assertEqual(peak_bytes(jaxpr, _size), arrays * _BYTES)


if __name__ == "__main__":
  absltest.main()
