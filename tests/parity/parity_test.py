"""Recorded cases of the public releases: all pass, and damage is noticed."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax.convert.tensor_files import read_tensors
from tests.convert.stored import save_tensors
from tests.parity import __main__ as command

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
_CASES = sorted(path.parent.name for path in _GOLDENS.glob("*/meta.json"))
_SMALL = "vit_full_one_shared"


def _call(*argv):
  """Runs the command; its exit status, stdout and stderr."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = command.main([str(arg) for arg in argv])
  return status, out.getvalue(), err.getvalue()


class RecordedCasesTest(parameterized.TestCase):
  def test_every_kind_is_recorded(self):
    kinds = {
      json.loads((_GOLDENS / case / "meta.json").read_text())["kind"]
      for case in _CASES
    }
    self.assertEqual(kinds, set(command.KINDS))

  @parameterized.parameters(*_CASES)
  def test_case_passes(self, case):
    status, out, _ = _call(_GOLDENS / case, "--json", "-")
    rows = json.loads(out)
    self.assertEqual([row for row in rows if not row["ok"]], [])
    self.assertEqual(status, 0)
    # Every output and every gradient, each once.
    meta = json.loads((_GOLDENS / case / "meta.json").read_text())
    names = [
      name
      for name, entry in meta["arrays"].items()
      if entry["role"] == "output"
    ]
    grads = meta["tolerance"].get("grads_atol", {})
    names += [f"grads/{name}" for name in grads]
    self.assertCountEqual([row["array"] for row in rows], names)
    self.assertEqual({row["case"] for row in rows}, {case})

  # Layers and metrics: a whole model takes many seconds to optimize.
  def test_layers_pass_with_default_compiler_settings(self):
    self._check("dit_attn_wide", "fid_metrics", "vit_pooled_shared_routed")

  @pytest.mark.slow
  def test_models_pass_with_default_compiler_settings(self):
    self._check("moh_dit_tiny", "sd_vae_tiny", "transnext_tiny")

  def _check(self, *names):
    done = subprocess.run(
      [sys.executable, "-m", "tests.parity", *(_GOLDENS / n for n in names)],
      env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
      cwd=_GOLDENS.parents[1],
      capture_output=True,
      text=True,
      check=False,
    )
    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
    self.assertRegex(done.stdout, r"3 case\(s\), \d+ arrays, 0 failed")


def _add_to(name, index, amount):
  def edit(arrays):
    arrays[name][index] += amount

  return edit


def _describe_another(meta):
  entry = {"role": "output", "shape": [2], "dtype": "float32"}
  meta["arrays"]["unknown"] = entry
  meta["tolerance"]["outputs_atol"]["unknown"] = 1.0


class DamagedCaseTest(parameterized.TestCase):
  """A copy of a small case with one thing wrong."""

  def setUp(self):
    super().setUp()
    self.case = pathlib.Path(self.create_tempdir().full_path) / "copy"
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
    return {row.array for row in command.run_case(self.case) if not row.ok}

  def test_perturbed_weight_fails(self):
    path = self.case / "weights.safetensors"
    weights = {k: v.copy() for k, v in read_tensors(path).items()}
    weights["proj.weight"][3, 5] += 1e-2
    save_tensors(path, weights)
    failed = self._failed()
    self.assertContainsSubset({"y", "grad_x"}, failed)
    self.assertNotIn("gates", failed)

  @parameterized.parameters(
    ("gates", (0, 0, 0), 1e-3),
    ("router_mask", (1, 2, 0), 1),
    ("y", (0, 0, 0), np.nan),
  )
  def test_perturbed_record_fails_alone(self, *change):
    self._edit_arrays(_add_to(*change))
    self.assertEqual(self._failed(), {change[0]})

  def test_failures_are_listed_alone(self):
    self._edit_arrays(_add_to("y", (0, 0, 0), 1e-3))
    status, out, _ = _call(self.case, "--failures")
    self.assertEqual(status, 1)
    self.assertRegex(
      out, r"\A.*\ncopy +y .*FAILED\n1 case\(s\), 18 arrays, 1 failed\n\Z"
    )

  def test_output_that_is_not_compared_fails(self):
    self._edit_meta(_describe_another)
    self._edit_arrays(lambda arrays: arrays.update(unknown=np.zeros(2)))
    status, out, _ = _call(self.case, "--json", "-")
    (row,) = (row for row in json.loads(out) if not row["ok"])
    self.assertEqual(status, 1)
    self.assertEqual((row["array"], row["max_abs"]), ("unknown", None))

  def _check_refused(self, message):
    status, out, err = _call(self.case)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertRegex(err, message)

  @parameterized.parameters(
    (lambda arrays: arrays.pop("gates"), r"io\.npz: gates is missing"),
    (
      lambda arrays: arrays.update(r=arrays["r"][:, :-1]),
      r"io\.npz: r is \(2, 34, ",
    ),
  )
  def test_arrays_that_do_not_fit_are_named(self, edit, message):
    self._edit_arrays(edit)
    self._check_refused(message)

  @parameterized.parameters(
    (lambda meta: meta["tolerance"]["outputs_atol"].pop("y"), "for 'y'"),
    (lambda meta: meta.update(kind="x"), "'x' must be one of .*vit_full"),
    (lambda meta: meta["hyper_parameters"].pop("head_dim"), "lacks 'head_dim'"),
    (lambda meta: meta.pop("arrays"), "lacks 'arrays'"),
  )
  def test_meta_that_does_not_fit_is_named(self, edit, message):
    self._edit_meta(edit)
    self._check_refused(message)

  @parameterized.parameters(
    "meta.json", "io.npz", "weights.safetensors", "grads.safetensors"
  )
  def test_missing_files_are_named(self, name):
    (self.case / name).unlink()
    self._check_refused(name)

  def test_weight_that_fits_no_parameter_is_named(self):
    path = self.case / "weights.safetensors"
    save_tensors(path, read_tensors(path) | {"wg_9": np.zeros(3)})
    self._check_refused("1 not expected: wg_9")


class TableToleranceTest(parameterized.TestCase):
  """A case of one recorded table for which meta.json states no tolerance."""

  def _row(self, recorded: np.ndarray, computed: np.ndarray) -> command.Row:
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
    with mock.patch.dict(command.KINDS, kinds):
      (row,) = command.run_case(case)
    return row

  @parameterized.parameters((0.9, True), (1.1, False))
  def test_float64_gets_a_billionth_of_its_scale(self, billionths, ok):
    recorded = np.array([1e-6, -500.0, 3.0])
    row = self._row(recorded, recorded + np.eye(3)[2] * billionths * 500e-9)
    np.testing.assert_allclose(row.tolerance, 500e-9)
    self.assertEqual(row.ok, ok)

  @parameterized.parameters(np.int64, np.bool_)
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
