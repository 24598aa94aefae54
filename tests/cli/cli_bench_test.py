"""`bench`: attention with what it shares with benchmarks/, models, input."""

import dataclasses
import itertools
import json
import math
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from moh_jax.cli import bench_attention, run_speed
from moh_jax.cli.bench import HeadOptions, ModelOptions, bench_run
from moh_jax.config.heads import HeadBudget, Units
from moh_jax.config.parse import changed
from moh_jax.ops import attention as ops
from tests.cli import tiny_checkpoint
from tests.data.tiny_images import put
from tests.training import tiny


@jax.custom_vjp
def _spoil_gradients(x):
  return x


_spoil_gradients.defvjp(lambda x: (x, None), lambda _, grad: (grad * 1.01,))


class AttentionTest(tiny_checkpoint.CommandTest):
  COMMAND = (
    "bench attention --lengths 16 --shares 50 --heads 4 --head-dim 8 --rounds 1"
  )

  @pytest.mark.integration
  def test_every_mode_length_share_and_form_has_a_row(self):
    modes = ("forward", "causal_forward_backward")
    argv = "--lengths=8,16", "--modes", ",".join(modes), "--kv-heads=2"
    report = self.report(*argv)
    self.assertRegex(report["machine"]["commit"], r"^[0-9a-f]{7,}\+?$")
    self.assertEqual(report["settings"]["head_dim"], 8)
    # Without what a CPU lacks, and of equal baselines one.
    forms = [(1.0, "mha"), (0.5, "auto"), (0.5, "packed")]
    names = ("length", "mode", "share", "implementation")
    self.assertEqual(
      [tuple(row[name] for name in names) for row in report["rows"]],
      [(n, mode, *form) for n in (8, 16) for mode in modes for form in forms],
    )
    for row in report["rows"]:
      self.assertEqual((row["op"], row["fault"]), ("attention", None))
      packs = row["implementation"] == "packed"
      self.assertEqual(row["computed_share"], 0.5 if packs else 1.0)
      self.assertLess(row["max_error"], 2e-6)
      for name in ("compile_seconds", "peak_bytes", "ratio_to_mha"):
        self.assertGreater(row[name], 0)

  @parameterized.parameters("free", "per_group", "whole_group")
  @pytest.mark.integration
  def test_structures_are_exact(self, structure):
    argv = "--kv-heads=2", "--shared=2", "--structure", structure
    more = "--heads=4", "--modes=causal_forward_backward", "--shares=50"
    if structure == "per_group":  # 1 of 4 heads of each group is shared
      more = *more, "--heads=8"
    rows = self.report(*argv, *more)["rows"]
    packed = next(x for x in rows if x["implementation"] == "packed")
    self.assertEqual(packed["computed_share"], 0.5)
    for row in rows:
      self.assertLess(row["max_error"], 2e-6)

  def test_bfloat16_has_its_own_limits_and_idle_heads_do_not_matter(self):
    def wrong(*args, active, **options):
      out = ops.attention(*args, active=active, **options)
      if active is None:
        return out
      return jnp.where(active.mask[..., None], out, jnp.nan)

    argv = "--dtype=bfloat16", "--modes=forward", "--implementations=dense"
    with mock.patch.object(bench_attention, "attention", wrong):
      rows = self.report(*argv)["rows"]
    self.assertEqual([row["fault"] for row in rows], [None, None])
    self.assertGreater(rows[-1]["max_error"], 1e-5)

  @parameterized.parameters(
    ("forward", lambda x: x * 1.01, "relative error of the outputs 1.0e-02 is"),
    ("forward_backward", _spoil_gradients, ".* of the gradients 1.0e-02 is"),
    ("forward", mock.Mock(side_effect=RuntimeError("too large")),
     "does not run: RuntimeError: too large"),
  )  # fmt: skip
  def test_what_fails_or_is_not_exact_is_named(self, mode, spoil, message):
    def wrong(*args, implementation, **options):
      out = ops.attention(*args, implementation="dense", **options)
      return spoil(out) if implementation == "packed" else out

    argv = "--modes", mode, "--implementations=packed"
    with mock.patch.object(bench_attention, "attention", wrong):
      status, _, err = self.call(*argv)
    self.assertEqual(status, 1)
    case = f"error: attention {mode}, length 16, share 50.0%, packed"
    self.assertRegex(err, f"^{case}: {message}.*\n$")


class HeadOptionsTest(parameterized.TestCase):
  @parameterized.parameters(
    (4, None, 50, (1, 1)), (4, None, 100, (1, 3)), (4, 0, 25, (0, 1)),
    (4, 2, 50, (2, 0)), (32, None, 62.5, (8, 12)), (3, None, 66.67, (0, 2)),
    (1, None, 100, (0, 1)),
  )  # fmt: skip
  def test_shares_become_head_splits(self, heads, shared, share, split):
    given = HeadOptions(heads=heads, shared=shared, shares=(share,))
    self.assertEqual(given.budgets(), [HeadBudget(heads, *split, 64)])

  def test_every_token_has_its_number_of_heads(self):
    active = bench_attention.random_active(Units(HeadBudget(8, 2, 3, 4)), 2, 5)
    chex.assert_trees_all_equal(active.mask.sum(-1), jnp.full((2, 5), 5))
    self.assertTrue(active.mask[..., :2].all())
    self.assertFalse((active.mask == active.mask[:1, :1]).all())


class ModelTest(parameterized.TestCase):
  def test_a_config_or_checkpoint_says_the_model(self):
    vit = tiny_checkpoint.stored("vit")
    for argv, model in (
      (("--config", "tests/faults/tiny_run.py:llm"), tiny.LLM),
      (("--checkpoint", vit), tiny_checkpoint.CONFIG.model),
    ):
      with mock.patch.object(
        run_speed, "measure_model", return_value=[]
      ) as measure:
        tiny_checkpoint.done("bench", "model", *argv, "--rounds=3")
      run, _, rounds = measure.call_args.args
      self.assertEqual((run.model.family, rounds), (model.family, 3))
      self.assertEqual(run.model.num_heads, model.num_heads)
      self.assertEqual(run.data.batch_size, 4)

  @pytest.mark.integration
  def test_language_model_is_scored_and_writes(self):
    layer = {"num_heads": (4,), "shared_heads": (1,), "top_k": (2,)}
    run = bench_run(dataclasses.replace(tiny.LLM, **layer), 2)
    with mock.patch.object(run_speed, "_BATCHES", (1,)):
      rows = run_speed.measure_model(
        changed(run, ("data.sequence_length=16",)), 16, rounds=1
      )
    modes = ["forward", "forward_backward", "prefill", "decode_1"]
    self.assertEqual([row.mode for row in rows[::2]], modes)
    for moh, mha in zip(rows[::2], rows[1::2], strict=True):
      self.assertEqual((moh.mode, mha.implementation), (mha.mode, "mha"))
      self.assertAlmostEqual(moh.ratio_to_mha, moh.ms / mha.ms)
      self.assertEqual((mha.share, mha.ratio_to_mha), (1.0, 1.0))
      self.assertTrue(math.isfinite(moh.units_per_second))
      # 16 tokens are too few to leave heads out.
      self.assertEqual((moh.length, moh.share), (16, 0.75))

  @parameterized.parameters(("moh-vit-s80", 64), ("moh-dit-s2-90", 16))
  def test_lengths_are_sides_of_images(self, model, side):
    options = ModelOptions(model=model, lengths=(side,))
    [(length, run)] = options.runs().items()
    self.assertEqual((length, run.model.input_shape[:2]), (side, (side, side)))

  @pytest.mark.integration
  def test_the_changes_are_of_what_is_timed(self):
    # 1 is no multiple of the file's optim.accumulation, and there are no data.
    for name, more in (("llm", ()), ("images", ("model.depths=1,1,1",))):
      options = ModelOptions(
        config=f"configs/{name}.py", changes=("data.batch_size=1", *more)
      )
      [run] = options.runs().values()
      self.assertEqual(run.data.batch_size, 1)


class InputTest(tiny_checkpoint.CommandTest):
  COMMAND = "bench input --config tests/faults/tiny_run.py:vit"

  @pytest.mark.integration
  def test_stages_of_images_and_the_bottleneck(self):
    splits = itertools.product(("train", "val"), range(10))
    put(self.root, *(f"{split}/c{label}/1.png" for split, label in splits))
    file = self.root / "out.json"
    out = self.done(
      *("--config.data.source=image_folder", "--batches=2", "--steps=3"),
      *(f"--config.data.path={self.root}", "--json", file),
    )
    measured = json.loads(file.read_text())
    rates = measured["examples_per_second"]
    self.assertEqual(
      list(rates),
      ["read", "decode", "transform", "batch", "input", "to device", "step"],
    )
    self.assertGreater(min(rates.values()), 0)
    slowest = min(("input", "to device", "step"), key=rates.get)
    self.assertStartsWith(measured["bottleneck"], slowest)
    self.assertIn(f"bottleneck: {measured['bottleneck']}", out)
