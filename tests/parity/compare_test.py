"""Recorded cases of the public releases: all pass, and damage is noticed."""

import json
import pathlib
import shutil
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.convert.tensor_files import read_tensors
from moh_jax.parity import compare as parity
from tests.convert.stored import save_tensors

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
_CASES = sorted(path.parent.name for path in _GOLDENS.glob("*/meta.json"))
_SMALL = "vit_full_one_shared"


class RecordedCasesTest(parameterized.TestCase):
  def test_every_kind_is_recorded(self):
    kinds = {
      json.loads((_GOLDENS / case / "meta.json").read_text())["kind"]
      for case in _CASES
    }
    self.assertEqual(kinds, set(parity.KINDS))

  @parameterized.parameters(*_CASES)
  def test_case_passes(self, case):
    rows = parity.run_case(_GOLDENS / case)
    failed = [row for row in rows if not row.ok]
    self.assertEmpty(failed)
    # Every output and every gradient, each once.
    meta = json.loads((_GOLDENS / case / "meta.json").read_text())
    names = [
      name
      for name, entry in meta["arrays"].items()
      if entry["role"] == "output"
    ]
    grads = meta["tolerance"].get("grads_atol", {})
    names += [f"grads/{name}" for name in grads]
    self.assertCountEqual([row.array for row in rows], names)
    self.assertEqual({row.case for row in rows}, {case})


class DamagedCaseTest(parameterized.TestCase):
  """A copy of a small case with one thing wrong."""

  def setUp(self):
    super().setUp()
    self.case = pathlib.Path(self.create_tempdir().full_path) / _SMALL
    # Not copytree: it would copy the permissions of a read-only checkout.
    self.case.mkdir()
    for file in (_GOLDENS / _SMALL).iterdir():
      shutil.copyfile(file, self.case / file.name)

  def _edit_meta(self, edit):
    path = self.case / "meta.json"
    meta = json.loads(path.read_text())
    edit(meta)
    path.write_text(json.dumps(meta))

  def _edit_arrays(self, edit):
    with np.load(self.case / "io.npz") as stored:
      arrays = dict(stored)
    edit(arrays)
    np.savez(self.case / "io.npz", **arrays)

  def _failed(self) -> set[str]:
    return {row.array for row in parity.run_case(self.case) if not row.ok}

  def test_perturbed_weight_fails(self):
    path = self.case / "weights.safetensors"
    weights = {k: v.copy() for k, v in read_tensors(path).items()}
    weights["proj.weight"][3, 5] += 1e-2
    save_tensors(path, weights)
    failed = self._failed()
    self.assertContainsSubset({"y", "grad_x"}, failed)
    self.assertNotIn("gates", failed)

  def test_perturbed_record_fails_alone(self):
    def edit(arrays):
      arrays["gates"][0, 0, 0] += 1e-3

    self._edit_arrays(edit)
    self.assertEqual(self._failed(), {"gates"})

  def test_changed_selection_fails(self):
    def edit(arrays):
      arrays["router_mask"][1, 2] = 1 - arrays["router_mask"][1, 2]

    self._edit_arrays(edit)
    self.assertEqual(self._failed(), {"router_mask"})

  def test_nan_in_the_record_fails(self):
    def edit(arrays):
      arrays["y"][0, 0, 0] = np.nan

    self._edit_arrays(edit)
    self.assertEqual(self._failed(), {"y"})

  def test_output_that_is_not_compared_fails(self):
    entry = {"role": "output", "shape": [2], "dtype": "float32"}

    def describe(meta):
      meta["arrays"]["unknown"] = entry
      meta["tolerance"]["outputs_atol"]["unknown"] = 1.0

    self._edit_meta(describe)
    self._edit_arrays(lambda arrays: arrays.update(unknown=np.zeros(2)))
    rows = {row.array: row for row in parity.run_case(self.case)}
    self.assertFalse(rows["unknown"].ok)
    self.assertIsNone(rows["unknown"].max_abs)
    self.assertTrue(all(row.ok for n, row in rows.items() if n != "unknown"))

  def test_missing_array_is_named(self):
    self._edit_arrays(lambda arrays: arrays.pop("gates"))
    with self.assertRaisesRegex(ValueError, r"io\.npz: missing \['gates'\]"):
      parity.run_case(self.case)

  def test_array_of_another_shape_is_named(self):
    self._edit_arrays(lambda arrays: arrays.update(r=arrays["r"][:, :-1]))
    with self.assertRaisesRegex(ValueError, r"io\.npz: r has shape \(2, 34, "):
      parity.run_case(self.case)

  def test_missing_tolerance_is_named(self):
    self._edit_meta(lambda meta: meta["tolerance"]["outputs_atol"].pop("y"))
    with self.assertRaisesRegex(ValueError, "no tolerance for 'y'"):
      parity.run_case(self.case)

  def test_unknown_kind_lists_the_known(self):
    self._edit_meta(lambda meta: meta.update(kind="vit_round_attention"))
    with self.assertRaisesRegex(
      ValueError, "'vit_round_attention' must be one of .*vit_full_attention"
    ):
      parity.run_case(self.case)

  @parameterized.parameters("kind", "hyper_parameters", "arrays", "tolerance")
  def test_missing_entry_of_meta_is_named(self, key):
    self._edit_meta(lambda meta: meta.pop(key))
    with self.assertRaisesRegex(ValueError, f"meta.json: has no entry '{key}'"):
      parity.run_case(self.case)

  @parameterized.parameters(
    "meta.json", "io.npz", "weights.safetensors", "grads.safetensors"
  )
  def test_missing_file_is_named(self, name):
    # meta.json lists the case's files.
    (self.case / name).unlink()
    with self.assertRaisesRegex(FileNotFoundError, name):
      parity.run_case(self.case)

  @parameterized.parameters("meta.json", "io.npz", "weights.safetensors")
  def test_truncated_file_is_named(self, name):
    content = (self.case / name).read_bytes()
    (self.case / name).write_bytes(content[: len(content) // 2])
    with self.assertRaisesRegex(ValueError, name):
      parity.run_case(self.case)

  def test_weight_that_fits_no_parameter_is_named(self):
    path = self.case / "weights.safetensors"
    save_tensors(path, read_tensors(path) | {"wg_9": np.zeros(3)})
    with self.assertRaisesRegex(ValueError, "1 not expected: wg_9"):
      parity.run_case(self.case)


class TableToleranceTest(parameterized.TestCase):
  """A case of one recorded table for which meta.json states no tolerance."""

  def _row(self, recorded: np.ndarray, computed: np.ndarray) -> parity.Row:
    case = pathlib.Path(self.create_tempdir().full_path)
    np.savez(case / "io.npz", table=recorded)
    meta = {
      "kind": "table",
      "hyper_parameters": {},
      "arrays": {"table": {"role": "output", "shape": recorded.shape}},
      "tolerance": {},
      "files": {"io.npz": "the table"},
    }
    (case / "meta.json").write_text(json.dumps(meta))
    kinds = {"table": lambda *_: {"table": computed}}
    with mock.patch.dict(parity.KINDS, kinds):
      (row,) = parity.run_case(case)
    return row

  @parameterized.parameters((0.9, True), (1.1, False))
  def test_float64_gets_a_billionth_of_its_scale(self, billionths, ok):
    recorded = np.array([1e-6, -500.0, 3.0])
    row = self._row(recorded, recorded + np.eye(3)[2] * billionths * 500e-9)
    np.testing.assert_allclose(row.tolerance, 500e-9)
    self.assertEqual(row.ok, ok)

  @parameterized.parameters(np.int64, np.uint8, np.bool_)
  def test_integers_and_masks_must_be_equal(self, dtype):
    recorded = np.array([0, 1, 1], dtype)
    self.assertEqual(self._row(recorded, recorded).tolerance, 0.0)
    self.assertFalse(self._row(recorded, recorded[::-1]).ok)

  def test_float32_needs_a_tolerance(self):
    recorded = np.ones(2, np.float32)
    with self.assertRaisesRegex(ValueError, "no tolerance for 'table'"):
      self._row(recorded, recorded)


if __name__ == "__main__":
  absltest.main()
