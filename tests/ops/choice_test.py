"""Which form a call gets, and the sizes of the kernels' blocks and tiles."""

import dataclasses
import types
from unittest import mock

import jax
from absl.testing import parameterized

from moh_jax.config.layers import IMPLEMENTATIONS
from moh_jax.ops import target as target_lib
from moh_jax.ops.attention import (
  HOPPER,
  TPU,
  Form,
  choose_cached_form,
  choose_form,
)
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.kernels import decode
from moh_jax.ops.kernels.attention import block_sizes
from moh_jax.ops.pairs import ActiveHeads
from moh_jax.ops.target import Target
from tests.ops import devices

_CPU = Target("cpu", "cpu")
_TPU = Target("tpu", "TPU v5 lite")
_A100 = Target("gpu", "NVIDIA A100-SXM4-80GB")
_H100 = Target("gpu", "NVIDIA H100 80GB HBM3")
_GPU_CASE = {"device": _H100, "dtype": "bfloat16", "share": 0.4}
_TPU_CASE = _GPU_CASE | {"device": _TPU}
_shape = jax.ShapeDtypeStruct


def _form(
  implementation: str = "auto", tokens: int = 1024, *, queries: int = 0,
  keys: int = 0, batch: int = 1, heads: int = 32, head_dim: int = 64,
  dtype: str = "float32", share: float = 0.5, causal: bool = False,
  masked: bool = False, biased: bool = False, device: Target = _CPU,
  one_device: bool = True, has_cudnn: bool = True,
) -> Form:  # fmt: skip
  queries, keys = queries or tokens, keys or tokens
  q, k = (_shape((batch, n, heads, head_dim), dtype) for n in (queries, keys))
  segments = _shape((batch, keys), int) if masked else None
  bias = _shape((1, 1, queries, keys), dtype) if biased else None
  active = ActiveHeads(_shape(q.shape[:3], bool), heads, share * heads)
  call = Call(q, k, k, Visible(None, segments, causal), 1.0, bias, active)
  here = {"has_cudnn": has_cudnn, "on_one_device": one_device}
  here = {name: mock.Mock(return_value=value) for name, value in here.items()}
  # Arrays of float64 exist there alone.
  with (
    jax.enable_x64(dtype == "float64"),
    mock.patch.multiple("moh_jax.ops.attention", **here),
  ):
    return choose_form(implementation, call, device)


def _told(form: Form) -> str:
  """Its name, "+" if it packs, rows of blocks and blocks of a step, if any."""
  rows = f" {form.rows}" if form.rows else ""
  more = f"x{form.blocks_per_step}" if form.blocks_per_step > 1 else ""
  return f"{form.name}{'+' * form.packs}{rows}{more}"


class ChooseTest(parameterized.TestCase):
  @parameterized.parameters(
    ({}, "packed+ 64x8"), ({"tokens": 4096}, "packed+ 64x4"),
    ({"tokens": 4096, "causal": True}, "packed+ 128x4"),
    ({"tokens": 256, "share": 0.75, "causal": True}, "packed+ 32x4"),
    ({"share": 0.9}, "blocked 512"),  # nothing is gained
    ({"tokens": 256}, "dense"), ({"queries": 1}, "dense"),
    ({"tokens": 256, "batch": 8, "share": 1.0}, "blocked 256"),
    # All heads of causal attention have the blocks of packed ones.
    ({"causal": True, "share": 1.0}, "blocked 64x4"),
    ({"causal": True, "share": 1.0, "tokens": 256}, "blocked 32x4"),
    ({"causal": True, "tokens": 128}, "dense"),
    ({"causal": True, "tokens": 128, "batch": 64}, "blocked 32x4"),
    # Blocks are faster than all logits, though these would fit.
    ({"share": 1.0, "tokens": 512, "heads": 8}, "blocked 512"),
    ({"tokens": 512, "heads": 8, "dtype": "bfloat16"}, "dense"),
    ({"one_device": False}, "blocked 512"),
  )  # fmt: skip
  def test_auto_on_a_cpu(self, changes, expected):
    self.assertEqual(_told(_form(**changes)), expected)

  @parameterized.parameters(
    ({}, "kernel+"),
    ({"share": 0.9}, "cudnn"),  # too short for what it saves
    ({"share": 1.0}, "cudnn"), ({"causal": True}, "kernel+"),
    ({"causal": True, "tokens": 512}, "cudnn"),
    ({"causal": True, "share": 0.75}, "cudnn"),
    ({"causal": True, "tokens": 4096, "share": 0.75}, "kernel+"),
    ({"causal": True, "masked": True, "share": 0.75}, "kernel"),
    ({"masked": True}, "kernel+"), ({"biased": True}, "cudnn"),
    ({"head_dim": 72}, "cudnn"), ({"device": _A100}, "cudnn"),
    ({"device": _A100, "masked": True, "share": 1.0}, "dense"),
    # The last stage of a ViT of 224 pixels: cuDNN has no gradients there.
    ({"biased": True, "tokens": 49}, "dense"),
    ({"biased": True, "dtype": "float32", "batch": 16}, "blocked"),
    ({"dtype": "float32"}, "dense"),
    ({"head_dim": 512, "share": 1.0}, "dense"),
    ({"one_device": False}, "dense"), ({"has_cudnn": False}, "kernel+"),
    ({"dtype": "float64"}, "dense"),  # no kernel reads it
    ({"device": _TPU}, "kernel+"), ({"device": _TPU, "share": 1.0}, "splash"),
    ({"device": _TPU, "causal": True, "share": 0.9}, "splash"),
    ({"device": _TPU, "share": 1.0, "queries": 1000}, "kernel"),
    ({"device": _TPU, "biased": True}, "dense"),
    ({"device": Target("neuron", "trn2"), "tokens": 8192}, "blocked"),
  )  # fmt: skip
  def test_auto_on_a_gpu_or_tpu(self, changes, expected):
    form, _, _ = _told(_form(**_GPU_CASE | changes)).partition(" ")
    self.assertEqual(form, expected)

  @parameterized.parameters(
    ("packed", {"device": Target("gpu", "gpu")}, "packed+ 64x8"),
    ("packed", {"tokens": 256}, "packed+ 32x8"),
    ("packed", {"share": 1.0}, "blocked 512"),
    ("dense", {"queries": 4096, "keys": 4096}, "blocked 1024"),
    ("dense", {"queries": 300, "keys": 4096}, "blocked 300"),
    # Half of the heads are active: blocks have fewer rows for few tokens.
    ("kernel", {"tokens": 512}, "kernel+ 128"),
    ("kernel", _GPU_CASE | {"tokens": 512}, "kernel+ 64"),
    ("kernel", _GPU_CASE | {"tokens": 4096}, "kernel+ 128"),
    ("kernel", _TPU_CASE | {"tokens": 4096}, "kernel+ 256"),
    ("cudnn", _GPU_CASE, "cudnn"),
  )  # fmt: skip
  def test_what_is_asked_for(self, name, changes, expected):
    self.assertEqual(_told(_form(name, **changes)), expected)

  @parameterized.parameters(
    ("kernel", {"biased": True}, "'kernel' needs .* without a bias"),
    ("cudnn", _TPU_CASE, "an NVIDIA GPU, this is a tpu"),
    ("cudnn", {"device": _H100}, "bfloat16 or float16, not float32"),
    ("cudnn", _GPU_CASE | {"head_dim": 36}, "a multiple of 8 .*, not 36"),
    ("cudnn", _GPU_CASE | {"biased": True, "keys": 49},
     "beside a bias, not 1024 and 49"),
    ("kernel", _TPU_CASE | {"dtype": "float16"}, "float32, not float16"),
    ("flush", {}, "'flush' must be one of"),
  )  # fmt: skip
  def test_what_cannot_be_asked_for(self, name, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      _form(name, **changes)

  @parameterized.parameters(
    ("bfloat16", 64, None, True), ("float16", 128, None, True),
    ("bfloat16", 96, 12060, True), ("bfloat16", 72, None, False),
    ("float32", 64, None, False), ("bfloat16", 64, 13000, True),
    # CUDA that miscompiles them.
    ("bfloat16", 64, 12080, False), ("bfloat16", 64, 12090, False),
  )  # fmt: skip
  def test_kernels_of_hopper_gpus(self, dtype, head_dim, cuda, able):
    hopper = dataclasses.replace(_H100, cuda=cuda)
    self.assertEqual(not HOPPER.unable(hopper, dtype, head_dim), able)
    self.assertIn("Hopper", HOPPER.unable(_A100, dtype, head_dim))


class DevicesTest(parameterized.TestCase):
  @parameterized.parameters(
    *((f"NVIDIA {x}", "", 9) for x in ("H100 PCIe", "H200", "GH200 480GB")),
    *((x, "", 8) for x in ("NVIDIA A100-SXM4-80GB", "NVIDIA GB200", "gpu")),
    # A device that is here tells its capability.
    ("New", "7.5", 7.5), ("New", "12.1", 12.1), ("New", "gfx942", 0),
  )  # fmt: skip
  def test_compute_of_gpus(self, kind, capability, compute):
    device = Target("gpu", kind, capability=capability)
    self.assertEqual(device.compute, compute)

  def test_target_is_a_device_that_is_here(self):
    device = types.SimpleNamespace(
      platform="gpu", device_kind="New", compute_capability="7.5"
    )
    with (
      mock.patch.object(jax, "devices", lambda *_: [device]),
      devices.traced_for("gpu", "New", 7),
    ):
      found = target_lib.target()
    self.assertEqual((found.cores, found.capability), (7, "7.5"))

  @parameterized.parameters(("7.5", "Tesla T4"), ("gfx942", "MI300X"))
  def test_devices_that_are_too_old_or_read_no_ptx(self, capability, kind):
    device = Target("gpu", kind, capability=capability)
    case = {"device": device, "dtype": "bfloat16"}
    self.assertEqual(_form(tokens=8192, **case).name, "blocked")
    cached = choose_cached_form("auto", device, new=1, head_dim=64)
    self.assertEqual(cached, "dense")
    for name in ("kernel", "cudnn"):
      with self.assertRaisesRegex(ValueError, f"'{name}' needs"):
        _form(name, **case)

  @parameterized.parameters(
    (5, True, False, False), (13, True, False, True), (5, True, True, True),
    (5, False, True, False), (13, False, False, False),
  )  # fmt: skip
  def test_what_cudnn_would_read_as_a_mask(self, keys, causal, hides, masked):
    q, k = (_shape((1, n, 2, 8), "bfloat16") for n in (5, keys))
    key_mask = _shape((1, keys), bool) if hides else None
    call = Call(q, k, k, Visible(key_mask, causal=causal), 1.0)
    self.assertEqual(call.masked, masked)

  @parameterized.product(name=IMPLEMENTATIONS, platform=("cpu", "gpu", "tpu"))
  def test_only_the_kernel_skips_heads_and_slots(self, name, platform):
    def cached(new=1, head_dim=64, platform=platform):
      device = Target(platform, "")
      return choose_cached_form(name, device, new=new, head_dim=head_dim)

    kernel = name == "kernel" or (name == "auto" and platform == "gpu")
    self.assertEqual(cached(), "kernel" if kernel else "dense")
    self.assertEqual(cached(new=2), "dense")
    if name == "auto":
      self.assertEqual(cached(head_dim=257), "dense")
      self.assertEqual(cached(platform="neuron"), "dense")
      with mock.patch.object(decode, "plgpu", None):  # JAX removed Triton
        self.assertEqual(cached(), "dense")


class SizesTest(parameterized.TestCase):
  @parameterized.product(
    case=((HOPPER, "bfloat16"), (TPU, "bfloat16"), (TPU, "float32")),
    head_dim=(64, 96, 128, 256),
  )
  def test_every_back_end_has_tiles(self, case, head_dim):
    kernels, dtype = case
    tiles = block_sizes(kernels, head_dim, dtype)
    few = block_sizes(kernels, head_dim, dtype, per_head=100)
    self.assertLessEqual(few.forward.rows, min(tiles.forward.rows, 128))
    for sizes in (tiles, few) if kernels is HOPPER else ():
      for tile in (sizes.dq, sizes.dkv):
        self.assertEqual(sizes.forward.rows % tile.rows, 0)
