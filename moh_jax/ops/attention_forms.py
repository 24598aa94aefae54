"""Which form of attention a call gets, and why.

Five forms give the same values to rounding:

- "dense": all logits at once (`ops/dense.py`).
- "blocked": every head, some rows at a time (`ops/blocked.py`).
- "packed": like "blocked", but only the heads that tokens chose.
- "kernel": like "packed", as one kernel (`ops/kernels/`); a CPU interprets it,
  for tests.
- "cudnn": cuDNN's fused attention on NVIDIA GPUs (`ops/cudnn.py`).

`choose_form` maps what users ask for to one of them. Its rules for CPUs were
measured, see docs/architecture.md; other devices have not been yet.
`choose_cached_form` does it where new tokens attend to a cache.
"""

import dataclasses

from moh_jax.config.checks import IMPLEMENTATIONS
from moh_jax.ops.kernels.sizes import block_sizes, device_kind

# On a CPU, logits of a whole batch that its caches hold, in elements: all at
# once is fastest up to here unless causal, several times slower beyond.
_CACHED_LOGITS = 3 << 20

# Whose kernels a platform runs; a CPU interprets those of GPUs, slowly.
_KERNELS = {"cpu": "gpu", "gpu": "gpu", "tpu": "tpu"}


@dataclasses.dataclass(frozen=True)
class AttentionCase:
  """What the choice depends on.

  Attributes:
    platform: `jax.default_backend()`, "cpu", "gpu" or "tpu".
    batch: B.
    queries: N.
    keys: M.
    num_heads: H.
    head_dim: D.
    active: heads of a token at most; H where all are at work.
    causal: whether later keys are hidden.
    biased: whether a bias is added to the logits.
    dtype: of the queries.
    one_device: whether no mesh splits the arrays.
  """

  platform: str
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

  @property
  def share(self) -> float:
    """Of the (token, head) pairs that are at work."""
    return self.active / self.num_heads


@dataclasses.dataclass(frozen=True)
class Form:
  """A form of attention.

  Attributes:
    name: see the module's docstring.
    rows: of a block, where the form has blocks.
    at_once: blocks of a head that are worked on together, at most.
  """

  name: str
  rows: int = 0
  at_once: int = 1


def choose_form(implementation: str, case: AttentionCase) -> Form:
  """Maps an implementation to a form.

  Args:
    implementation: one of `IMPLEMENTATIONS`.
    case: of the call.

  Returns:
    The form, with the sizes of its blocks.

  Raises:
    ValueError: the implementation is unknown, or cannot do this.
  """
  _check_known(implementation)
  if implementation == "cudnn":
    return _cudnn_form(case)
  if implementation == "kernel":
    return _kernel_form(case)
  if case.active == case.num_heads:  # nothing to leave out
    packs = False
  elif implementation == "auto":
    packs = _packing_pays(case)
  else:
    packs = implementation == "packed"
  return _packed_form(case) if packs else _dense_form(case)


def choose_cached_form(
  implementation: str, *, new: int, quantized: bool
) -> str:
  """Maps an implementation to how new tokens attend to a cache.

  "auto" reads every head until a card has measured the kernel, and on a CPU:
  XLA copies the part of a cache that a loop picks before its product, and runs
  the loop on one core.

  Args:
    implementation: one of `IMPLEMENTATIONS`.
    new: tokens of a text.
    quantized: whether the cache is int8, which the kernel does not read.

  Returns:
    "kernel", which reads the heads at work, or "dense".

  Raises:
    ValueError: the implementation is unknown.
  """
  _check_known(implementation)
  able = new == 1 and not quantized
  return "kernel" if implementation == "kernel" and able else "dense"


def _check_known(implementation: str) -> None:
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation={implementation!r} must be one of {IMPLEMENTATIONS}"
    )


def kernels_of(backend: str) -> tuple[str, bool]:
  """Whose kernels a backend runs, and whether it interprets them.

  Args:
    backend: `jax.default_backend()`.

  Raises:
    ValueError: there are none for it.
  """
  if backend not in _KERNELS:
    raise ValueError(
      f"implementation='kernel' needs one of {', '.join(_KERNELS)}, this is a "
      f"{backend}"
    )
  return _KERNELS[backend], backend == "cpu"


def _kernel_form(case: AttentionCase) -> Form:
  if case.biased:
    raise ValueError(
      "implementation='kernel' adds no bias to the logits; 'packed' does"
    )
  kind = device_kind(kernels_of(case.platform)[0])
  per_head = case.queries * case.active // case.num_heads
  sizes = block_sizes(kind, case.head_dim, case.dtype, per_head)
  return Form("kernel", sizes.rows)


def _cudnn_form(case: AttentionCase) -> Form:
  problem = ""
  if case.platform != "gpu":
    problem = f"an NVIDIA GPU, this is a {case.platform}"
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
  if case.platform != "cpu" or not case.one_device or _logits_are_cached(case):
    return Form("dense")
  # A causal block sees the keys up to its last row: large ones see too many.
  long = case.queries >= 2048 and not case.causal
  return Form("blocked", min(case.queries, 1024 if long else 512))


def _packed_form(case: AttentionCase) -> Form:
  if not case.causal:
    return Form("packed", 64 if case.queries >= 384 else 32, 8)
  rows = 128 if case.queries >= 2048 else 64
  return Form("packed", rows if case.queries >= 384 else 32, 4)


def _packing_pays(case: AttentionCase) -> bool:
  if case.platform != "cpu" or not case.one_device or case.queries < 256:
    return False
  if _logits_are_cached(case) and not case.causal:
    return False
  return case.share <= 0.8
