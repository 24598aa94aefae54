"""Which form a call gets, and the sizes of the kernels' blocks and tiles."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from benchmarks import predict
from moh_jax.config.layers import IMPLEMENTATIONS
from moh_jax.ops import target as target_lib
from moh_jax.ops.attention import (
  CROSSOVERS,
  LENGTHS,
  attention,
  choose_cached_form,
  choose_form,
  largest_share,
)
from moh_jax.ops.attention_forms import AttentionCase, Form
from moh_jax.ops.kernels import attention as kernels
from moh_jax.ops.kernels import triton
from moh_jax.ops.kernels.attention import block_sizes, kernel_options
from moh_jax.ops.kernels.problem import BlockSizes, Tile
from moh_jax.ops.target import Target
from tests.ops import devices

_CASE = AttentionCase(
  target=Target("cpu", "cpu"), batch=1, queries=1024, keys=1024, num_heads=32,
  head_dim=64, share=0.5,
)  # fmt: skip
_TPU = Target("tpu", "TPU v5 lite")
_A100 = Target("gpu", "NVIDIA A100-SXM4-80GB")
_H100 = Target("gpu", "NVIDIA H100 80GB HBM3")
_H200 = Target("gpu", "NVIDIA H200")
_GPU_CASE = {"target": _A100, "dtype": "bfloat16", "share": 0.4}
_TPU_CASE = _GPU_CASE | {"target": _TPU}


def _form(implementation: str = "auto", tokens: int = 1024, **changes) -> Form:
  if platform := changes.pop("platform", None):
    changes["target"] = Target(platform, platform)
  changes = {"queries": tokens, "keys": tokens} | changes
  return choose_form(implementation, dataclasses.replace(_CASE, **changes))


def _told(form: Form) -> str:
  return form.name + "+" * form.packs


class _TestCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(devices.with_triton())
    self.enter_context(mock.patch.object(kernels, "measured", dict))


_ONE_BY_ONE = Form("dense", one_by_one=True)


class ChooseTest(_TestCase):
  @parameterized.parameters(
    ({}, Form("packed", True, 64, 8)),
    ({"tokens": 4096}, Form("packed", True, 64, 4)),
    ({"tokens": 4096, "causal": True}, Form("packed", True, 128, 4)),
    ({"tokens": 256, "share": 0.75, "causal": True},
     Form("packed", True, 32, 4)),
    ({"share": 0.9}, Form("blocked", False, 512)),  # nothing is gained
    ({"share": 1.0}, Form("blocked", False, 512)),
    ({"tokens": 128}, Form("dense")), ({"tokens": 256}, Form("dense")),
    ({"queries": 1}, Form("dense")),
    # Short sequences: the logits of one, not of the batch, are in the caches.
    ({"tokens": 256, "batch": 8}, _ONE_BY_ONE),
    ({"tokens": 128, "batch": 64}, _ONE_BY_ONE),
    # All heads of causal attention have the blocks of packed ones.
    ({"causal": True, "share": 1.0}, Form("blocked", False, 64, 4)),
    ({"causal": True, "share": 1.0, "tokens": 256},
     Form("blocked", False, 32, 4)),
    ({"causal": True, "tokens": 128}, Form("dense")),
    ({"causal": True, "tokens": 128, "batch": 64},
     Form("blocked", False, 32, 4)),
    # Blocks are faster than all logits, though these would fit.
    ({"share": 1.0, "tokens": 512, "num_heads": 8},
     Form("blocked", False, 512)),
    ({"tokens": 512, "num_heads": 8, "dtype": "bfloat16"}, Form("dense")),
    # XLA's partitioner would split a loop over sequences badly.
    ({"tokens": 256, "batch": 8, "one_device": False},
     Form("blocked", False, 256)),
    ({"one_device": False}, Form("blocked", False, 512)),
  )  # fmt: skip
  def test_auto_on_a_cpu(self, changes, expected):
    self.assertEqual(_form(**changes), expected)

  @parameterized.parameters(
    ({}, "kernel+"),
    ({"share": 0.9}, "cudnn"),  # too short for what it saves
    ({"share": 1.0}, "cudnn"), ({"causal": True}, "cudnn"),
    ({"causal": True, "tokens": 4096}, "kernel+"),
    ({"causal": True, "masked": True, "share": 0.75}, "kernel"),
    ({"masked": True}, "kernel+"), ({"biased": True}, "cudnn"),
    # The last stage of a ViT of 224 pixels: cuDNN has no gradients there.
    ({"biased": True, "tokens": 49}, "dense"),
    ({"biased": True, "dtype": "float32"}, "dense"),
    ({"biased": True, "dtype": "float32", "batch": 16}, "blocked"),
    ({"dtype": "float32"}, "kernel+"),
    ({"dtype": "float32", "share": 1.0}, "kernel"),
    ({"head_dim": 36, "share": 1.0}, "kernel"),
    ({"head_dim": 512, "share": 1.0}, "dense"),
    ({"one_device": False}, "dense"), ({"has_cudnn": False}, "kernel+"),
    ({"dtype": "float64"}, "dense"),  # no kernel reads it
    ({"target": _TPU}, "kernel+"), ({"target": _TPU, "share": 1.0}, "splash"),
    ({"target": _TPU, "causal": True, "share": 0.9}, "splash"),
    ({"target": _TPU, "share": 1.0, "queries": 1000}, "kernel"),
    ({"target": _TPU, "biased": True}, "dense"),
    ({"target": _TPU, "biased": True, "batch": 16}, "blocked"),
    ({"target": Target("neuron", "trn2"), "tokens": 8192}, "blocked"),
  )  # fmt: skip
  def test_auto_on_a_gpu_or_tpu(self, changes, expected):
    self.assertEqual(_told(_form(**_GPU_CASE | changes)), expected)

  @parameterized.product(
    platform=("cpu", "gpu", "tpu"), implementation=("auto", "dense"),
    one_device=(True, False), biased=(True, False),
  )  # fmt: skip
  def test_all_logits_at_once_are_bounded(self, implementation, **case):
    form = _form(implementation, 16384, batch=4, **case)
    self.assertNotEqual(form.name, "dense")

  @parameterized.parameters(
    ("packed", {"platform": "gpu"}, Form("packed", True, 64, 8)),
    ("packed", {"platform": "tpu"}, Form("packed", True, 64, 8)),
    ("packed", {"tokens": 256}, Form("packed", True, 32, 8)),
    ("packed", {"share": 1.0}, Form("blocked", False, 512)),
    ("dense", {"queries": 4096, "keys": 4096}, Form("blocked", False, 1024)),
    ("dense", {"queries": 300, "keys": 4096}, Form("blocked", False, 300)),
    # Half of the heads are active: blocks have fewer rows for few tokens.
    ("kernel", {"tokens": 512}, Form("kernel", True, 64)),
    ("kernel", _GPU_CASE | {"tokens": 512}, Form("kernel", True, 64)),
    ("kernel", _GPU_CASE | {"tokens": 4096}, Form("kernel", True, 128)),
    ("kernel", _TPU_CASE | {"tokens": 512}, Form("kernel", True, 128)),
    ("kernel", _TPU_CASE | {"tokens": 4096}, Form("kernel", True, 256)),
    ("cudnn", _GPU_CASE, Form("cudnn")),
    ("kernel", {"biased": True}, "'kernel' needs .* without a bias"),
    ("cudnn", _TPU_CASE, "an NVIDIA GPU, this is a tpu"),
    ("cudnn", {"target": _A100}, "bfloat16 or float16, not float32"),
    ("cudnn", _GPU_CASE | {"head_dim": 36}, "a multiple of 8, not 36"),
    ("cudnn", _GPU_CASE | {"biased": True, "keys": 49},
     "beside a bias, not 1024 and 49"),
    ("flush", {}, "'flush' must be one of"),
  )  # fmt: skip
  def test_what_is_asked_for(self, name, changes, expected):
    if isinstance(expected, Form):
      self.assertEqual(_form(name, **changes), expected)
    else:
      with self.assertRaisesRegex(ValueError, expected):
        _form(name, **changes)

  @parameterized.parameters(
    ("bfloat16", 64, None, "mosaic_gpu"), ("float16", 128, None, "mosaic_gpu"),
    ("bfloat16", 96, 12060, "mosaic_gpu"), ("bfloat16", 72, None, "triton"),
    ("float32", 64, None, "triton"), ("", 64, None, "triton"),
    # CUDA that miscompiles them.
    ("bfloat16", 64, 12080, "triton"), ("bfloat16", 64, 12090, "triton"),
    ("bfloat16", 64, 13000, "mosaic_gpu"),
  )  # fmt: skip
  def test_kernels_of_hopper_gpus(self, dtype, head_dim, cuda, backend):
    hopper = dataclasses.replace(_H100, cuda=cuda)
    options = {"backend": backend, "interpret": False}
    self.assertEqual(kernel_options(hopper, dtype, head_dim), options)
    options = kernel_options(_A100, dtype, head_dim)
    self.assertEqual(options["backend"], "triton")


# What half of 8,192 causal tokens' heads, 4,096 bidirectional ones' and float32
# get: the form, and "+" where it packs.
_KINDS = {
  ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 80GB HBM3",
   "NVIDIA H100 PCIe", "NVIDIA H200"): ("kernel+", "kernel+", "kernel+"),
  # Without figures of their own: only what is the same kernel on both sides.
  ("NVIDIA B200", "NVIDIA GB200", "NVIDIA B300", "NVIDIA RTX PRO 6000", "gpu",
   "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA A10", "NVIDIA A1000",
   "NVIDIA L4", "NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA X1",
   "NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 2000 Ada Generation",
   "NVIDIA RTX A6000", "NVIDIA GeForce MX570"):
    ("cudnn", "cudnn", "kernel+"),
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


class DevicesTest(_TestCase):
  @parameterized.parameters(*_DEVICES)
  def test_auto(self, kind, expected):
    device, forms = Target("tpu" if "TPU" in kind else "gpu", kind), []
    for tokens, dtype in ((8192, "bfloat16"), (4096, "bfloat16"), (4096, "")):
      form = _form(
        tokens=tokens, target=device, causal=tokens == 8192,
        dtype=dtype or "float32",
      )  # fmt: skip
      forms.append(_told(form))
    self.assertEqual(tuple(forms), expected)
    plain = "blocked" in expected
    cached = choose_cached_form("auto", device, new=1, head_dim=64)
    self.assertEqual(cached, "dense" if plain else "kernel")
    if plain:
      for name in ("kernel", "cudnn"):
        with self.assertRaisesRegex(ValueError, f"'{name}' needs"):
          _form(name, target=device, dtype="bfloat16")

  @parameterized.parameters(
    (5, True, False, False), (13, True, False, True), (5, True, True, True),
    (5, False, True, False), (13, False, False, False),
  )  # fmt: skip
  def test_what_cudnn_would_read_as_a_mask(self, keys, causal, hides, masked):
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 8), "bfloat16") for n in (5, keys))
    key_mask = jax.ShapeDtypeStruct((1, keys), bool) if hides else None
    chosen = mock.Mock(wraps=choose_form)
    call = functools.partial(attention, causal=causal)
    with mock.patch("moh_jax.ops.attention.choose_form", chosen):
      jax.eval_shape(call, q, k, k, key_mask=key_mask)
    self.assertEqual(chosen.call_args.args[1].masked, masked)

  @parameterized.parameters(("7.5", 0, 0), ("8.0", 1, 0), ("9.0", 1, 1),
                            ("12.1", 1, 0), ("gfx942", 0, 0))  # fmt: skip
  def test_a_device_that_is_here_tells_its_capability(
    self, capability, ampere, hopper
  ):
    device = types.SimpleNamespace(
      platform="gpu", device_kind="New", core_count=7,
      compute_capability=capability,
    )  # fmt: skip
    with (
      mock.patch.object(jax, "devices", lambda *_: [device]),
      devices.traced_for("gpu", "New", 7),  # a mesh of devices that are here
    ):
      found = target_lib.target()
    self.assertEqual((found.cores, found.capability), (7, capability))
    self.assertEqual((found.compute >= 8, found.is_hopper), (ampere, hopper))

  @parameterized.product(name=IMPLEMENTATIONS, platform=("cpu", "gpu", "tpu"))
  def test_only_the_kernel_skips_heads_and_slots(self, name, platform):
    def cached(new=1, head_dim=64, platform=platform):
      device = Target(platform, "")
      return choose_cached_form(name, device, new=new, head_dim=head_dim)

    kernel = name == "kernel" or (name == "auto" and platform != "cpu")
    self.assertEqual(cached(), "kernel" if kernel else "dense")
    self.assertEqual(cached(new=2), "dense")
    if name == "auto":
      self.assertEqual(cached(head_dim=257), "dense")
      self.assertEqual(cached(platform="neuron"), "dense")


class TritonTest(parameterized.TestCase):
  @parameterized.parameters(
    # Every head where that is faster than packing in plain XLA.
    (_A100, {"causal": True}, "cudnn"), (_A100, {}, "cudnn"),
    (_A100, {"causal": True, "masked": True}, "blocked"),
    (_A100, {"dtype": "float32"}, "blocked"),
    (_H100, {"causal": True}, "kernel"),  # Mosaic GPU
    (_H100, {"causal": True, "head_dim": 72}, "cudnn"),
  )  # fmt: skip
  def test_auto_takes_the_next_best_form(self, device, changes, expected):
    case = {"target": device, "tokens": 8192, "dtype": "bfloat16"} | changes
    with mock.patch.object(triton, "refused", lambda: "Triton"):
      self.assertEqual(_form(**case).name, expected)
      if expected != "kernel":
        with self.assertRaisesRegex(ValueError, "'kernel' needs Triton"):
          _form("kernel", **case)
      cached = choose_cached_form("auto", device, new=1, head_dim=64)
      self.assertEqual(cached, "dense")

  @pytest.mark.integration
  def test_all_else_works_where_jax_has_removed_it(self):
    code = """
import sys
sys.modules["jax.experimental.pallas.triton"] = None
import jax, numpy as np
from moh_jax.ops.attention import attention
q = jax.random.normal(jax.random.key(0), (1, 24, 2, 16))
forms = [attention(q, q, q, implementation=x) for x in ("kernel", "dense")]
np.testing.assert_allclose(*forms, atol=1e-5)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class CrossoversTest(parameterized.TestCase):
  """Up to which share packing is taken to be faster."""

  def test_predicted_entries_are_what_the_script_predicts(self):
    entries = [x for x in CROSSOVERS if not x.measured]
    self.assertEqual(entries, predict.crossovers())
    for entry in CROSSOVERS:  # longer sequences allow larger shares
      self.assertLen(entry.shares, len(LENGTHS))
      self.assertEqual(sorted(entry.shares), list(entry.shares))
      self.assertBetween(entry.shares[-1], 0.5, 1)

  def test_lengths_between_are_interpolated(self):
    def share(tokens, device=_H200):
      case = {"target": device, "queries": tokens, "dtype": "bfloat16"}
      return largest_share(dataclasses.replace(_CASE, **case), "mosaic_gpu")

    self.assertEqual((share(1024), share(2048)), (0.7, 0.79))
    self.assertAlmostEqual(share(1448), 0.745, places=3)
    self.assertEqual(share(10**6), share(LENGTHS[-1]))
    self.assertEqual(share(LENGTHS[0] - 1), 0)
    # The faster the memory, the cheaper the tables of short sequences.
    self.assertLess(share(512, _H100), share(512))
    self.assertEqual(share(4096, Target("npu", "x")), 0)


_FILE_TILES = BlockSizes(Tile(32, 64), Tile(16, 64), Tile(16, 64))


class SizesTest(parameterized.TestCase):
  @parameterized.product(
    backend=("triton", "mosaic_tpu"),
    dtype=(jnp.bfloat16, jnp.float16, jnp.float32),
    head_dim=(24, 64, 72, 128, 256),
  )
  def test_every_backend_has_tiles(self, backend, dtype, head_dim):
    tiles = block_sizes(backend, head_dim, dtype)
    for tile in (tiles.dq, tiles.dkv):
      self.assertEqual(tiles.rows % tile.rows, 0)
    few = block_sizes(backend, head_dim, dtype, per_head=100)
    self.assertLessEqual(few.rows, tiles.rows)
    self.assertLessEqual(few.rows, 128)

  def test_blocks_with_fewer_rows_cut_every_tile(self):
    tiles = BlockSizes(Tile(128, 64, 8), Tile(64, 32), Tile(64, 32, 8))
    expected = BlockSizes(Tile(32, 64, 4), Tile(32, 32), Tile(32, 32, 8))
    self.assertEqual(tiles.with_rows(32), expected)


class TileFileTest(parameterized.TestCase):
  def _file(self, **changes):
    """With the tiles of one GPU, but for some fields of the entry."""
    entry = {"backend": "triton", "device": "GPU X"}
    entry |= {"head_dim": 64, "dtype": "bfloat16"}
    entry |= dataclasses.asdict(_FILE_TILES) | changes
    return self.create_tempfile(content=json.dumps([entry])).full_path

  def test_file_of_tiles_is_used(self):
    with mock.patch.dict(os.environ, {kernels.FILE_VARIABLE: self._file()}):
      kernels.measured.cache_clear()
      self.addCleanup(kernels.measured.cache_clear)
      other = block_sizes("triton", 64, jnp.bfloat16)
      default = block_sizes("triton", 128, jnp.bfloat16)
      with devices.traced_for("gpu", "GPU X"):
        ours = block_sizes("triton", 64, jnp.bfloat16)
        self.assertEqual(ours, _FILE_TILES)
        self.assertNotEqual(ours, other)
        self.assertEqual(block_sizes("triton", 128, jnp.bfloat16), default)

  @parameterized.parameters(
    *((text, "is not a file of block sizes, for MOH_JAX_BLOCK_SIZES: ")
      for text in ('[{"device": "GPU X"}]', "[{", '["GPU X"]', "1")),
    ({"head_dim": 0}, r"head_dim=0 must be in \[1, 256\]"),
    ({"dtype": "float23"}, "float23"),
    ({"dq": {"rows": 48, "keys": 16}}, "dq.rows=48 must divide .*rows=32"),
    ({"dkv": {"rows": 64, "keys": 16}}, "dkv.rows=64 must divide .*rows=32"),
    ({"dkv": {"rows": 0, "keys": 16}}, "dkv: rows=0 must be .* at least 1"),
    ({"dq": {"rows": 16, "keys": 16, "warps": 0}}, "dq: warps=0 must be"),
    ({"forward": {"rows": 32, "keys": 1.5}}, "forward: keys=1.5 must be an"),
    ({"forward": {"rows": 32}}, "forward: .*'keys'"),
  )  # fmt: skip
  def test_other_files_and_entries_are_named(self, stored, text):
    if isinstance(stored, str):
      path = self.create_tempfile(content=stored).full_path
    else:
      path = self._file(**stored)
    with self.assertRaisesRegex(ValueError, f"{path} .*{text}"):
      kernels.read(path)
