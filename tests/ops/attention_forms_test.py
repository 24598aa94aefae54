"""Which form a call gets."""

import dataclasses
import functools
import subprocess
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.config.layers import IMPLEMENTATIONS
from moh_jax.ops import target as target_lib
from moh_jax.ops.attention import attention, choose_cached_form, choose_form
from moh_jax.ops.attention_forms import AttentionCase, Form
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.kernels import attention as kernels
from moh_jax.ops.kernels import triton
from moh_jax.ops.kernels.attention import kernel_options
from moh_jax.ops.target import Target
from tests.ops import devices

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


class _TestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(devices.with_triton())


class ChooseTest(_TestCase):
  @parameterized.parameters(
    ({}, "packed"),
    ({"share": 0.75}, "packed"),
    ({"share": 0.9}, "blocked"),  # nothing is gained
    ({"share": 1.0}, "blocked"),
    ({"queries": 128, "keys": 128}, "dense"),
    ({"queries": 256, "keys": 256}, "dense"),
    ({"queries": 512, "keys": 512, "num_heads": 8}, "packed"),
    ({"queries": 256, "keys": 256, "share": 0.75, "causal": True}, "packed"),
    ({"queries": 1}, "dense"),
    ({"one_device": False}, "blocked"),
  )
  def test_auto_on_a_cpu(self, changes, expected):
    self.assertEqual(_name(**changes), expected)

  @parameterized.parameters(
    # Short sequences: the logits of one, not of the batch, are in the caches.
    ({"queries": 256, "keys": 256, "batch": 8}, Form("dense", one_by_one=True)),
    (
      {"queries": 128, "keys": 128, "batch": 64},
      Form("dense", one_by_one=True),
    ),
    # All heads of causal attention have the blocks of packed ones.
    ({"causal": True, "share": 1.0}, Form("blocked", False, 64, 4)),
    (
      {"causal": True, "share": 1.0, "queries": 512},
      Form("blocked", False, 64, 4),
    ),
    (
      {"causal": True, "share": 1.0, "queries": 256, "keys": 256},
      Form("blocked", False, 32, 4),
    ),
    ({"causal": True, "queries": 128, "keys": 128}, Form("dense")),
    (
      {"causal": True, "queries": 128, "keys": 128, "batch": 64},
      Form("blocked", False, 32, 4),
    ),
    # Blocks are faster than all logits, though these would fit.
    (
      {"share": 1.0, "queries": 512, "keys": 512, "num_heads": 8},
      Form("blocked", False, 512),
    ),
    (
      {"queries": 512, "keys": 512, "num_heads": 8, "dtype": "bfloat16"},
      Form("dense"),
    ),
    # XLA's partitioner would split a loop over sequences badly.
    (
      {"queries": 256, "keys": 256, "batch": 8, "one_device": False},
      Form("blocked", False, 256),
    ),
  )
  def test_blocks_of_auto_on_a_cpu(self, changes, expected):
    case = dataclasses.replace(_CASE, **changes)
    self.assertEqual(choose_form("auto", case), expected)

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
    ({"dtype": "float64"}, "dense", False),  # no kernel reads it
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


# What half of 8,192 causal tokens' heads, 4,096 bidirectional ones' and float32
# get: the form, and "+" where it packs.
_KINDS = {
  ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 80GB HBM3",
   "NVIDIA H100 PCIe", "NVIDIA H200"): ("kernel+", "cudnn+", "kernel+"),
  # Without figures of their own: only what is the same kernel on both sides.
  ("NVIDIA B200", "NVIDIA GB200", "NVIDIA B300", "NVIDIA RTX PRO 6000", "gpu",
   "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA A10", "NVIDIA A1000",
   "NVIDIA L4", "NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA X1",
   "NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 2000 Ada Generation",
   "NVIDIA RTX A6000", "NVIDIA GeForce MX570"):
    ("cudnn", "cudnn+", "kernel+"),
  # Neither cuDNN's attention nor Triton.
  ("Tesla T4", "NVIDIA T4", "Tesla V100-SXM2-16GB", "NVIDIA TITAN V", "T4G",
   "NVIDIA GeForce RTX 2080 Ti", "NVIDIA GeForce GTX 1650", "Quadro RTX 6000",
   "Tesla P100-PCIE-16GB", "Tesla K80", "NVIDIA T1000"): ("blocked",) * 3,
  # They read no PTX.
  ("AMD Instinct MI300X", "AMD Instinct MI250X", "MI355X", "gfx942",
   "AMD Radeon RX 7900 XTX", "Intel(R) Data Center GPU Max 1550"):
    ("blocked",) * 3,
  ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e"):
    ("kernel+",) * 3,
  ("TPU v4", "TPU7x", "TPU v9"): ("splash",) * 3,
}  # fmt: skip
_DEVICES = [(kind, forms) for kinds, forms in _KINDS.items() for kind in kinds]


def _device(kind: str, **options) -> Target:
  return Target("tpu" if "TPU" in kind else "gpu", kind, **options)


class DevicesTest(_TestCase):
  @parameterized.parameters(*_DEVICES)
  def test_auto(self, kind, expected):
    device, forms = _device(kind), []
    for tokens, dtype in ((8192, "bfloat16"), (4096, "bfloat16"), (4096, "")):
      case = dataclasses.replace(
        _CASE, target=device, queries=tokens, keys=tokens,
        causal=tokens == 8192, dtype=dtype or "float32",
      )  # fmt: skip
      form = choose_form("auto", case)
      forms.append(form.name + "+" * form.packs)
    self.assertEqual(tuple(forms), expected)
    plain = "blocked" in expected
    cached = choose_cached_form("auto", device, new=1, head_dim=64)
    self.assertEqual(cached, "dense" if plain else "kernel")
    if plain:
      for name in ("kernel", "cudnn"):
        with self.assertRaisesRegex(ValueError, f"'{name}' needs"):
          _name(name, target=device, dtype="bfloat16")

  @parameterized.parameters((5, False), (13, True))
  def test_causal_queries_of_more_keys_are_masked_for_cudnn(self, keys, masked):
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 8), "bfloat16") for n in (5, keys))
    chosen = mock.Mock(wraps=choose_form)
    with mock.patch("moh_jax.ops.attention.choose_form", chosen):
      jax.eval_shape(functools.partial(attention, causal=True), q, k, k)
    self.assertEqual(chosen.call_args.args[1].masked, masked)

  def test_other_accelerators_get_plain_xla(self):
    case = {"target": Target("neuron", "trn2"), "dtype": "bfloat16"}
    self.assertEqual(_name("auto", **case), "blocked")

  @parameterized.parameters("AMD Instinct MI300X", "Tesla T4")
  def test_their_programs_hold_plain_xla(self, kind):
    q = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((1, 4096, 2), bool)

    def attend(q, mask):
      return attention(q, q, q, causal=True, active=ActiveHeads(mask, 1))

    with devices.traced_for("gpu", kind):
      text = str(jax.make_jaxpr(attend)(q, mask))
    self.assertNotRegex(text, "pallas|cudnn")

  @parameterized.parameters(
    ("7.5", False, False), ("8.0", True, False), ("9.0", True, True),
    ("10.0", True, False), ("12.1", True, False), ("gfx942", False, False),
  )  # fmt: skip
  def test_a_device_that_is_here_tells_its_capability(
    self, capability, ampere, hopper
  ):
    device = types.SimpleNamespace(
      platform="gpu", device_kind="New", core_count=7,
      compute_capability=capability,
    )  # fmt: skip
    with (
      mock.patch.object(target_lib, "_default_device", lambda: device),
      mock.patch.object(target_lib, "cuda_version", lambda: 12090),
    ):
      found = target_lib.target()
    self.assertEqual(found, Target("gpu", "New", 7, capability, 12090))
    self.assertEqual((found.compute >= 8, found.is_hopper), (ampere, hopper))

  def test_the_default_device_may_be_the_name_of_a_platform(self):
    def found(platform=None):
      return [types.SimpleNamespace(platform=platform or "gpu", device_kind="")]

    with mock.patch.object(jax, "devices", found), jax.default_device("cpu"):
      self.assertEqual(target_lib.target().platform, "cpu")

  def test_a_mesh_of_devices_that_are_here_too(self):
    device = types.SimpleNamespace(
      platform="gpu", device_kind="New", compute_capability="7.5"
    )
    with (
      mock.patch.object(jax, "devices", lambda: [device]),
      devices.traced_for("gpu", "New", 7),
    ):
      self.assertEqual(target_lib.target().compute, 7.5)

  @parameterized.parameters(
    (None, "mosaic_gpu"), (12060, "mosaic_gpu"), (12080, "triton"),
    (12090, "triton"), (13000, "mosaic_gpu"),
  )  # fmt: skip
  def test_cuda_that_miscompiles_hopper_kernels(self, cuda, backend):
    device = _device("NVIDIA H100 80GB HBM3", cuda=cuda)
    options = kernel_options(device, "bfloat16", 64)
    self.assertEqual(options["backend"], backend)


class TritonTest(parameterized.TestCase):
  @parameterized.parameters(
    # Every head where that is faster than packing in plain XLA.
    ("NVIDIA A100-SXM4-80GB", {"causal": True}, "cudnn"),
    ("NVIDIA A100-SXM4-80GB", {}, "cudnn"),
    ("NVIDIA A100-SXM4-80GB", {"causal": True, "masked": True}, "blocked"),
    ("NVIDIA A100-SXM4-80GB", {"dtype": "float32"}, "blocked"),
    ("NVIDIA H100 80GB HBM3", {"causal": True}, "kernel"),  # Mosaic GPU
    ("NVIDIA H100 80GB HBM3", {"causal": True, "head_dim": 72}, "cudnn"),
  )
  def test_auto_takes_the_next_best_form(self, kind, changes, expected):
    long = {"queries": 8192, "keys": 8192, "dtype": "bfloat16"}
    case = {"target": _device(kind)} | long | changes
    with mock.patch.object(triton, "refused", lambda: "Triton"):
      self.assertEqual(_name(**case), expected)
      if expected != "kernel":
        with self.assertRaisesRegex(ValueError, "'kernel' needs Triton"):
          _name("kernel", **case)
      cached = choose_cached_form(
        "auto", case["target"], new=1, head_dim=64
      )  # fmt: skip
      self.assertEqual(cached, "dense")

  def test_a_refusal_is_told_in_one_line(self):
    refuses = mock.Mock(side_effect=NotImplementedError("gone\nfor good"))
    found = mock.patch.object(triton, "MISSING", "")
    with found, mock.patch.object(triton, "launch", refuses):
      problem = triton.refused.__wrapped__()
    self.assertRegex(problem, r"jax [\d.]+ refuses \(.*Error: gone\)$")

  def test_all_else_works_where_jax_has_removed_it(self):
    code = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax, numpy as np
from moh_jax.ops.attention import attention
q = jax.random.normal(jax.random.key(0), (1, 24, 2, 16))
forms = [attention(q, q, q, implementation=x) for x in ("kernel", "dense")]
np.testing.assert_allclose(*forms, atol=1e-5)
from moh_jax.ops.kernels.attention import readable
try:
  readable("triton", q, q, q)
except ValueError as error:
  print(error)
"""
    result = subprocess.run(
      [sys.executable, "-c", code], capture_output=True, text=True
    )
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertIn("'triton' needs Pallas' Triton, which jax", result.stdout)


class KernelTest(_TestCase):
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
    with mock.patch.object(kernels, "measured", dict):
      self.assertEqual(choose_form("kernel", case), Form("kernel", True, rows))

  def test_bias_is_refused(self):
    with self.assertRaisesRegex(ValueError, "'kernel' needs .* without a bias"):
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


class CachedTest(_TestCase):
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
