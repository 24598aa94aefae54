"""Benchmarks of a layer, of decoding, and of exactness alone."""

import functools
import json
import pathlib
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from benchmarks import decode, exact, layer
from benchmarks.decode import DecodeOptions
from benchmarks.layer import LayerOptions
from moh_jax.cli import bench_attention as bench
from moh_jax.config import CACHE_DTYPES
from moh_jax.ops import attention as ops
from moh_jax.ops.attention import Form, cached_attention
from tests.cli.tiny_checkpoint import call

_TINY = dict(lengths=(16,), heads=4, head_dim=8, rounds=1, shares=(50,))
_LAYER = functools.partial(LayerOptions, **_TINY)
_DECODE = functools.partial(DecodeOptions, **_TINY)
_ARGV = "--lengths 16 --shares 50 --heads 4 --head-dim 8 --rounds 1".split()


def _layer_rows(options):
  return bench.compare_forms(options, "layer", layer.splits)


def _decode_rows(options):
  more = decode.splits, decode.chosen_form
  return bench.compare_forms(options, "decode", *more)


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


class LayerTest(parameterized.TestCase):
  def test_wrong_form_is_found(self):
    right = ops.attend

    def wrong(call, implementation):
      out = right(call, "dense")
      return out * (1.01 if implementation == "packed" else 1)

    options = _LAYER(modes=("forward_backward",), implementations=("packed",))
    with mock.patch.object(ops, "attend", wrong):
      rows = _layer_rows(options)
    self.assertEqual([row.fault is None for row in rows], [True, False])


class DecodeTest(parameterized.TestCase):
  @parameterized.parameters(*CACHE_DTYPES)
  def test_every_cache_is_exact_and_a_wrong_form_is_found(self, dtype):
    options = _DECODE(cache_dtype=dtype, implementations=("dense",))
    self.assertEqual([r.fault for r in _decode_rows(options)], [None, None])

    def wrong(*args):
      out, active = cached_attention(*args), args[3]
      return out if active is None else out * 1.01

    with mock.patch.object(decode, "cached_attention", wrong):
      faults = [row.fault is None for row in _decode_rows(options)]
    self.assertEqual(faults, [True, False])

  @parameterized.parameters("float32", "bfloat16")
  @pytest.mark.integration
  def test_kernel_is_exact(self, dtype):
    options = _DECODE(
      implementations=("kernel",), kv_heads=2, batch=2, cache_dtype=dtype
    )
    # A CPU interprets it, for which nobody may ask.

    def choose(_, options, mode, length, share, name):
      return Form(name, packs=share < 1)

    with mock.patch.object(bench, "_choose", choose):
      kernel = _decode_rows(options)[-1]
    self.assertEqual((kernel.computed_share, kernel.fault), (0.5, None))


class ExactTest(absltest.TestCase):
  def _checks(self, case, attend=ops.attention, forms=("packed",)):
    with mock.patch.object(exact, "attention", attend):
      return exact.measure(case, 32, "float32", 8, forms)

  @pytest.mark.integration
  def test_forms_are_exact_in_every_case(self):
    for case in exact.CASES:
      (check,) = self._checks(case, forms=("packed", "kernel", "cudnn"))
      self.assertEqual((check["form"], check["fault"]), ("packed", None))
      self.assertLess(check["max_error"], 1e-5)

  @pytest.mark.integration
  def test_what_fails_or_is_wrong_is_a_fault_and_the_status(self):
    def wrong(q, k, v, *, segments, implementation, **options):
      if segments is not None:
        raise RuntimeError("no documents")
      out = ops.attention(q, k, v, implementation=implementation, **options)
      return out * 1.01

    (check,) = self._checks("causal", wrong)
    self.assertIn("relative error of the outputs 1.0e-02", check["fault"])
    (check,) = self._checks("segments", wrong)
    self.assertEqual(check["fault"], "does not run: RuntimeError: no documents")
    with mock.patch.object(exact, "measure", lambda *_: [check]):
      status, _, err = call(main=exact.main)
    self.assertEqual(status, 1)
    self.assertIn("error: packed, segments: does not run", err)
