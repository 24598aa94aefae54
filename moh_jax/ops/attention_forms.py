"""Which form of attention is used for a call, and why.

Five forms give the same values up to rounding:

- "dense": all logits at once (`ops/dense.py`).
- "blocked": every head, some rows at a time (`ops/blocked.py`).
- "packed": like "blocked", but only the active heads.
- "kernel": like "packed", in one Pallas kernel (`ops/kernels/`); on a CPU in
  Pallas's interpreter, for tests.
- "cudnn": cuDNN's fused attention on NVIDIA GPUs (`ops/cudnn.py`).

`choose_form` picks one for the implementation that the user asks for. Its rules
for CPUs were measured, see docs/architecture.md; for other devices "auto" is
"dense". `choose_cached_form` picks one for new tokens that attend to a cache.
"""

import dataclasses
from typing import Any

from moh_jax.config.checks import IMPLEMENTATIONS
from moh_jax.ops.kernels.sizes import MAX_HEAD_DIM, block_sizes
from moh_jax.ops.target import Target

# Logits of a whole batch that fit the caches of a CPU, in elements. Computing
# all at once is fastest up to here unless causal, several times slower beyond.
_CACHED_LOGITS = 3 << 20

# The back end of Pallas on each platform; a CPU interprets GPU kernels, slowly.
_BACKENDS = {"cpu": "triton", "gpu": "triton", "tpu": "mosaic_tpu"}


@dataclasses.dataclass(frozen=True)
class AttentionCase:
  """The properties of a call that decide about its form.

  Attributes:
    target: the device that it runs on.
    batch: B.
    queries: N.
    keys: M.
    num_heads: H.
    head_dim: D.
    active: active heads of a token at most; H if all are active.
    causal: whether later keys are hidden.
    biased: whether a bias is added to the logits.
    dtype: name of the queries' dtype.
    one_device: whether no mesh splits the arrays.
  """

  target: Target
  batch: int
  queries: int
  keys: int
  num_heads: int
  head_dim: int
  active: int
  causal: bool = False
  biased: bool = False
  dtype: str = "float32"
  one_device: bool = True


@dataclasses.dataclass(frozen=True)
class Form:
  """A form of attention, with the sizes of its blocks.

  Attributes:
    name: one of the five in the module's docstring.
    rows: rows of a block; 0 for forms without blocks.
    blocks_per_step: blocks of a head computed in one step of the loop, at most.
  """

  name: str
  rows: int = 0
  blocks_per_step: int = 1


def choose_form(implementation: str, case: AttentionCase) -> Form:
  """Chooses the form of a call.

  Args:
    implementation: one of `IMPLEMENTATIONS`.
    case: properties of the call.

  Returns:
    The form, with the sizes of its blocks.

  Raises:
    ValueError: the implementation is unknown or does not support the call.
  """
  _check_known(implementation)
  if implementation == "cudnn":
    return _cudnn_form(case)
  if implementation == "kernel":
    return _kernel_form(case)
  if case.active == case.num_heads:  # no head can be left out
    packs = False
  elif implementation == "auto":
    packs = _packing_pays(case)
  else:
    packs = implementation == "packed"
  return _packed_form(case) if packs else _dense_form(case)


def choose_cached_form(
  implementation: str, device: Target, *, new: int, head_dim: int
) -> str:
  """Chooses the form in which new tokens attend to a cache.

  "auto" is "kernel" on GPUs and TPUs, also where every head is active: a cache
  has slots for tokens to come, which the dense form would read. On other
  devices it is "dense": a CPU gains nothing from reading less, since XLA copies
  the slice of a cache that a loop reads and runs the loop on one core.

  Args:
    implementation: one of `IMPLEMENTATIONS`.
    device: the device that it runs on.
    new: new tokens per text; the kernel takes one.
    head_dim: D; "auto" is "dense" for heads that are too wide for the kernel.

  Returns:
    "kernel", which reads the active heads and the visible slots, or "dense",
    which reads all.

  Raises:
    ValueError: the implementation is unknown.
  """
  _check_known(implementation)
  pays = device.platform in ("gpu", "tpu") and head_dim <= MAX_HEAD_DIM
  wanted = implementation == "kernel" or (implementation == "auto" and pays)
  return "kernel" if wanted and new == 1 else "dense"


def _check_known(implementation: str) -> None:
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation={implementation!r} must be one of {IMPLEMENTATIONS}"
    )


def kernel_options(device: Target) -> dict[str, Any]:
  """The keyword arguments with which the functions of kernels run on a device.

  Args:
    device: the device.

  Returns:
    "backend", the back end of Pallas, and "interpret", True on a CPU.

  Raises:
    ValueError: no kernels exist for the device.
  """
  platform = device.platform
  if platform not in _BACKENDS:
    raise ValueError(
      f"implementation='kernel' needs one of {', '.join(_BACKENDS)}, this is a "
      f"{platform}"
    )
  return {"backend": _BACKENDS[platform], "interpret": platform == "cpu"}


def _kernel_form(case: AttentionCase) -> Form:
  if case.biased:
    raise ValueError(
      "implementation='kernel' adds no bias to the logits; 'packed' does"
    )
  backend = kernel_options(case.target)["backend"]
  per_head = case.queries * case.active // case.num_heads
  sizes = block_sizes(backend, case.head_dim, case.dtype, per_head)
  return Form("kernel", sizes.rows)


def _cudnn_form(case: AttentionCase) -> Form:
  problem = ""
  if case.target.platform != "gpu":
    problem = f"an NVIDIA GPU, this is a {case.target.platform}"
  elif case.dtype not in ("bfloat16", "float16"):
    problem = f"model.dtype bfloat16 or float16, not {case.dtype}"
  elif case.head_dim % 8:
    problem = f"a head_dim that is a multiple of 8, not {case.head_dim}"
  if problem:
    raise ValueError(f"implementation='cudnn' needs {problem}")
  return Form("cudnn")


def _logits_are_cached(case: AttentionCase) -> bool:
  size = case.batch * case.num_heads * case.queries * case.keys
  return size <= _CACHED_LOGITS


def _dense_form(case: AttentionCase) -> Form:
  if (
    case.target.platform != "cpu"
    or not case.one_device
    or _logits_are_cached(case)
  ):
    return Form("dense")
  # A causal block computes logits of all keys up to its last row: the larger
  # the block, the more of them are masked.
  long = case.queries >= 2048 and not case.causal
  return Form("blocked", min(case.queries, 1024 if long else 512))


def _packed_form(case: AttentionCase) -> Form:
  if not case.causal:
    return Form("packed", 64 if case.queries >= 384 else 32, 8)
  rows = 128 if case.queries >= 2048 else 64
  return Form("packed", rows if case.queries >= 384 else 32, 4)


def _packing_pays(case: AttentionCase) -> bool:
  if case.target.platform != "cpu" or not case.one_device or case.queries < 256:
    return False
  if _logits_are_cached(case) and not case.causal:
    return False
  return case.active <= 0.8 * case.num_heads
