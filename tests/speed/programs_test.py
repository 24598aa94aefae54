from unittest import mock

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.speed import programs
from moh_jax.speed.programs import compile_program
from tests.ops.devices import traced_for


class CompileProgramTest(parameterized.TestCase):
  @parameterized.parameters(1, 5)
  def test_gives_the_function_s_value_however_often_it_runs(self, loops):
    x = jax.random.normal(jax.random.key(0), (3, 4))
    program = compile_program(
      lambda x, _: {"y": x @ x.T, "z": ()}, x, None, loops=loops
    )
    self.assertEqual(program.loops, loops)
    chex.assert_trees_all_close(program.run()["y"], x @ x.T, rtol=1e-6)

  @parameterized.parameters(1, 5)
  def test_evaluates_so_often(self, loops):
    seen = []

    def function(x):
      jax.debug.callback(seen.append, x)
      return x + 1

    jax.block_until_ready(
      compile_program(function, jnp.zeros(()), loops=loops).run()
    )
    jax.effects_barrier()
    self.assertEqual(seen, [0.0] * loops)

  def test_bytes_are_arguments_outputs_and_temporaries(self):
    x = jnp.ones((64, 64))
    program = compile_program(lambda x, y: x[0] + y, x, x[0])
    self.assertBetween(program.bytes, 4 * (64 * 64 + 2 * 64), 4 * 64 * 70)

  def test_temporaries_are_some_of_the_bytes(self):
    x = jnp.ones((64, 64))
    program = compile_program(lambda x: jnp.sort(x @ x, axis=0) @ x, x)
    rest = program.bytes - program.temporary_bytes
    self.assertEqual(rest, 2 * 4 * 64 * 64)
    self.assertGreaterEqual(program.temporary_bytes, 4 * 64 * 64)

  def test_moved_bytes_are_the_compiler_s_where_it_can_count(self):
    x = jnp.ones((256, 256))
    program = compile_program(lambda x: x + 1, x)
    self.assertEqual(program.moved_bytes, 2 * 4 * 256 * 256)
    self.assertEqual(program.kernels, {})
    loop = lambda x: jax.lax.fori_loop(0, 9, lambda _, x: jnp.sin(x), x)  # noqa: E731
    self.assertIsNone(compile_program(loop, x).moved_bytes)

  def test_programs_compile_together_and_fail_alone(self):
    def fail():
      raise RuntimeError("no such\nkernel")

    good = programs.lower_program(jnp.sin, jnp.zeros(3))
    first, error, last = programs.finish_all([good, fail, good])
    for program in (first, last):
      chex.assert_trees_all_close(program.run(), jnp.zeros(3))
    self.assertEqual(
      programs.failure(error), "does not run: RuntimeError: no such kernel"
    )


class DeviceTest(parameterized.TestCase):
  @parameterized.parameters(("cpu", 1), ("gpu", 16), ("tpu", 16))
  def test_short_functions_are_looped_on_accelerators(self, platform, loops):
    with traced_for(platform):
      self.assertEqual(programs.default_loops(), loops)
      self.assertEqual(programs.default_loops(1e12), 1)

  @parameterized.parameters(
    ("cpu", "float32", None),
    ("gpu", "float32", "highest"),
    ("gpu", "bfloat16", None),
  )
  def test_float32_is_not_rounded(self, platform, dtype, expected):
    with traced_for(platform):
      with programs.exact_products(dtype):
        self.assertEqual(jax.config.jax_default_matmul_precision, expected)

  @parameterized.parameters("float32", "bfloat16")
  def test_matrix_peak_is_the_fastest_product(self, dtype):
    seconds = {32: 1e-3, 64: 1e-3}
    with (
      mock.patch.object(programs, "_CPU_SIZES", (32, 64)),
      mock.patch.object(programs, "_best_seconds", lambda n, _: seconds[n]),
    ):
      self.assertAlmostEqual(programs.matrix_peak(dtype), 2 * 64**3 / 1e-3)

  def test_products_are_timed(self):
    with mock.patch.object(programs, "_CPU_SIZES", (32,)):
      self.assertGreater(programs.matrix_peak("bfloat16"), 0)


if __name__ == "__main__":
  absltest.main()
