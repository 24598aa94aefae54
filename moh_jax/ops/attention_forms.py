"""Which form of attention is used for a call, and why.

Six forms give the same values up to rounding:

- "dense": all logits at once, or those of a sequence (`ops/dense.py`).
- "blocked": every head, some rows at a time (`ops/blocked.py`).
- "packed": like "blocked", but only the active heads.
- "kernel": like "packed", in one Pallas kernel (`ops/kernels/`); on a CPU in
  Pallas's interpreter, for tests.
- "cudnn": cuDNN's fused attention on NVIDIA GPUs (`ops/cudnn.py`); only the
  active heads where attention is bidirectional.
- "splash": every head, in JAX's kernel for TPUs (`ops/splash.py`).

`choose_form` picks one for the implementation that the user asks for; "auto"
packs where `crossovers` says that it pays. All logits are never in memory at
once beyond `MAX_LOGITS_BYTES`. `choose_cached_form` picks one for new tokens
that attend to a cache.
"""

import dataclasses
from typing import Any

from moh_jax.config.checks import IMPLEMENTATIONS
from moh_jax.ops import splash
from moh_jax.ops.crossovers import HALF, largest_share
from moh_jax.ops.kernels import hopper, triton_backend
from moh_jax.ops.kernels.sizes import MAX_HEAD_DIM, block_sizes
from moh_jax.ops.target import Target

# Largest size of the logits [B, H, N, M] float32 that a device holds at once.
# On a CPU it is what the caches hold: several times slower beyond.
MAX_LOGITS_BYTES = {"cpu": 12 << 20, "gpu": 1 << 30, "tpu": 1 << 30}

# CUDA whose ptxas, as JAX says, miscompiles causal attention of Pallas'
# Mosaic GPU: 12.8.0 to 12.9.0. 12.9.1 has the same number.
_MISCOMPILING_CUDA = range(12080, 12091)

# On a CPU, sequences shorter than this take blocks of 32 rows, or all logits of
# one at once.
_SHORT = 384
# From so many tokens on, a CPU gains from leaving out hidden keys of causal
# attention, also where all logits would fit.
_LONG_CAUSAL = 256

# Largest head dim that cuDNN's fused attention has gradients for everywhere.
_CUDNN_HEAD_DIM = 128
_KERNEL_DTYPES = (*HALF, "float32")


@dataclasses.dataclass(frozen=True)
class AttentionCase:
  """The properties of a call that decide about its form.

  Sizes are those of the part that one device computes.

  Attributes:
    target: the device that it runs on.
    batch: B.
    queries: N.
    keys: M.
    num_heads: H.
    head_dim: D.
    share: expected share of the heads that are active, 1 for all.
    causal: whether later keys are hidden.
    masked: whether cuDNN would read what is hidden as an array: segments, and
      where attention is causal a key mask, or fewer or more queries than keys.
    biased: whether a bias is added to the logits.
    dtype: name of the queries' dtype.
    one_device: whether the arrays are one device's own. Else the compiler
      splits them over a mesh, which it can do to plain XLA alone.
    has_cudnn: whether programs with cuDNN can be traced here.
  """

  target: Target
  batch: int
  queries: int
  keys: int
  num_heads: int
  head_dim: int
  share: float
  causal: bool = False
  masked: bool = False
  biased: bool = False
  dtype: str = "float32"
  one_device: bool = True
  has_cudnn: bool = True

  @property
  def logits_bytes(self) -> int:
    """Size of all logits, float32."""
    return 4 * self.batch * self.num_heads * self.queries * self.keys


@dataclasses.dataclass(frozen=True)
class Form:
  """A form of attention, with the sizes of its blocks.

  Attributes:
    name: one of the six in the module's docstring.
    packs: whether only the active heads are computed.
    rows: rows of a block; 0 for forms without blocks.
    blocks_per_step: blocks of a head computed in one step of the loop, at most.
    one_by_one: whether "dense" computes one sequence of the batch after
      another.
  """

  name: str
  packs: bool = False
  rows: int = 0
  blocks_per_step: int = 1
  one_by_one: bool = False


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
  if implementation == "auto":
    return _best_form(case)
  if implementation == "cudnn":
    if problem := _cudnn_problem(case):
      raise ValueError(f"implementation='cudnn' needs {problem}")
    return Form("cudnn", packs=case.share < 1 and not _hides(case))
  if implementation == "kernel":
    if case.biased:
      raise ValueError(
        "implementation='kernel' adds no bias to the logits; 'packed' does"
      )
    return _kernel_form(case, packs=case.share < 1)
  packs = implementation == "packed" and case.share < 1
  return _packed_form(case) if packs else _plain_form(case)


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
  pays = head_dim <= MAX_HEAD_DIM and has_kernels(device)
  wanted = implementation == "kernel" or (implementation == "auto" and pays)
  return "kernel" if wanted and new == 1 else "dense"


def kernel_options(
  device: Target, dtype: str = "", head_dim: int = 0
) -> dict[str, Any]:
  """The keyword arguments with which the functions of kernels run on a device.

  Args:
    device: the device.
    dtype: name of the dtype of queries, keys and values; without it the back
      end is one that serves all.
    head_dim: D.

  Returns:
    "backend", the back end of Pallas, and "interpret", True on a CPU.

  Raises:
    ValueError: no kernels exist for the device.
  """
  backend, problem = _backend(device, dtype, head_dim)
  if problem:
    raise ValueError(f"implementation='kernel' needs {problem}")
  return {"backend": backend, "interpret": device.platform == "cpu"}


def has_kernels(device: Target, dtype: str = "", head_dim: int = 0) -> bool:
  """Whether kernels are compiled for a device; a CPU interprets them, slowly.

  Args:
    device: the device.
    dtype: as in `kernel_options`.
    head_dim: D.
  """
  return device.platform != "cpu" and not _backend(device, dtype, head_dim)[1]


def _backend(device: Target, dtype: str, head_dim: int) -> tuple[str, str]:
  """The back end of Pallas, and what it would need that is not there."""
  if device.platform == "cpu":
    return "mosaic_tpu" if triton_backend.MISSING else "triton", ""
  if device.platform == "tpu":
    return "mosaic_tpu", ""
  if problem := _gpu_problem(device):
    return "", problem
  hopper_kernel = (
    device.is_hopper and dtype and hopper.supports(dtype, head_dim)
  )
  if hopper_kernel and device.cuda not in _MISCOMPILING_CUDA:
    return "mosaic_gpu", ""
  return "triton", triton_backend.problem()


def _gpu_problem(device: Target) -> str:
  """What programs for NVIDIA GPUs need that a device has not; else empty."""
  if not device.compute:
    return f"an NVIDIA GPU, this is a {device.platform} ({device.kind})"
  old = f"compute capability 8.0 or later, which {device.kind} has not"
  return old if device.compute < 8 else ""


def _check_known(implementation: str) -> None:
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation={implementation!r} must be one of {IMPLEMENTATIONS}"
    )


def _best_form(case: AttentionCase) -> Form:
  if not case.one_device:
    return _plain_form(case)
  dense, packed = _best_dense_form(case), _best_packed_form(case)
  return packed if _packing_pays(case, packed, dense) else dense


def _best_dense_form(case: AttentionCase) -> Form:
  # cuDNN would read masks as one array [B, N, M].
  if not case.masked and not _cudnn_problem(case):
    return Form("cudnn")
  if case.target.platform == "tpu" and splash.supports(
    *(case.queries, case.keys, case.head_dim, case.dtype),
    causal=case.causal,
    biased=case.biased,
  ):
    return Form("splash")
  if _has_kernel(case):
    return _kernel_form(case, packs=False)
  if case.target.platform == "cpu":
    return _best_cpu_form(case)
  return _plain_form(case)


def _best_cpu_form(case: AttentionCase) -> Form:
  """Every head; unlike "dense", also blocks where all logits would fit."""
  if case.causal and (case.queries >= _LONG_CAUSAL or not _is_small(case)):
    return dataclasses.replace(_packed_form(case), name="blocked", packs=False)
  # Blocks are computed in float32, which all logits need not be.
  long = case.queries >= _SHORT and case.dtype == "float32"
  return _blocked_form(case) if long else _plain_form(case)


def _best_packed_form(case: AttentionCase) -> Form:
  if not _hides(case) and not _cudnn_problem(case):
    return Form("cudnn", packs=True)
  if _has_kernel(case):
    return _kernel_form(case, packs=True)
  return _packed_form(case)


def _packing_pays(case: AttentionCase, form: Form, dense: Form) -> bool:
  platform = case.target.platform
  if case.share == 1:
    return False
  if platform == "cpu" and not case.causal:
    if _best_cpu_form(case).name == "dense":
      return False  # all logits of a sequence at once are fastest
  backend = {"packed": "xla", "cudnn": "cudnn"}.get(form.name)
  limit = largest_share(
    case.target,
    backend or _kernel_backend(case),
    case.dtype,
    case.head_dim,
    case.queries,
    causal=case.causal,
    same_kernel=form.name == dense.name,
  )
  return case.share <= limit


def _has_kernel(case: AttentionCase) -> bool:
  """Whether a kernel computes the call, and fast."""
  fits = not case.biased and case.head_dim <= MAX_HEAD_DIM
  fits = fits and case.dtype in _KERNEL_DTYPES
  return fits and has_kernels(case.target, case.dtype, case.head_dim)


def _is_small(case: AttentionCase) -> bool:
  return case.logits_bytes <= MAX_LOGITS_BYTES.get(case.target.platform, 0)


def _kernel_backend(case: AttentionCase) -> str:
  return kernel_options(case.target, case.dtype, case.head_dim)["backend"]


def _hides(case: AttentionCase) -> bool:
  """Whether the rows of a head cannot be a sequence of their own in cuDNN."""
  return case.causal or case.masked or case.biased


def _kernel_form(case: AttentionCase, *, packs: bool) -> Form:
  backend = _kernel_backend(case)
  per_head = int(case.queries * case.share) if packs else case.queries
  sizes = block_sizes(backend, case.head_dim, case.dtype, per_head)
  return Form("kernel", packs, sizes.rows)


def _cudnn_problem(case: AttentionCase) -> str:
  """What cuDNN would need that a call has not; empty if nothing."""
  if problem := _gpu_problem(case.target):
    return problem
  if not case.has_cudnn:
    return "JAX's plug-in for CUDA, which is not installed"
  if case.dtype not in HALF:
    return f"model.dtype bfloat16 or float16, not {case.dtype}"
  if case.head_dim % 8:
    return f"a head_dim that is a multiple of 8, not {case.head_dim}"
  if case.head_dim > _CUDNN_HEAD_DIM:
    return f"a head_dim of at most {_CUDNN_HEAD_DIM}, not {case.head_dim}"
  if case.biased and (case.queries % 2 or case.keys % 2):
    # Its gradients exist for even numbers alone.
    sizes = f"{case.queries} and {case.keys}"
    return f"even numbers of queries and keys beside a bias, not {sizes}"
  return ""


def _plain_form(case: AttentionCase) -> Form:
  """Every head in plain XLA: all logits at once if they are few."""
  if _is_small(case):
    return Form("dense")
  one = dataclasses.replace(case, batch=1)
  on_cpu = case.target.platform == "cpu" and case.one_device
  if on_cpu and case.queries < _SHORT and _is_small(one):
    return Form("dense", one_by_one=True)
  return _blocked_form(case)


def _blocked_form(case: AttentionCase) -> Form:
  # A causal block computes logits of all keys up to its last row: the larger
  # the block, the more of them are masked.
  long = case.queries >= 2048 and not case.causal
  return Form("blocked", False, min(case.queries, 1024 if long else 512))


def _packed_form(case: AttentionCase) -> Form:
  short = case.queries < _SHORT
  if not case.causal:
    return Form("packed", True, 32 if short else 64, 8)
  rows = 128 if case.queries >= 2048 else 64
  return Form("packed", True, 32 if short else rows, 4)
