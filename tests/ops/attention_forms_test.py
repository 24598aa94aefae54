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
  kernel_options,
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
  share=0.5,
)


def _name(implementation: str = "auto", **changes) -> str:
  if platform := changes.pop("platform", None):
    changes["target"] = Target(platform, platform)
  case = dataclasses.replace(_CASE, **changes)
  return choose_form(implementation, case).name


class ChooseTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, "packed"),
    ({"share": 0.75}, "packed"),
    ({"share": 0.9}, "blocked"),  # nothing is gained
    ({"share": 1.0}, "blocked"),
    ({"queries": 128, "keys": 128}, "dense"),
    ({"queries": 128, "keys": 128, "batch": 64}, "blocked"),
    ({"queries": 256, "keys": 256}, "dense"),
    ({"queries": 256, "keys": 256, "batch": 8}, "packed"),
    ({"queries": 256, "keys": 256, "share": 0.75, "causal": True}, "packed"),
    ({"queries": 1}, "dense"),
    ({"one_device": False}, "blocked"),
  )
  def test_auto_on_a_cpu(self, changes, expected):
    self.assertEqual(_name(**changes), expected)

  @parameterized.parameters(
    ({}, "cudnn", True),
    ({"share": 0.9}, "cudnn", False),  # too short for what it saves
    ({"share": 1.0}, "cudnn", False),
    ({"causal": True}, "cudnn", False),
    ({"causal": True, "queries": 4096, "keys": 4096}, "kernel", True),
    ({"causal": True, "masked": True, "share": 0.75}, "kernel", False),
    ({"masked": True}, "kernel", True),
    ({"biased": True}, "cudnn", False),
    # The last stage of a ViT of 224 pixels: cuDNN has no gradients there.
    ({"biased": True, "queries": 49, "keys": 49}, "dense", False),
    ({"biased": True, "dtype": "float32"}, "dense", False),
    ({"biased": True, "dtype": "float32", "batch": 16}, "blocked", False),
    ({"dtype": "float32"}, "kernel", True),
    ({"dtype": "float32", "share": 1.0}, "kernel", False),
    ({"head_dim": 36, "share": 1.0}, "kernel", False),
    ({"head_dim": 512, "share": 1.0}, "dense", False),
    ({"one_device": False}, "dense", False),
    ({"has_cudnn": False}, "kernel", True),
  )
  def test_auto_on_a_gpu(self, changes, name, packs):
    gpu = Target("gpu", "NVIDIA A100-SXM4-80GB")
    case = {"target": gpu, "dtype": "bfloat16", "share": 0.4} | changes
    form = choose_form("auto", dataclasses.replace(_CASE, **case))
    self.assertEqual((form.name, form.packs), (name, packs))

  @parameterized.parameters(
    ("bfloat16", 64, "mosaic_gpu"),
    ("float16", 128, "mosaic_gpu"),
    ("bfloat16", 96, "mosaic_gpu"),
    ("bfloat16", 72, "triton"),
    ("float32", 64, "triton"),
    ("", 64, "triton"),
  )
  def test_kernels_of_hopper_gpus(self, dtype, head_dim, backend):
    hopper = Target("gpu", "NVIDIA H200")
    options = {"backend": backend, "interpret": False}
    self.assertEqual(kernel_options(hopper, dtype, head_dim), options)
    ampere = Target("gpu", "NVIDIA A100-SXM4-80GB")
    options = kernel_options(ampere, dtype, head_dim)
    self.assertEqual(options["backend"], "triton")

  @parameterized.parameters(
    ({}, "kernel", True),
    ({"share": 1.0}, "splash", False),
    ({"causal": True, "share": 0.9}, "splash", False),
    ({"share": 1.0, "queries": 1000}, "kernel", False),
    ({"biased": True}, "dense", False),
    ({"biased": True, "batch": 16}, "blocked", False),
  )
  def test_auto_on_a_tpu(self, changes, name, packs):
    tpu = Target("tpu", "TPU v5 lite")
    case = {"target": tpu, "dtype": "bfloat16", "share": 0.4} | changes
    form = choose_form("auto", dataclasses.replace(_CASE, **case))
    self.assertEqual((form.name, form.packs), (name, packs))

  @parameterized.product(
    platform=("cpu", "gpu", "tpu"),
    implementation=("auto", "dense"),
    one_device=(True, False),
    biased=(True, False),
  )
  def test_all_logits_at_once_are_bounded(self, platform, **case):
    implementation = case.pop("implementation")
    longest = {"queries": 16384, "keys": 16384, "batch": 4}
    form = _name(implementation, platform=platform, **longest, **case)
    self.assertNotEqual(form, "dense")

  @parameterized.parameters("cpu", "gpu", "tpu")
  def test_what_is_asked_for_is_done(self, platform):
    self.assertEqual(_name("packed", platform=platform), "packed")

  def test_nothing_to_pack_is_dense(self):
    self.assertEqual(_name("packed", share=1.0), "blocked")

  @parameterized.parameters(
    ({}, 64, 8),
    ({"queries": 256}, 32, 8),
    ({"causal": True}, 64, 4),
    ({"causal": True, "queries": 4096}, 128, 4),
  )
  def test_rows_of_packed_blocks(self, changes, rows, blocks_per_step):
    case = dataclasses.replace(_CASE, **changes)
    expected = Form("packed", True, rows, blocks_per_step)
    self.assertEqual(choose_form("packed", case), expected)

  @parameterized.parameters((1024, 512), (4096, 1024), (300, 300))
  def test_rows_of_dense_blocks(self, queries, rows):
    case = dataclasses.replace(_CASE, queries=queries, keys=4096)
    self.assertEqual(choose_form("dense", case), Form("blocked", False, rows))


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
      self.assertEqual(choose_form("kernel", case), Form("kernel", True, rows))

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
    ({"biased": True, "keys": 49}, "beside a bias, not 1024 and 49"),
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
