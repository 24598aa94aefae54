from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.config.heads import HeadBudget
from moh_jax.ops import attention
from moh_jax.speed.options import DecodeOptions, LayerOptions, SequenceOptions
from tests.ops.devices import traced_for


class OptionsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"lengths": (16, 0)}, "--lengths 0 must be at least 1"),
    ({"heads": 0}, "--heads 0 must be at least 1"),
    ({"head_dim": -1}, "--head-dim -1 must be at least 1"),
    ({"batch": 0}, "--batch 0 must be at least 1"),
    ({"rounds": 0}, "--rounds 0 must be at least 1"),
    ({"kv_heads": 0}, "--kv-heads 0 must be at least 1"),
    ({"kv_heads": 3}, "--kv-heads 3 must divide --heads 32"),
    ({"shared": 33}, r"--shared 33 must be in \[0, 32\]"),
    (
      {"shares": (50, 90)},
      "--shares 90 must be a whole number of the 32 heads: a multiple of 3.125",
    ),
    ({"shares": (0,)}, "--shares 0 must be a whole number"),
    ({"shares": (150,)}, "--shares 150 must .* up to 100"),
    ({"shares": (-50,)}, "--shares -50 must"),
    ({"shares": (float("nan"),)}, "--shares nan must"),
    ({"shares": (25,), "shared": 9}, "--shares 25 is 8 .* at least the 9"),
    (
      {"implementations": ("dense", "fast")},
      "--implementations 'fast' must be one of auto, dense, packed",
    ),
    ({"implementations": ("kernel",)}, "--implementations kernel needs an acc"),
    ({"modes": ("back",)}, "--modes 'back' must be one of forward, forward_b"),
  )
  def test_wrong_values_are_named_with_what_is_allowed(self, given, message):
    with self.assertRaisesRegex(ValueError, message):
      SequenceOptions(**given)

  def test_options_of_one_op_are_checked(self):
    with self.assertRaisesRegex(ValueError, "--width 0 must be at least 1"):
      LayerOptions(width=0)
    with self.assertRaisesRegex(ValueError, "'packed' must be one of dense"):
      DecodeOptions(implementations=("packed",))
    with self.assertRaisesRegex(ValueError, "kernel needs an accelerator"):
      DecodeOptions(implementations=("kernel",))

  @parameterized.parameters(
    (4, None, 50, (1, 1)),
    (4, None, 100, (1, 3)),
    (4, 0, 25, (0, 1)),
    (4, 2, 50, (2, 0)),
    (32, None, 62.5, (8, 12)),
    (3, None, 66.67, (0, 2)),
    (1, None, 100, (0, 1)),
  )
  def test_shares_become_head_splits(self, heads, shared, share, split):
    given = SequenceOptions(heads=heads, shared=shared, shares=(share,))
    self.assertEqual(given.budgets(), [HeadBudget(heads, *split, 64)])

  def test_dense_is_always_a_baseline_and_nothing_runs_twice(self):
    given = SequenceOptions(implementations=("packed", "auto", "packed"))
    self.assertEqual(given.compared, ("packed", "auto"))
    self.assertEqual(given.baselines, ("dense", "auto"))

  def test_by_default_what_the_device_can_do_is_compared(self):
    given = SequenceOptions()
    self.assertEqual(set(given.compared), {"packed", "auto"})

    def attend(q, k, v, *, implementation, **options):
      del k, v, options
      if implementation == "cudnn":
        raise ValueError(f"cudnn cannot do {q.dtype.name}")
      return q

    with (
      traced_for("gpu"),
      mock.patch.object(attention, "attention", attend),
    ):
      self.assertEqual(
        set(SequenceOptions().compared), {"packed", "auto", "kernel"}
      )
      self.assertEqual(SequenceOptions().baselines, ("dense", "auto", "kernel"))
      with self.assertRaisesRegex(ValueError, "cudnn cannot do float32"):
        SequenceOptions(implementations=("cudnn",))

  def test_kernel_reads_the_caches_that_it_can(self):
    self.assertEqual(DecodeOptions().compared, ())
    with traced_for("gpu"):
      self.assertEqual(DecodeOptions().compared, ("kernel",))
      self.assertEqual(DecodeOptions().baselines, ("dense", "kernel"))
      self.assertEqual(DecodeOptions(cache_dtype="int8").compared, ("kernel",))
      wide = {"head_dim": 320}
      self.assertEqual(DecodeOptions(**wide).compared, ())
      self.assertEqual(DecodeOptions(**wide).baselines, ("dense",))
      with self.assertRaisesRegex(ValueError, "=320 must be at most 256"):
        DecodeOptions(implementations=("kernel",), **wide)

  def test_width_is_that_of_the_heads_by_default(self):
    self.assertEqual(LayerOptions(heads=4, head_dim=8).features, 32)
    self.assertEqual(LayerOptions(width=20).features, 20)


if __name__ == "__main__":
  absltest.main()
