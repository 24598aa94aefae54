"""`bench attention`, what it shares with benchmarks/, and `bench model`."""

import functools
import json
import pathlib
import tempfile
from unittest import mock

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.cli import bench, bench_model
from moh_jax.cli.arguments.speed import HeadOptions, ModelOptions
from moh_jax.config.heads import HeadBudget
from moh_jax.ops import attention as ops
from moh_jax.ops.attention_forms import Form
from moh_jax.training import bench as bench_lib
from tests.cli import tiny_checkpoint
from tests.ops.devices import traced_for

_FIELDS = {
  *("device", "op", "mode", "length", "share", "implementation", "ms"),
  *("spread", "ratio_to_mha", "ratio_spread", "form", "computed_share"),
  *("units_per_second", "flops"),
  *("peak_share", "peak_bytes", "max_error", "fault", "every_head"),
  *("moved_bytes", "moved_by", "memory_share"),
}
_ARGV = "--lengths 16 --shares 50 --heads 4 --head-dim 8 --rounds 1".split()
_TINY = functools.partial(
  HeadOptions, lengths=(16,), heads=4, head_dim=8, rounds=1, shares=(50,)
)


class CommandTest(parameterized.TestCase):
  def _call(self, *argv):
    with mock.patch.object(bench_lib, "matrix_peak", lambda dtype: 1e15):
      return tiny_checkpoint.call("bench", *argv)

  def test_json_has_every_field_of_every_row(self):
    forms = "--modes", "forward", "--implementations", "packed"
    status, out, err = self._call("attention", *_ARGV, *forms, "--json", "-")
    self.assertEqual((status, err), (0, ""))
    self.assertLen(out.splitlines(), 1)
    report = json.loads(out)
    self.assertRegex(report["machine"]["commit"], r"^[0-9a-f]{7,}\+?$")
    self.assertEqual(report["matrix_peak"], 1e15)
    self.assertEqual(report["settings"]["head_dim"], 8)
    mha, packed = report["rows"]
    for row in (mha, packed):
      self.assertEqual(set(row), _FIELDS)
      self.assertEqual((row["op"], row["length"]), ("attention", 16))
      self.assertIsNone(row["fault"])
      self.assertLess(row["max_error"], 2e-6)
      for name in ("flops", "peak_bytes", "moved_bytes"):
        self.assertGreater(row[name], 0)
    self.assertEqual((mha["implementation"], packed["share"]), ("mha", 0.5))

  def test_prints_a_table(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    status, out, _ = self._call(
      *("attention", *_ARGV, "--modes", "forward,causal"),
      *("--implementations", "dense", "--json", root / "a.json"),
    )
    self.assertEqual(status, 0)
    self.assertRegex(
      out, r"(?m)^mode +length +share +implementation +form +computed +ms "
    )
    self.assertRegex(
      out, r"(?m)^forward +16 +100\.0% +mha +dense +100\.0% +\d+\.\d{3} "
    )
    self.assertRegex(out, r"(?m)^causal +16 +50\.0% +dense +dense +100\.0% ")
    self.assertRegex(
      out, r"(?m)^matrix peak: 1,000,000\.0 GFLOP/s \(float32\)$"
    )
    self.assertLen(json.loads((root / "a.json").read_text())["rows"], 4)

  def test_what_is_not_exact_is_named_and_fails(self):
    def wrong(*args, implementation, **options):
      out = ops.attention(*args, implementation="dense", **options)
      return out * (1.01 if implementation == "packed" else 1)

    with mock.patch.object(bench, "attention", wrong):
      status, out, err = self._call(
        *("attention", *_ARGV, "--modes", "forward"),
        *("--implementations", "packed"),
      )
    self.assertEqual(status, 1)
    self.assertIn("1.0e-02", out)
    self.assertEqual(
      err,
      "error: attention forward, length 16, share 50.0%, packed: relative "
      "error of the outputs 1.0e-02 is above 2e-06\n",
    )

  def test_model_has_its_metrics(self):
    measured = {
      "train_step": {"params_bytes": 1234567, "compile_seconds": 2.5},
      "rows": [],
      "peak_resident_bytes": 10,
    }
    with mock.patch.object(
      bench_model, "measure", return_value=measured
    ) as measure:
      status, out, err = self._call(
        *("model", "--model", "moh-llm-s-75", "--lengths", "32"),
        *("--compile-only", "--json", "-"),
      )
      _, text, _ = self._call("model", "--batch", "2")
    self.assertEqual((status, err), (0, ""))
    self.assertEqual(
      [call.args[0] for call in measure.call_args_list],
      [
        ModelOptions("moh-llm-s-75", lengths=(32,), compile_only=True),
        ModelOptions(batch=2),
      ],
    )
    report = json.loads(out)
    self.assertEqual(report["settings"]["model"], "moh-llm-s-75")
    self.assertEqual(report["train_step"], measured["train_step"])
    self.assertEqual(
      text,
      "train_step params_bytes: 1,234,567\ntrain_step compile_seconds: 2.5\n",
    )

  @parameterized.parameters(
    ("attention --lengths 0", "--lengths 0 must be at least 1"),
    ("attention --shares 90", "--shares 90 must be a whole number of the"),
    ("attention --modes back", "--modes 'back' must be one of forward"),
    (
      "attention --implementations dense,fast",
      "--implementations 'fast' must be one of auto",
    ),
    ("attention --kv-heads 3", "--kv-heads 3 must divide --heads 32"),
    ("model --model nope", "model 'nope' must be one of"),
    ("model --lengths 16", "--lengths 16 is for language models"),
    ("model --sampler-steps 0", "--sampler-steps 0 must be at least 1"),
    ("", "OP"),
    ("layer", "invalid choice: 'layer'"),
    ("attention --lengths a", "--lengths: 'a' must be integers"),
    ("attention --shares a", "--shares: 'a' must be percentages"),
  )
  def test_wrong_values_are_one_line_before_any_work(self, argv, message):
    with mock.patch.object(
      bench_lib, "matrix_peak", side_effect=AssertionError
    ):
      status, out, err = tiny_checkpoint.call("bench", *argv.split())
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn(message, err)

  def test_traceback_may_stand_behind_the_op(self):
    argv = ("bench", "attention", "--lengths", "0", "--traceback")
    status, _, err = tiny_checkpoint.call(*argv)
    self.assertEqual(status, 2)
    self.assertIn("Traceback (most recent call last)", err)


class OptionsTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"head_dim": -1}, "--head-dim -1 must be at least 1"),
    ({"rounds": 0}, "--rounds 0 must be at least 1"),
    ({"kv_heads": 0}, "--kv-heads 0 must be at least 1"),
    ({"shared": 33}, r"--shared 33 must be in \[0, 32\]"),
    (
      {"shares": (50, 90)},
      "--shares 90 must be a whole number of the 32 heads: a multiple of 3.125",
    ),
    ({"shares": (0.0,)}, "--shares 0 must be a whole number"),
    ({"shares": (150,)}, "--shares 150 must .* up to 100"),
    ({"shares": (float("nan"),)}, "--shares nan must"),
    ({"shares": (25,), "shared": 9}, "--shares 25 is 8 .* at least the 9"),
  )
  def test_wrong_values_are_named_with_what_is_allowed(self, given, message):
    with self.assertRaisesRegex(ValueError, message):
      HeadOptions(**given)

  @parameterized.parameters(
    (4, None, 50, (1, 1)), (4, None, 100, (1, 3)), (4, 0, 25, (0, 1)),
    (4, 2, 50, (2, 0)), (32, None, 62.5, (8, 12)), (3, None, 66.67, (0, 2)),
    (1, None, 100, (0, 1)),
  )  # fmt: skip
  def test_shares_become_head_splits(self, heads, shared, share, split):
    given = HeadOptions(heads=heads, shared=shared, shares=(share,))
    self.assertEqual(given.budgets(), [HeadBudget(heads, *split, 64)])


class RandomActiveTest(absltest.TestCase):
  def test_every_token_has_its_number_of_heads(self):
    active = bench.random_active(HeadBudget(8, 2, 3, 4), 2, 5)
    chex.assert_shape(active.mask, (2, 5, 8))
    chex.assert_trees_all_equal(active.mask.sum(-1), jnp.full((2, 5), 5))
    self.assertTrue(active.mask[..., :2].all())
    self.assertEqual(active.max_per_token, 5)
    self.assertFalse((active.mask == active.mask[:1, :1]).all())


class CompareFormsTest(parameterized.TestCase):
  """Which forms are compared, where each has its own name on a GPU."""

  def _compared(self, implementations, cannot=()):
    forms = {
      "dense": (Form("dense"), Form("dense")),
      "auto": (Form("cudnn"), Form("kernel", True, 64)),
      "kernel": (Form("kernel", False, 64), Form("kernel", True, 64)),
      "cudnn": (Form("cudnn"), Form("cudnn", True)),
      "packed": (Form("blocked"), Form("packed", True)),
    }

    def check(options, name):
      if name in cannot:
        raise ValueError(f"{name} is not for this")

    def splits(options, mode, length):
      for budget in (None, *options.budgets()):
        yield bench.Split(
          budget,
          form=lambda name, packs=budget is not None: forms[name][packs],
          evaluation=self._evaluation,
          args=(jnp.ones(3),),
          flops=1.0,
          expected=lambda: (jnp.ones(3), ()),
        )

    options = _TINY(implementations=implementations, modes=("forward",))
    with traced_for("gpu"):
      rows = bench.compare_forms(options, "attention", splits, check)
    return {(r.form, r.computed_share): r.fault for r in rows}

  def _evaluation(self, name):
    def run(x):
      if name == "packed":
        raise RuntimeError("too large")
      return x, ()

    return run

  def test_all_that_is_possible_and_one_of_equal_baselines(self):
    found = self._compared(None, cannot=("kernel",))
    self.assertEqual(
      found,
      {
        ("dense", 1.0): None,
        ("cudnn", 1.0): None,  # of "auto" and "cudnn"
        ("kernel", 0.5): None,  # that "auto" chooses
        ("packed", 0.5): "does not run: RuntimeError: too large",
        ("cudnn", 0.5): None,
      },
    )

  def test_a_form_that_is_asked_for_must_be_possible(self):
    with self.assertRaisesRegex(ValueError, "cudnn is not for this"):
      self._compared(("cudnn",), cannot=("cudnn",))
    with self.assertRaisesRegex(ValueError, "kernel needs an accelerator"):
      bench.compare_forms(
        _TINY(implementations=("kernel",)), "", None, lambda *_: None
      )


class MeasureTest(parameterized.TestCase):
  def _rows(self, **given):
    return bench.compare_forms(
      _TINY(**given), "attention", bench.splits, bench.check_shapes
    )

  def test_every_mode_length_share_and_form_has_a_row(self):
    modes = ("forward", "causal_forward_backward")
    rows = self._rows(
      lengths=(8, 16), modes=modes, implementations=("packed",), kv_heads=2
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

  def test_least_bytes_are_rows_and_keys_once_a_pass(self):
    options = _TINY(batch=2, kv_heads=1)
    for mode, passes in (("forward", 1), ("causal_forward_backward", 3)):
      split = list(bench.splits(options, mode, 16))[1]
      # 16 active pairs of 2 x 16 x 4 a sequence; queries and outputs, keys and
      # values of 8 float32.
      for packs, pairs in ((True, 64), (False, 128)):
        expected = passes * 2 * (pairs + 32) * 8 * 4
        self.assertEqual(split.moved(packs), expected)

  def test_bfloat16_has_its_own_limits(self):
    rows = self._rows(
      modes=("forward_backward",), dtype="bfloat16", implementations=("packed",)
    )
    self.assertEqual([row.name for row in rows if row.fault], [])
    self.assertGreater(rows[-1].max_error, 1e-5)

  def test_wrong_gradients_are_found(self):
    @jax.custom_vjp
    def spoil(x):
      return x

    spoil.defvjp(lambda x: (x, None), lambda _, grad: (grad * 1.01,))

    def wrong(*args, implementation, **options):
      out = ops.attention(*args, implementation="dense", **options)
      return spoil(out) if implementation == "packed" else out

    with mock.patch.object(bench, "attention", wrong):
      rows = self._rows(
        modes=("forward_backward",), implementations=("packed",)
      )
    self.assertEqual([row.fault is None for row in rows], [True, False])
    self.assertIn("relative error of the gradients 1.0e-02", rows[-1].fault)

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
