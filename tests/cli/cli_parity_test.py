import json
import pathlib
import shutil
import tempfile

import numpy as np
from absl.testing import absltest

from tests.cli import tiny_checkpoint

_CASE = pathlib.Path(__file__).parents[1] / "goldens" / "vit_full_one_shared"


class ParityCommandTest(absltest.TestCase):
  def _copy(self):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    return pathlib.Path(shutil.copytree(_CASE, root / "copy"))

  def test_recorded_case_passes(self):
    status, out, _ = tiny_checkpoint.call("parity", _CASE, "--json", "-")
    rows = json.loads(out)
    self.assertEqual(status, 0)
    self.assertTrue(all(row["ok"] for row in rows))
    meta = json.loads((_CASE / "meta.json").read_text())
    outputs = {n for n, a in meta["arrays"].items() if a["role"] == "output"}
    self.assertContainsSubset(outputs, {row["array"] for row in rows})

  def test_perturbed_copy_fails(self):
    case = self._copy()
    with np.load(case / "io.npz") as stored:
      arrays = dict(stored)
    arrays["y"][0, 0, 0] += 1e-3
    np.savez(case / "io.npz", **arrays)
    status, out, _ = tiny_checkpoint.call("parity", case, "--failures")
    self.assertEqual(status, 1)
    failed = [line for line in out.splitlines() if line.endswith("FAILED")]
    self.assertLen(failed, 1)
    self.assertRegex(failed[0], r"^copy +y ")
    self.assertIn("1 case(s), 18 arrays, 1 failed", out)

  def test_directory_that_is_no_case_is_named(self):
    root = self.enterContext(tempfile.TemporaryDirectory())
    status, out, err = tiny_checkpoint.call("parity", root)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn(f"{root} is no recorded case", err)

  def test_missing_arrays_are_wrong_use(self):
    case = self._copy()
    (case / "io.npz").unlink()
    status, _, err = tiny_checkpoint.call("parity", case)
    self.assertEqual(status, 2)
    self.assertIn(f"{case} has no io.npz", err)


if __name__ == "__main__":
  absltest.main()
