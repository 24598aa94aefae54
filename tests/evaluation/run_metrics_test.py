"""What is read of metrics.jsonl, whatever stands in it."""

import json
import pathlib

from absl.testing import absltest

from moh_jax.evaluation import pictures
from moh_jax.evaluation.run_metrics import read_run_metrics

_HUGE = 10**400


class RunMetricsTest(absltest.TestCase):
  def _read(self, *rows):
    folder = pathlib.Path(self.create_tempdir().full_path)
    lines = "\n".join(map(json.dumps, rows))
    (folder / "metrics.jsonl").write_text(lines)
    return read_run_metrics(str(folder), last=9)

  def test_numbers_that_no_float_holds_are_left_out(self):
    found = self._read(
      {"step": 1, "split": "train", "loss": _HUGE, "lr": float("nan")},
      {"step": 2, "split": "train", "loss": 2.5},
      {"step": 2, "split": "heads", "blocks0.0": [_HUGE, 0.5]},
    )
    self.assertEqual(found.curves, {"loss": {"train": [(2, 2.5)]}})
    self.assertEqual(found.loads, {})

  def test_loads_of_another_number_of_heads_are_left_out(self):
    found = self._read(
      {"step": 1, "split": "heads", "blocks0.0": [0.25, 0.75]},
      {"step": 2, "split": "heads", "blocks0.0": [0.25]},
      {"step": 3, "split": "heads", "blocks0.0": [0.5, 0.5]},
    )
    self.assertEqual(
      found.loads, {"blocks0.0": [(1, [0.25, 0.75]), (3, [0.5, 0.5])]}
    )
    self.assertNotEmpty(
      pictures.encode(pictures.load_over_steps(found.loads), "png")
    )


if __name__ == "__main__":
  absltest.main()
