import functools
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.config import CACHE_DTYPES
from moh_jax.ops.cached_attention import cached_attention
from moh_jax.speed import decode as bench
from moh_jax.speed.options import DecodeOptions
from tests.ops.devices import traced_for

_TINY = functools.partial(
  DecodeOptions, lengths=(16,), heads=4, head_dim=8, rounds=1, shares=(50,)
)


class OptionsTest(absltest.TestCase):
  def test_dtype_of_the_cache_is_a_known_one(self):
    message = "--cache-dtype 'int4' must be one of float32, bfloat16, int8"
    with self.assertRaisesRegex(ValueError, message):
      _TINY(cache_dtype="int4")

  def test_kernel_names_the_flag_that_it_refuses(self):
    with (
      traced_for("gpu"),
      self.assertRaisesRegex(ValueError, "--head-dim 320 .*256"),
    ):
      _TINY(head_dim=320, implementations=("kernel",))


class MeasureTest(parameterized.TestCase):
  def test_gated_attention_stands_beside_multi_head_attention(self):
    rows = bench.measure(
      _TINY(
        lengths=(16, 32),
        shares=(50, 75),
        batch=3,
        kv_heads=2,
        implementations=("dense",),
      ),
    )
    forms = [(1.0, "mha"), (0.5, "dense"), (0.75, "dense")]
    self.assertEqual(
      [(r.length, r.share, r.implementation) for r in rows],
      [(n, *form) for n in (16, 32) for form in forms],
    )
    self.assertEqual({r.mode for r in rows}, {"decode"})
    self.assertEqual([r.name for r in rows if r.fault], [])
    # 3 texts, 4 heads, 16 slots, 2 products of 8 multiplications.
    self.assertEqual(rows[0].flops, 2 * 3 * 4 * 16 * 2 * 8)
    self.assertEqual(rows[1].flops, rows[0].flops / 2)

  @parameterized.parameters(*CACHE_DTYPES)
  def test_every_cache_is_exact(self, dtype):
    options = _TINY(cache_dtype=dtype, implementations=("dense",))
    rows = bench.measure(options)
    self.assertEqual([row.fault for row in rows], [None, None])

  @parameterized.parameters("float32", "bfloat16")
  def test_kernel_is_exact(self, dtype):
    # A CPU interprets it, for which nobody may ask.
    with mock.patch.object(DecodeOptions, "check_possible"):
      options = _TINY(
        implementations=("kernel",), kv_heads=2, batch=2, cache_dtype=dtype
      )
    rows = bench.measure(options)
    self.assertEqual(
      [(row.implementation, row.every_head, row.fault) for row in rows],
      [("mha", True, None), ("kernel", False, None)],
    )
    self.assertEqual(rows[1].flops, rows[0].flops / 2)

  def test_counted_bytes_are_those_of_the_heads_that_are_read(self):
    options = _TINY(batch=3)
    whole = 3 * 4 * 16 * 8 * 4 * 2  # texts, heads, slots, dim, bytes, k and v
    self.assertEqual(bench.decode_bytes(options, 16, 1.0), whole)
    self.assertEqual(bench.decode_bytes(options, 16, 0.5), whole / 2)
    int8 = _TINY(batch=3, cache_dtype="int8")
    numbers, scales = whole / 4, whole / 4 / 8 * 4
    self.assertEqual(bench.decode_bytes(int8, 16, 1.0), numbers + scales)

  @parameterized.parameters(
    # Key/value heads, shared heads, percent: the share that is read.
    (8, 2, 50, 0.5),
    (8, 2, 100, 1.0),
    # Of 4 pairs the first has shared heads; two of 6 others miss both of a
    # pair in 6 of 15 cases.
    (4, 2, 50, 1 / 4 + 3 / 4 * (1 - 6 / 15)),
    (4, 1, 12.5, 1 / 4),
    (2, 8, 100, 1.0),
  )
  def test_keys_are_read_for_any_active_head(
    self, kv_heads, shared, percent, expected
  ):
    options = _TINY(
      heads=8, kv_heads=kv_heads, shared=shared, shares=(percent,)
    )
    (budget,) = options.budgets()
    self.assertAlmostEqual(bench._read(options, budget), expected)

  def test_wrong_form_is_found(self):
    def wrong(*args, active, **options):
      out = cached_attention(*args, active=active, **options)
      return out if active is None else out * 1.01

    with mock.patch.object(bench, "cached_attention", wrong):
      rows = bench.measure(_TINY(implementations=("dense",)))
    self.assertEqual([row.fault is None for row in rows], [True, False])


if __name__ == "__main__":
  absltest.main()
