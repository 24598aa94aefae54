"""Benchmarks of a layer, of decoding, and of exactness alone."""

import contextlib
import functools
import io
import json
import math
import pathlib
from unittest import mock

import jax
import jax.extend.core
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from benchmarks import decode, exact, layer
from benchmarks.decode import DecodeOptions
from benchmarks.layer import LayerOptions, layer_flops
from moh_jax.cli import bench_attention as bench
from moh_jax.config import CACHE_DTYPES
from moh_jax.config.heads import HeadBudget
from moh_jax.layers import attend
from moh_jax.ops import attention as ops
from moh_jax.ops.attention import cached_attention
from moh_jax.training import bench as bench_lib

_TINY = {
  "lengths": (16,),
  "heads": 4,
  "head_dim": 8,
  "rounds": 1,
  "shares": (50,),
}
_LAYER = functools.partial(LayerOptions, **_TINY)
_DECODE = functools.partial(DecodeOptions, **_TINY)
_ARGV = "--lengths 16 --shares 50 --heads 4 --head-dim 8 --rounds 1".split()


def _layer_rows(options):
  return bench.compare_forms(options, "layer", layer.splits, bench.check_shapes)


def _decode_rows(options):
  return bench.compare_forms(options, "decode", decode.splits, decode._check)


def _products(jaxpr):
  """FLOPs of every product in a program, 2 for each multiplication."""
  total = 0
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
      total += 2 * math.prod(out) * math.prod(left[i] for i in contracted)
    for inner in jax.extend.core.jaxprs_in_params(eqn.params):
      total += _products(inner)
  return total


class CommandTest(parameterized.TestCase):
  @parameterized.parameters((layer, "auto"), (decode, "dense"))
  def test_writes_rows_and_refuses_in_one_line(self, module, form):
    path = pathlib.Path(self.create_tempdir().full_path) / "out.json"
    argv = [*_ARGV, "--implementations", form, "--json", str(path)]
    argv += ["--modes", "forward"] if module is layer else []
    out = io.StringIO()
    with mock.patch.object(bench_lib, "matrix_peak", lambda dtype: 1e15):
      with contextlib.redirect_stdout(out):
        self.assertEqual(module.main(argv), 0)
    result = json.loads(path.read_text())
    self.assertEqual(
      [(row["implementation"], row["fault"]) for row in result["rows"]],
      [("mha", None), (form, None)],
    )
    self.assertIn("machine", result)
    self.assertRegex(out.getvalue(), r"(?m)^\w+ +16 +50\.0% ")
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit):
      module.main(["--shares", "10"])
    self.assertLen(errors.getvalue().splitlines(), 1)
    self.assertIn("--shares 10 must be a whole number", errors.getvalue())
    self.assertRegex(errors.getvalue(), r"see python -m benchmarks\.\S+ --help")


class LayerTest(parameterized.TestCase):
  @parameterized.parameters(
    # Shared, top-K, and the router's scores: routed, shared, groups.
    (2, 3, 6 + 2 + 2), (1, 3, 7 + 0 + 2), (0, 3, 8), (5, 0, 5), (None, 0, 0),
  )  # fmt: skip
  def test_flops_are_of_the_heads_at_work_and_the_router(
    self, shared, top_k, scores
  ):
    options = LayerOptions(
      heads=8, head_dim=4, kv_heads=2, width=6, batch=2, shares=(50,)
    )
    budget, active = None, 8
    if shared is not None:
      budget, active = HeadBudget(8, shared, top_k, 4), shared + top_k
    multiplications = 20 * (
      6 * active * 4  # queries
      + 6 * 2 * 4 * 2  # keys, values
      + active * 10 * 4 * 2  # logits, mixed values
      + active * 4 * 6  # output
      + 6 * scores
    )
    for mode, passes in (("forward", 1), ("forward_backward", 3)):
      flops = layer_flops(options, budget, 10, mode)
      self.assertEqual(flops, passes * 2 * multiplications)

  @parameterized.parameters("forward", "forward_backward")
  def test_multi_head_attention_has_the_products_of_the_program(self, mode):
    options = _LAYER(kv_heads=2, width=24, batch=2)
    x = jnp.zeros((2, 16, 24))
    run = layer._evaluation(options, None, mode, "dense")
    program = jax.make_jaxpr(run)(layer._params(options, None), x, x)
    flops = layer_flops(options, None, 16, mode)
    self.assertEqual(_products(program.jaxpr), flops)

  def test_wrong_form_is_found(self):
    right = attend.attention

    def wrong(*args, implementation, **options):
      out = right(*args, implementation="dense", **options)
      return out * (1.01 if implementation == "packed" else 1)

    options = _LAYER(modes=("forward_backward",), implementations=("packed",))
    with mock.patch.object(attend, "attention", wrong):
      rows = _layer_rows(options)
    self.assertEqual([row.fault is None for row in rows], [True, False])


class DecodeTest(parameterized.TestCase):
  @parameterized.parameters(*CACHE_DTYPES)
  def test_every_cache_is_exact_and_a_wrong_form_is_found(self, dtype):
    options = _DECODE(cache_dtype=dtype, implementations=("dense",))
    self.assertEqual([r.fault for r in _decode_rows(options)], [None, None])

    def wrong(*args, active, **options):
      out = cached_attention(*args, active=active, **options)
      return out if active is None else out * 1.01

    with mock.patch.object(decode, "cached_attention", wrong):
      faults = [row.fault is None for row in _decode_rows(options)]
    self.assertEqual(faults, [True, False])

  @parameterized.parameters("float32", "bfloat16")
  def test_kernel_is_exact(self, dtype):
    options = _DECODE(
      implementations=("kernel",), kv_heads=2, batch=2, cache_dtype=dtype
    )
    # A CPU interprets it, for which nobody may ask.
    with mock.patch.object(bench, "_check_form"):
      rows = _decode_rows(options)
    kernel = rows[-1]
    self.assertEqual((kernel.every_head, kernel.fault), (False, None))
    self.assertEqual(kernel.flops, rows[0].flops / 2)

  def test_counted_bytes_are_those_of_the_heads_that_are_read(self):
    whole = 3 * 4 * 16 * 8 * 4 * 2  # texts, heads, slots, dim, bytes, k and v
    for read in (1.0, 0.5):
      found = decode.cache_bytes(_DECODE(batch=3), 16, read)
      self.assertEqual(found, whole * read)
    int8 = _DECODE(batch=3, cache_dtype="int8")
    numbers, scales = whole / 4, whole / 4 / 8 * 4
    self.assertEqual(decode.cache_bytes(int8, 16, 1.0), numbers + scales)

  @parameterized.parameters(
    # Key/value heads, shared heads, percent: the share that is read.
    (8, 2, 50, 0.5), (8, 2, 100, 1.0), (4, 1, 12.5, 1 / 4), (2, 8, 100, 1.0),
    # Of 4 pairs the first has shared heads; two of 6 others miss both of a
    # pair in 6 of 15 cases.
    (4, 2, 50, 1 / 4 + 3 / 4 * (1 - 6 / 15)),
  )  # fmt: skip
  def test_keys_are_read_for_any_active_head(
    self, kv_heads, shared, percent, expected
  ):
    options = _DECODE(
      heads=8, kv_heads=kv_heads, shared=shared, shares=(percent,)
    )
    (budget,) = options.budgets()
    self.assertAlmostEqual(decode.read_share(options, budget), expected)


class ExactTest(absltest.TestCase):
  def _checks(self, case, attend=ops.attention, forms=("packed",)):
    with mock.patch.object(exact, "attention", attend):
      return exact.measure(case, 32, "float32", 8, forms)

  def test_forms_are_exact_in_every_case(self):
    for case in exact.CASES:
      (check,) = self._checks(case, forms=("packed", "kernel", "cudnn"))
      self.assertEqual((check["form"], check["fault"]), ("packed", None))
      self.assertLess(check["max_error"], 1e-5)

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
    with (
      mock.patch.object(exact, "measure", lambda *_: [check]),
      contextlib.redirect_stderr(io.StringIO()) as errors,
      contextlib.redirect_stdout(io.StringIO()),
    ):
      self.assertEqual(exact.main([]), 1)
    self.assertIn("error: packed, segments: does not run", errors.getvalue())


if __name__ == "__main__":
  absltest.main()
