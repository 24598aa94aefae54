"""Which form a call gets."""

import dataclasses
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.config.checks import IMPLEMENTATIONS
from moh_jax.ops.attention_forms import (
  AttentionCase,
  Form,
  choose_cached_form,
  choose_form,
)
from moh_jax.ops.kernels import sizes
from moh_jax.ops.target import Target

_CASE = AttentionCase(
  target=Target("cpu", "cpu"),
  batch=1,
  queries=1024,
  keys=1024,
  num_heads=32,
  head_dim=64,
  active=16,
)


def _name(implementation: str = "auto", **changes) -> str:
  if platform := changes.pop("platform", None):
    changes["target"] = Target(platform, platform)
  case = dataclasses.replace(_CASE, **changes)
  return choose_form(implementation, case).name


class ChooseTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, "packed"),
    ({"active": 24}, "packed"),
    ({"active": 29}, "blocked"),  # 90 %: nothing is gained
    ({"active": 32}, "blocked"),
    ({"queries": 128, "keys": 128}, "dense"),
    ({"queries": 128, "keys": 128, "batch": 64}, "blocked"),
    ({"queries": 256, "keys": 256}, "dense"),
    ({"queries": 256, "keys": 256, "batch": 8}, "packed"),
    ({"queries": 256, "keys": 256, "active": 24, "causal": True}, "packed"),
    ({"queries": 1}, "dense"),
    ({"one_device": False}, "dense"),
    ({"platform": "gpu"}, "dense"),
    ({"platform": "tpu"}, "dense"),
  )
  def test_auto(self, changes, expected):
    self.assertEqual(_name(**changes), expected)

  @parameterized.parameters(
    ("cpu", "blocked"), ("gpu", "dense"), ("tpu", "dense")
  )
  def test_what_is_asked_for_is_done(self, platform, dense):
    self.assertEqual(_name("packed", platform=platform), "packed")
    self.assertEqual(_name("dense", platform=platform), dense)

  def test_nothing_to_pack_is_dense(self):
    self.assertEqual(_name("packed", active=32), "blocked")

  @parameterized.parameters(
    ({}, 64, 8),
    ({"queries": 256}, 32, 8),
    ({"causal": True}, 64, 4),
    ({"causal": True, "queries": 4096}, 128, 4),
  )
  def test_rows_of_packed_blocks(self, changes, rows, blocks_per_step):
    case = dataclasses.replace(_CASE, **changes)
    expected = Form("packed", rows, blocks_per_step)
    self.assertEqual(choose_form("packed", case), expected)

  @parameterized.parameters((1024, 512), (4096, 1024), (300, 300))
  def test_rows_of_dense_blocks(self, queries, rows):
    case = dataclasses.replace(_CASE, queries=queries, keys=4096)
    self.assertEqual(choose_form("dense", case), Form("blocked", rows))


class KernelTest(parameterized.TestCase):
  @parameterized.parameters(
    # Half of the heads are active: 256 tokens a head, and 2,048.
    ("cpu", 512, 64),
    ("gpu", 512, 64),
    ("gpu", 4096, 128),
    ("tpu", 512, 128),
    ("tpu", 4096, 256),
  )
  def test_rows_are_fewer_for_heads_with_few_tokens(
    self, platform, queries, rows
  ):
    case = dataclasses.replace(
      _CASE,
      target=Target(platform, platform),
      dtype="bfloat16",
      queries=queries,
    )
    with mock.patch.object(sizes, "measured", dict):
      self.assertEqual(choose_form("kernel", case), Form("kernel", rows))

  def test_bias_is_refused(self):
    with self.assertRaisesRegex(ValueError, "'kernel' adds no bias"):
      _name("kernel", platform="gpu", biased=True)


class CudnnTest(parameterized.TestCase):
  def test_is_taken_on_a_gpu(self):
    self.assertEqual(_name("cudnn", platform="gpu", dtype="bfloat16"), "cudnn")

  @parameterized.parameters(
    ({"platform": "tpu"}, "an NVIDIA GPU, this is a tpu"),
    ({"dtype": "float32"}, "bfloat16 or float16, not float32"),
    ({"head_dim": 36}, "a multiple of 8, not 36"),
  )
  def test_what_it_cannot_do_is_refused(self, changes, message):
    able = {"platform": "gpu", "dtype": "bfloat16"}
    with self.assertRaisesRegex(ValueError, message):
      _name("cudnn", **(able | changes))


def _cached_name(name, platform="gpu", new=1, head_dim=64):
  device = Target(platform, "")
  return choose_cached_form(name, device, new=new, head_dim=head_dim)


class CachedTest(parameterized.TestCase):
  @parameterized.product(name=IMPLEMENTATIONS, platform=("cpu", "gpu", "tpu"))
  def test_only_the_kernel_skips_heads_and_slots(self, name, platform):
    kernel = name == "kernel" or (name == "auto" and platform != "cpu")
    expected = "kernel" if kernel else "dense"
    self.assertEqual(_cached_name(name, platform), expected)

  @parameterized.parameters("kernel", "auto")
  def test_several_new_tokens_are_dense(self, name):
    self.assertEqual(_cached_name(name, new=2), "dense")

  @parameterized.parameters(
    {"head_dim": 257}, {"platform": "neuron", "head_dim": 64}
  )
  def test_auto_is_dense_where_there_is_no_kernel(self, **case):
    self.assertEqual(_cached_name("auto", **case), "dense")


class ErrorsTest(absltest.TestCase):
  def test_unknown_implementation_lists_the_known(self):
    with self.assertRaisesRegex(ValueError, "'flush' must be one of"):
      _name("flush")
    with self.assertRaisesRegex(ValueError, "'flush' must be one of"):
      _cached_name("flush")


if __name__ == "__main__":
  absltest.main()
