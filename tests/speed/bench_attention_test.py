import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.ops import attention as ops
from moh_jax.speed import attention as bench
from moh_jax.speed import programs
from moh_jax.speed.options import SequenceOptions

_TINY = functools.partial(
  SequenceOptions, lengths=(16,), heads=4, head_dim=8, rounds=1, shares=(50,)
)


class FlopsTest(parameterized.TestCase):
  @parameterized.parameters(
    # 6 pairs, 8 keys, 2 products, 3 multiplications and additions each.
    ("forward", 6 * 8 * 2 * 3 * 2),
    ("forward_backward", 3 * 6 * 8 * 2 * 3 * 2),
  )
  def test_counts_two_products(self, mode, expected):
    self.assertEqual(bench.attention_flops(6, 8, 3, mode), expected)

  @parameterized.parameters(("causal", 1), ("causal_forward_backward", 3))
  def test_causal_tokens_see_those_before_them(self, mode, passes):
    seen = 1 + 2 + 3 + 4  # of 4 tokens
    flops = bench.attention_flops(2 * 4, 4, 5, mode)
    self.assertEqual(flops, passes * 2 * seen * 2 * 2 * 5)


class BytesTest(parameterized.TestCase):
  @parameterized.parameters(("forward", 1), ("causal_forward_backward", 3))
  def test_counts_rows_and_keys_once_a_pass(self, mode, passes):
    # 6 queries and outputs, 4 keys and values, of 5 numbers of 2 bytes each.
    numbers = 2 * 6 + 2 * 4
    self.assertEqual(
      bench.attention_bytes(6, 4, 5, 2, mode), passes * numbers * 5 * 2
    )


class AbsentDeviceTest(absltest.TestCase):
  def test_programs_for_a_device_that_is_not_here_have_no_times(self):
    mesh = jax.make_mesh(
      (1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    with jax.set_mesh(mesh):
      options = _TINY(implementations=("packed",), modes=("forward_backward",))
      with (
        mock.patch.object(programs, "is_absent", lambda: True),
        mock.patch.object(bench, "is_absent", lambda: True),
      ):
        rows = bench.measure(options)
    self.assertEqual(
      [(row.implementation, row.every_head) for row in rows],
      [("dense", True), ("packed", False)],
    )
    for row in rows:
      self.assertFalse(row.measured)
      self.assertIsNone(row.ms)
      self.assertIsNone(row.ratio_to_mha)
      self.assertIsNone(row.fault)
      self.assertGreater(row.flops, 0)
      self.assertGreater(row.peak_bytes, row.temporary_bytes)
      self.assertGreater(row.moved_bytes, 0)


class RandomActiveTest(absltest.TestCase):
  def test_every_token_has_its_number_of_heads(self):
    active = bench.random_active(HeadBudget(8, 2, 3, 4), 2, 5)
    chex.assert_shape(active.mask, (2, 5, 8))
    chex.assert_trees_all_equal(active.mask.sum(-1), jnp.full((2, 5), 5))
    self.assertTrue(active.mask[..., :2].all())
    self.assertEqual(active.max_per_token, 5)
    self.assertFalse((active.mask == active.mask[:1, :1]).all())


class MeasureTest(parameterized.TestCase):
  def _rows(self, **given):
    return bench.measure(_TINY(**given))

  def test_every_mode_length_share_and_form_has_a_row(self):
    modes = ("forward", "causal_forward_backward")
    rows = self._rows(
      lengths=(8, 16),
      modes=modes,
      implementations=("packed",),
      kv_heads=2,
    )
    forms = [(1.0, "mha"), (0.5, "packed")]
    self.assertEqual({r.computed_share for r in rows}, {1.0, 0.5})
    self.assertEqual(
      [(r.length, r.mode, r.share, r.implementation) for r in rows],
      [(n, mode, *form) for n in (8, 16) for mode in modes for form in forms],
    )
    self.assertEqual([r.name for r in rows if r.fault], [])

  def test_flops_are_those_of_the_heads_at_work(self):
    rows = self._rows(batch=2, modes=("forward",), implementations=("dense",))
    whole = 2 * 16 * 4 * 16 * 2 * 2 * 8
    self.assertEqual([row.flops for row in rows], [whole, whole / 2])
    for row in rows:
      self.assertAlmostEqual(row.rate, row.flops / row.ms * 1e3)

  def test_bfloat16_has_its_own_limits(self):
    rows = self._rows(
      modes=("forward_backward",), dtype="bfloat16", implementations=("packed",)
    )
    self.assertEqual([row.name for row in rows if row.fault], [])
    self.assertGreater(rows[-1].max_error, 1e-5)

  @parameterized.parameters(
    ("forward", "outputs"), ("forward_backward", "gradients")
  )
  def test_wrong_form_is_found(self, mode, part):
    @jax.custom_vjp
    def spoil(x):
      return x * 1.01 if part == "outputs" else x

    spoil.defvjp(lambda x: (spoil(x), None), lambda _, grad: (grad * 1.01,))

    def wrong(*args, implementation, **options):
      out = ops.attention(*args, implementation="dense", **options)
      return spoil(out) if implementation == "packed" else out

    with mock.patch.object(bench, "attention", wrong):
      rows = self._rows(modes=(mode,), implementations=("packed",))
    self.assertEqual([row.fault is None for row in rows], [True, False])
    self.assertIn(f"relative error of the {part} 1.0e-02", rows[-1].fault)
    self.assertAlmostEqual(rows[-1].max_error, 0.01, places=5)

  def test_outputs_of_heads_that_are_not_at_work_do_not_matter(self):
    def wrong(*args, active, **options):
      out = ops.attention(*args, active=active, **options)
      if active is None:
        return out
      return jnp.where(active.mask[..., None], out, jnp.nan)

    with mock.patch.object(bench, "attention", wrong):
      rows = self._rows(modes=("forward",), implementations=("dense",))
    self.assertEqual([row.fault for row in rows], [None, None])


if __name__ == "__main__":
  absltest.main()
