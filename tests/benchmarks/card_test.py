"""The card's stages, steps that fill it, and Amdahl's law."""

import pathlib
from unittest import mock

import pytest
from absl.testing import absltest

from benchmarks import attention, card, step
from tests.cli.tiny_checkpoint import call
from tests.ops.devices import traced_for
from tests.training import tiny

_TINY = dict(
  heads=(4, "float32", "50", 1), dims=(8,), lengths=(256,), layers=(32,),
  slots=(16,), exact=(("float32", (8,)),), steps=(), passes=(), tokens=256,
  texts=2,
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


class StagesTest(absltest.TestCase):
  def test_every_stage_has_options_that_its_program_takes(self):
    folder = pathlib.Path(self.create_tempdir().full_path) / "a card"
    folder.mkdir()
    with (
      traced_for("gpu"),
      mock.patch.object(attention, "compare_forms", return_value=[]) as run,
      mock.patch.object(step, "measure", return_value={"batch": 1}),
      mock.patch.object(step, "compilation_cache"),
      mock.patch.object(card.exact, "measure", return_value=[]),
      mock.patch.object(card.model.bench, "measure_model", return_value=[]),
    ):
      for name, program, argv in card.stages(folder):
        status, _, err = call(*argv, main=program)
        self.assertEqual((status, err), (0, ""), name)
        self.assertTrue((folder / f"{name}.json").exists())
    options = [call.args[0] for call in run.call_args_list]
    self.assertEqual({one.dtype for one in options}, {"bfloat16"})
    self.assertEqual({one.heads for one in options}, {32})


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
