"""Recorded cases of the public releases: all pass, and damage is noticed."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.convert.tensor_files import read_tensors
from tests.convert.stored import save_tensors
from tests.parity import __main__ as command

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
_CASES = sorted(path.parent.name for path in _GOLDENS.glob("*/meta.json"))
_SMALL = "vit_full_one_shared"
_LONG = ("diffusion", "moh_vit_tiny")  # compile for many seconds


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

  @parameterized.parameters(*(case for case in _CASES if case not in _LONG))
  def test_case_passes(self, case):
    self._check_case(case)

  @parameterized.parameters(*_LONG)
  @pytest.mark.integration
  def test_long_case_passes(self, case):
    self._check_case(case)

  def _check_case(self, case):
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
  @pytest.mark.integration
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
    arrays[name] = arrays[name].copy()
    arrays[name][index] += amount

  return edit


class DamagedCaseTest(parameterized.TestCase):
  """A copy of a small case with one thing wrong."""

  def setUp(self):
    super().setUp()
    self.case = pathlib.Path(self.create_tempdir().full_path) / "copy"
    # Not copytree: it would copy the permissions of a read-only checkout.
    self.case.mkdir()
    for file in (_GOLDENS / _SMALL).iterdir():
      shutil.copyfile(file, self.case / file.name)

  def _edit(self, name, edit):
    """Changes the values of a file, or removes it."""
    path = self.case / name
    if edit is None:
      path.unlink()
    elif path.suffix == ".json":
      values = json.loads(path.read_text())
      edit(values)
      path.write_text(json.dumps(values))
    elif path.suffix == ".npz":
      with np.load(path) as stored:
        values = dict(stored)
      edit(values)
      np.savez(path, **values)
    else:
      values = dict(read_tensors(path))
      edit(values)
      save_tensors(path, values)

  def _failed(self):
    status, out, _ = _call(self.case, "--json", "-")
    failed = {row["array"]: row for row in json.loads(out) if not row["ok"]}
    self.assertEqual(status, 1)
    return failed

  def test_perturbed_weight_fails(self):
    self._edit("weights.safetensors", _add_to("proj.weight", (3, 5), 1e-2))
    failed = self._failed()
    self.assertContainsSubset({"y", "grad_x"}, failed)
    self.assertNotIn("gates", failed)

  @parameterized.parameters(
    ("gates", (0, 0, 0), 1e-3),
    ("router_mask", (1, 2, 0), 1),
    ("y", (0, 0, 0), np.nan),
  )
  def test_perturbed_record_fails_alone(self, *change):
    self._edit("io.npz", _add_to(*change))
    self.assertCountEqual(self._failed(), change[:1])
    _, out, _ = _call(self.case, "--failures")
    row = rf"copy +{change[0]} .*FAILED\n"
    self.assertRegex(out, rf"\A.*\n{row}1 case\(s\), 18 arrays, 1 failed\n\Z")

  def test_output_that_is_not_compared_fails(self):
    def describe(meta):
      entry = {"role": "output", "shape": [2], "dtype": "float32"}
      meta["arrays"]["unknown"] = entry
      meta["tolerance"]["outputs_atol"]["unknown"] = 1.0

    self._edit("meta.json", describe)
    self._edit("io.npz", lambda arrays: arrays.update(unknown=np.zeros(2)))
    (row,) = self._failed().values()
    self.assertEqual((row["array"], row["max_abs"]), ("unknown", None))

  @parameterized.parameters(
    ("io.npz", lambda x: x.pop("gates"), r"io\.npz: gates is missing"),
    ("io.npz", lambda x: x.update(r=x["r"][:, :-1]), r"r is \(2, 34, "),
    ("meta.json", lambda x: x["tolerance"]["outputs_atol"].pop("y"), "for 'y'"),
    ("meta.json", lambda x: x.update(kind="x"), "'x' must be .*vit_full"),
    ("meta.json", lambda x: x.pop("arrays"), "lacks 'arrays'"),
    ("weights.safetensors", lambda x: x.update(wg_9=np.zeros(3)),
     "1 not expected: wg_9"),
    ("meta.json", None, "meta.json"),
    ("grads.safetensors", None, "grads.safetensors"),
  )  # fmt: skip
  def test_what_does_not_fit_or_is_missing_is_named(self, name, edit, message):
    self._edit(name, edit)
    status, out, err = _call(self.case)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertRegex(err, message)
