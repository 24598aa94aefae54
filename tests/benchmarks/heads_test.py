"""Benchmarks of attention, of a layer, of decoding, and of exactness alone."""

import json
import pathlib
from unittest import mock

import jax
import pytest
from absl.testing import absltest, parameterized

from benchmarks import attention, decode, exact, layer
from moh_jax.config.heads import HeadBudget
from moh_jax.ops import attention as ops
from tests.cli.tiny_checkpoint import call

_TINY = dict(lengths=(16,), heads=4, head_dim=8, rounds=1, shares=(50,))
_ARGV = "--lengths 16 --shares 50 --heads 4 --head-dim 8 --rounds 1".split()


@jax.custom_vjp
def _spoil_gradients(x):
  return x


_spoil_gradients.defvjp(lambda x: (x, None), lambda _, grad: (grad * 1.01,))


class AttentionTest(parameterized.TestCase):
  def _rows(self, **options):
    given = attention.HeadOptions(**{**_TINY, **options})
    return attention.compare_forms(given, "attention", attention.splits)

  @parameterized.parameters(
    ("forward", lambda x: x * 1.01, "error of the outputs 1.0e-02 is"),
    ("forward_backward", _spoil_gradients, "of the gradients 1.0e-02 is"),
    ("forward", mock.Mock(side_effect=RuntimeError("too large")),
     "does not run: RuntimeError: too large"),
  )  # fmt: skip
  def test_what_fails_or_is_not_exact_is_a_fault(self, mode, spoil, message):
    right = ops.attend

    def wrong(call, implementation):
      out = right(call, "dense")
      return spoil(out) if implementation == "packed" else out

    with mock.patch.object(attention, "attend", wrong):
      rows = self._rows(modes=(mode,), implementations=("packed",))
    self.assertIsNone(rows[0].fault)
    self.assertIn(message, rows[-1].fault)

  @parameterized.parameters(
    (4, None, 50, (1, 1)), (4, 0, 25, (0, 1)), (32, None, 62.5, (8, 12)),
    (3, None, 66.67, (0, 2)),
  )  # fmt: skip
  def test_shares_become_head_splits(self, heads, shared, share, split):
    given = attention.HeadOptions(heads=heads, shared=shared, shares=(share,))
    self.assertEqual(given.budgets(), [HeadBudget(heads, *split, 64)])


class CommandTest(parameterized.TestCase):
  @parameterized.parameters((layer, "auto"), (decode, "dense"))
  @pytest.mark.integration
  def test_writes_rows_and_refuses_in_one_line(self, module, form):
    path = pathlib.Path(self.create_tempdir().full_path) / "out.json"
    argv = [*_ARGV, "--implementations", form, "--json", path]
    argv += ["--modes", "forward"] if module is layer else []
    status, out, err = call(*argv, main=module.main)
    self.assertEqual((status, err), (0, ""))
    result = json.loads(path.read_text())
    self.assertEqual(
      [(row["implementation"], row["fault"]) for row in result["rows"]],
      [("mha", None), (form, None)],
    )
    self.assertIn("machine", result)
    self.assertRegex(out, r"(?m)^\w+ +16 +50\.0% ")
    status, _, err = call("--shares=10", main=module.main)
    self.assertEqual((status, len(err.splitlines())), (2, 1))
    self.assertIn("--shares 10 must be a whole number", err)
    self.assertRegex(err, r"see python -m benchmarks\.\S+ --help")


class ExactTest(absltest.TestCase):
  @pytest.mark.integration
  def test_forms_are_exact_in_every_case(self):
    for case in exact.CASES:
      forms = "packed", "kernel", "cudnn"
      (check,) = exact.measure(case, 32, "float32", 8, forms)
      self.assertEqual((check["form"], check["fault"]), ("packed", None))
      self.assertLess(check["max_error"], 1e-5)
