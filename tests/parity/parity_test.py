"""Recorded cases of the public releases: all pass, and damage is noticed."""

import dataclasses
import json
import pathlib
from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized

from tests.parity import __main__ as command
from tests.parity.case import read_case
from tests.two_processes import python

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
_CASES = sorted(path.parent.name for path in _GOLDENS.glob("*/meta.json"))
_SMALL = "vit_full_one_shared"
_LONG = ("diffusion", "moh_vit_tiny")  # compile for many seconds


def _meta(case):
  return json.loads((_GOLDENS / case / "meta.json").read_text())


class RecordedCasesTest(parameterized.TestCase):
  def test_every_kind_is_recorded(self):
    kinds = {_meta(case)["kind"] for case in _CASES}
    self.assertEqual(kinds, set(command.KINDS))

  @parameterized.parameters(*(case for case in _CASES if case not in _LONG))
  def test_case_passes(self, case):
    self._check_case(case)

  @parameterized.parameters(*_LONG)
  @pytest.mark.integration
  def test_long_case_passes(self, case):
    self._check_case(case)

  def _check_case(self, case):
    rows = command.run_case(_GOLDENS / case)
    self.assertEqual([row for row in rows if not row.ok], [])
    # Every output and every gradient, each once.
    meta = _meta(case)
    names = [k for k, x in meta["arrays"].items() if x["role"] == "output"]
    grads = meta["tolerance"].get("grads_atol", {})
    names += [f"grads/{name}" for name in grads]
    self.assertCountEqual([row.array for row in rows], names)

  @pytest.mark.integration
  def test_cases_pass_with_default_compiler_settings(self):
    # Layers and metrics: a whole model takes many seconds to optimize.
    names = "dit_attn_wide", "fid_metrics", "vit_pooled_shared_routed"
    argv = "-m", "tests.parity", *(_GOLDENS / name for name in names)
    status, out, err = python(*argv, XLA_FLAGS="")
    self.assertEqual(status, 0, out + err)
    self.assertRegex(out, r"3 case\(s\), \d+ arrays, 0 failed")


class DamagedCaseTest(parameterized.TestCase):
  def _failed(self, field, name, index, amount):
    """The arrays that fail where a number of a case is another one."""
    case = read_case(_GOLDENS / _SMALL)
    values = dict(getattr(case, field))
    values[name] = values[name].copy()
    values[name][index] += amount
    damaged = dataclasses.replace(case, **{field: values})
    with mock.patch.object(command, "read_case", return_value=damaged):
      return {row.array for row in command.run_case("") if not row.ok}

  def test_perturbed_weight_fails(self):
    failed = self._failed("weights", "proj.weight", (3, 5), 1e-2)
    self.assertContainsSubset({"y", "grad_x"}, failed)
    self.assertNotIn("gates", failed)

  @parameterized.parameters(
    ("gates", (0, 0, 0), 1e-3),
    ("router_mask", (1, 2, 0), 1),
    ("y", (0, 0, 0), np.nan),
  )
  def test_perturbed_record_fails_alone(self, *change):
    self.assertEqual(self._failed("arrays", *change), {change[0]})

  def test_output_that_is_not_compared_fails(self):
    with mock.patch.dict(command.KINDS, {_meta(_SMALL)["kind"]: lambda _: {}}):
      rows = command.run_case(_GOLDENS / _SMALL)
    self.assertEqual({(row.max_abs, row.ok) for row in rows}, {(None, False)})
