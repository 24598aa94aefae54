"""The card's stages, tuned tiles, steps that fill it, crossovers, Amdahl."""

import contextlib
import io
import itertools
import json
import pathlib
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from benchmarks import card, crossing, step, tiles
from moh_jax.cli import bench_attention
from moh_jax.ops import attention as table
from moh_jax.ops.attention import LENGTHS, Crossover, largest_share
from moh_jax.ops.attention_forms import AttentionCase
from moh_jax.ops.kernels.attention import read
from moh_jax.ops.kernels.problem import BlockSizes, Key, Tile
from moh_jax.ops.target import Target
from moh_jax.training import bench
from moh_jax.training.bench import Program, Row
from tests.cli.tiny_checkpoint import call
from tests.ops import devices
from tests.ops.devices import traced_for
from tests.training import tiny

_TINY = dict(
  heads=(4, "float32", "50", 1), dims=(8,), lengths=(256,), layers=(32,),
  slots=(16,), exact=(("float32", (8,)),), models=(), tokens=256, texts=2,
)  # fmt: skip


class CardTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(self.create_tempdir().full_path) / "a card"
    self.enterContext(mock.patch.dict(card.SHAPES, _TINY))

  def _stages(self, only):
    every = card.stages(self.out)
    chosen = [stage for stage in every if stage[0].startswith(only)]
    with mock.patch.object(card, "stages", lambda _: chosen):
      return call("--out", self.out, main=card.main)

  def test_a_failing_stage_is_one_line_and_the_status(self):
    wrong = {"form": "packed", "case": "causal", "fault": "above 1e-05"}
    wrong["max_error"] = 1.0
    with (
      mock.patch.object(card.decode, "splits", side_effect=OSError("no\ndisk")),
      mock.patch.object(card.exact, "measure", lambda *_: [wrong]),
    ):
      status, out, err = self._stages(("exact", "decode"))
    self.assertEqual(status, 1)
    self.assertIn("error: exact_float32_8: causal: above 1e-05\n", err)
    self.assertIn("error: decode_8_16: error: no disk\n", err)
    self.assertIn("decode_8_16 failed: error: no disk\n", out)
    names = [path.name for path in self.out.glob("*.json")]
    self.assertEqual(names, ["exact_float32_8.json"])

  def test_results_of_another_device_are_refused_before_any_work(self):
    self.out.mkdir()
    entry = {"machine": {"device": "NVIDIA X"}, "rows": []}
    (self.out / "core_8_forward_256.json").write_text(json.dumps(entry))
    status, out, err = self._stages(())
    self.assertEqual((status, out), (2, ""))
    self.assertRegex(err, r"^error: --out .* holds results of 'NVIDIA X'")


class StagesTest(absltest.TestCase):
  def test_every_stage_has_options_that_its_program_takes(self):
    folder = pathlib.Path(self.create_tempdir().full_path) / "a card"
    folder.mkdir()
    tile = BlockSizes(*[Tile(64, 64)] * 3)
    with (
      traced_for("gpu"),
      devices.with_triton(),
      mock.patch.object(
        bench_attention, "compare_forms", return_value=[]
      ) as run,
      mock.patch.object(step, "measure", return_value={"batch": 1}),
      mock.patch.object(step, "compilation_cache"),
      mock.patch.object(card.exact, "measure", return_value=[]),
      mock.patch.object(tiles, "tune", return_value=tile),
    ):
      for name, program, argv in card.stages(folder):
        status, _, err = call(*argv, main=program)
        self.assertEqual((status, err), (0, ""), name)
        self.assertTrue((folder / f"{name}.json").exists())
    options = [call.args[0] for call in run.call_args_list]
    self.assertEqual({one.dtype for one in options}, {"bfloat16"})
    self.assertEqual({one.heads for one in options}, {32})


class TilesTest(parameterized.TestCase):
  _WORKLOAD = tiles.Workload(16, "float32", 1, 16, 2, 1, rounds=1)

  def _tune(self, backend, known, **options):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
      best = tiles.tune(self._WORKLOAD, backend, known, **options)
    return best, out.getvalue().splitlines()

  @parameterized.parameters(("triton", 2), ("mosaic_tpu", 1))
  @pytest.mark.integration
  def test_runs_every_tile_in_every_kernel(self, backend, count):
    devices.need(backend)
    known = [Tile(16, 16), Tile(16, 8)][:count]
    _, lines = self._tune(backend, known, interpret=True)
    self.assertLen(lines, 3 * count)
    for line in lines:
      self.assertRegex(line, r"^(forward|dq|dkv) R=16 Tile.*: \d+\.\d+ ms$")

  @parameterized.parameters((9.0, "baa"), (1.0, "ccb"))
  def test_the_smallest_times_win(self, forward_of_32, expected):
    named = {"a": Tile(16, 16), "b": Tile(16, 32), "c": Tile(32, 16)}
    # Of blocks of 16 rows, the least add up to 6; of 32, to 4.5 or 12.5.
    of_16 = [5.0, 3.0], [2.0, 4.0], [1.0, 6.0]
    of_32 = [forward_of_32], [4.0, 3.0, 2.0], [2.0, 1.5, 3.0]
    turns = iter((*of_16, *of_32))

    def interleaved(runs, rounds):
      self.assertEqual(rounds, 1)
      self.assertEqual({one.loops for one in runs.values()}, {4})
      return {tile: bench.Timing(x, 0) for tile, x in zip(runs, next(turns))}

    nothing = Program(lambda: None, 4)
    with (
      mock.patch.object(bench, "compile_program", return_value=nothing),
      mock.patch.object(bench, "interleaved", interleaved),
    ):
      best, lines = self._tune("triton", named.values())
    self.assertEqual(best, BlockSizes(*(named[name] for name in expected)))
    self.assertLen(lines, 2 + 2 + 2 + 1 + 3 + 3)


class TilesCommandTest(absltest.TestCase):
  def test_what_was_measured_joins_what_the_file_had(self):
    out = pathlib.Path(self.create_tempdir()) / "tiles.json"

    def tuned(*argv, found):
      """Exit status, stderr, and what is asked of `tune`, which finds rows."""
      sizes = [BlockSizes(*[Tile(rows, 64)] * 3) for rows in found]
      with (
        traced_for("gpu", "GPU X"),
        devices.with_triton(),
        mock.patch.object(tiles, "tune", side_effect=sizes) as tune,
      ):
        status, _, err = call("--out", out, *argv, main=tiles.main)
      return status, err, [one.args for one in tune.call_args_list]

    *result, asked = tuned("--head-dim", 64, 72, found=(16, 32))
    self.assertEqual(result, [0, ""])
    self.assertEqual([one[0].head_dim for one in asked], [64, 72])
    float32 = "--dtype=float32", "--near"
    *_, asked = tuned("--head-dim=64", *float32, found=(64,))
    self.assertLess(len(asked[0][2]), 10)
    tuned("--head-dim=72", found=(128,))
    found = {key: sizes.dq.rows for key, sizes in read(out).items()}
    self.assertEqual(
      found,
      {
        Key("triton", "GPU X", 64, "bfloat16"): 16,
        Key("triton", "GPU X", 72, "bfloat16"): 128,
        Key("triton", "GPU X", 64, "float32"): 64,
      },
    )
    with mock.patch("os.fsync", side_effect=OSError("No space left")):
      *result, _ = tuned("--head-dim=64", found=(256,))
    self.assertEqual(result, [2, "error: No space left\n"])
    self.assertLen(read(out), 3)  # the old file


class StepTest(absltest.TestCase):
  @pytest.mark.integration
  def test_step_has_its_figures(self):
    run = tiny.llm_config(mesh={"data": -1})
    with mock.patch.object(step, "published_peak", lambda kind: 4e9):
      row = step.measure(run, 1)
    seconds, tokens = row["step_ms"] / 1e3, run.data.sequence_length
    expected = run.data.batch_size * tokens / seconds
    self.assertAlmostEqual(row["units_per_second"], expected)
    self.assertAlmostEqual(row["mfu"], row["flops"] / seconds / 4e9)


def _row(length, share, ratio, form="kernel", mode="forward", **changes):
  fields = {"computed_share": share, "ratio_to_mha": ratio, **changes}
  return Row("NVIDIA X", "attention", mode, length, share, form, **fields)


class CrossingTest(parameterized.TestCase):
  def _entries(self, rows, head_dim=64):
    settings = {"head_dim": head_dim, "dtype": "bfloat16"}
    result = {"settings": settings, "rows": [vars(row) for row in rows]}
    with traced_for("gpu", "NVIDIA H100"), devices.with_triton():
      return crossing.crossovers([result])

  @parameterized.parameters(
    ([(0.5, 0.6), (0.75, 0.9), (0.9, 1.2)], 0.8),
    ([(0.9, 1.2), (0.5, 0.6), (0.75, 0.9)], 0.8),  # in any order
    ([(0.5, 1.2), (0.75, 1.8)], 0.42),  # below all
    ([(0.5, 0.5), (0.75, 0.75), (0.9, 0.9)], 1.0),  # above all
    ([(0.5, 3.0), (0.75, 3.1)], 0.0), ([(0.5, 0.1), (0.75, 0.2)], 1.0),
    ([(0.5, 1.0), (0.75, 1.5)], 0.5), ([(0.5, 0.9)], 0.5), ([(0.5, 1.1)], 0.0),
    ([(0.5, 0.9), (0.75, 0.8)], 0.75),  # noise
    ([(0.5, 1.2), (0.75, 1.1)], 0.0),
  )  # fmt: skip
  def test_is_where_the_ratio_is_one(self, points, expected):
    self.assertAlmostEqual(crossing.crossing(points), expected, places=2)

  def test_lengths_that_were_not_measured_are_filled_in(self):
    ratios = ((512, 0.5, 1.0), (512, 0.75, 1.5), (2048, 0.5, 0.7))
    ratios += ((2048, 0.75, 0.95), (2048, 0.9, 1.1))
    (entry,) = self._entries([_row(*ratio) for ratio in ratios])
    self.assertEqual(LENGTHS[:4], (256, 512, 1024, 2048))
    # The crossing at 2,048 is at 0.8; 1,024 is half way there from 512.
    shares = [0.0, 0.5, 0.65, 0.8, 0.8, 0.8, 0.8]
    kind = "NVIDIA X", "mosaic_gpu", ["bfloat16"], 64, False
    self.assertEqual(entry, Crossover(*kind, shares, True))

  @parameterized.parameters((64, "mosaic_gpu"), (72, "triton"))
  def test_causal_has_an_entry_of_the_kernel_that_ran(self, dim, kernel):
    cases = itertools.product(("forward", "causal"), (0.5, 0.75))
    rows = [_row(256, s, s + 0.1, mode=mode) for mode, s in cases]
    entries = self._entries([*rows, _row(256, 0.5, 0.5, "packed")], dim)
    self.assertEqual(
      [(entry.backend, entry.causal) for entry in entries],
      [("xla", False), (kernel, False), (kernel, True)],
    )

  def test_rows_that_tell_nothing_are_left_out(self):
    rows = [
      _row(256, 0.5, 0.5, computed_share=1.0),
      _row(256, 0.5, None),
      _row(256, 0.5, 0.5, fault="relative error"),
      _row(256, 0.5, 0.5, form="auto"),
    ]
    self.assertEqual(self._entries(rows), [])

  def test_printed_lines_are_entries_that_the_library_uses(self):
    rows = [_row(256, 0.5, 0.6), _row(256, 0.75, 1.1)]
    (entry,) = self._entries(rows)
    entry = Crossover(**json.loads(entry.line()))
    with mock.patch.object(table, "CROSSOVERS", [entry, *table.CROSSOVERS]):
      case = AttentionCase(
        Target("gpu", "NVIDIA X"), 1, 256, 256, 8, 64, 0.5, dtype="bfloat16"
      )
      share = largest_share(case, "mosaic_gpu")
    self.assertEqual(share, 0.7)


class AmdahlTest(absltest.TestCase):
  def test_only_the_core_changes(self):
    def row(share, form, ms, length=256, **more):
      return Row("X", "", "forward", length, share, form, ms, **more)

    cores = [row(1.0, "dense", 9.0), row(1.0, "mha", 4.0)]
    cores += [row(0.5, "kernel", 3.0), row(0.5, "packed", 2.0)]
    cores += [row(0.5, "packed", 1.0, length=512)]
    packed = row(0.5, "auto", 8.5, computed_share=0.5)
    layers = [
      row(1.0, "mha", 10.0),
      row(0.5, "dense", 9.0, computed_share=1.0),
      packed,
      row(0.75, "auto", 9.0, computed_share=0.5),  # core not measured
      row(0.5, "auto", 9.0, length=512, computed_share=0.5),  # nor its MHA
      row(0.5, "auto", None, computed_share=0.5),
    ]
    # 10 ms, of which 4 become 2.
    self.assertEqual(card.expectations(layers, cores), [(packed, 0.8)])
