"""The device and the mesh that a function is traced for."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import re
from typing import Any

import jax
from jax.sharding import ManualAxisType

_HOPPER = re.compile(r"\b(GH200|H100|H200|H20|H800)\b")
_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Target:
  """A kind of device that a program is compiled for.

  Attributes:
    platform: "cpu", "gpu" or "tpu".
    kind: as `jax.Device.device_kind`, for instance "NVIDIA H100 80GB HBM3".
    cores: of a GPU its multiprocessors; None if unknown.
    capability: of a GPU, as `jax.Device.compute_capability`: "9.0", or
      "gfx942" of AMD's; empty if unknown.
    cuda: CUDA's version that compiles its programs, 12080 for 12.8; None if
      unknown.
  """

  platform: str
  kind: str
  cores: int | None = None
  capability: str = ""
  cuda: int | None = None

  @property
  def compute(self) -> float:
    """Compute capability of an NVIDIA GPU; 0 for others, which read no PTX.

    A GPU that is not here is Hopper, 9.0, if its name says so; any other counts
    as 8.0.
    """
    if self.platform != "gpu" or self.capability.startswith("gfx"):
      return 0.0
    absent = 9.0 if _HOPPER.search(self.kind) else 8.0
    return float(self.capability or absent)

  @property
  def gpu_problem(self) -> str:
    """What programs for NVIDIA GPUs need and it lacks; empty if nothing."""
    if not self.compute:
      return f"an NVIDIA GPU, this is a {self.platform} ({self.kind})"
    old = f"compute capability 8.0 or later, which {self.kind} lacks"
    return old if self.compute < 8 else ""


def target() -> Target:
  """The device that the function being traced will run on.

  A program can be compiled for devices that are not here. It is traced under
  their mesh (`jax.set_mesh`), which names them; without a mesh it will run on
  the default device.
  """
  named = jax.sharding.get_abstract_mesh().abstract_device
  if named is None:
    device = jax.config.jax_default_device
    if not isinstance(device, jax.Device):
      device = jax.devices(device)[0]
    cores = getattr(device, "core_count", None)
  else:
    alike = (x for x in jax.devices() if x.device_kind == named.device_kind)
    device, cores = next(alike, named), named.num_cores
  capability = str(getattr(device, "compute_capability", ""))
  cuda = cuda_version() if device.platform == "gpu" else None
  return Target(device.platform, device.device_kind, cores, capability, cuda)


@functools.cache
def has_cudnn() -> bool:
  """Whether JAX's plug-in for CUDA, which loads cuDNN, is installed."""
  return any(importlib.util.find_spec(name) for name in _CUDA_PLUGINS)


@functools.cache
def cuda_version() -> int | None:
  """The version of CUDA in JAX's plug-in, 12080 for 12.8; None without one."""
  for name in _CUDA_PLUGINS:
    with contextlib.suppress(ImportError, RuntimeError):
      versions = importlib.import_module(f"{name}._versions")
      return versions.cuda_runtime_get_version()
  return None


def varying_axes(tree: Any) -> frozenset[str]:
  """Mesh axes along which `jax.shard_map` knows that arrays differ."""
  types = map(jax.typeof, jax.tree.leaves(tree))
  return frozenset().union(*(x.manual_axis_type.varying for x in types))


def vary_alike(tree: Any, like: Any = ()) -> Any:
  """Types arrays, or shapes, as different along any axis where one differs.

  Where `jax.shard_map` checks it, what a loop starts from must have the type of
  what it returns, and a kernel's results a type at all.
  """
  arrays = (x for x in jax.tree.leaves(tree) if not isinstance(x, _Shape))
  axes = varying_axes((like, *arrays))

  def cast(x: Any) -> Any:
    if isinstance(x, _Shape):
      return x.update(manual_axis_type=ManualAxisType(varying=axes))
    more = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, more, to="varying") if more else x

  return jax.tree.map(cast, tree)


def on_one_device() -> bool:
  """Whether no mesh splits arrays.

  Merging two axes by a reshape is then free; on a mesh that splits both it
  would move data between devices. Within `jax.shard_map` over all axes a
  function sees one device's part.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return all(
    size == 1 or kind == jax.sharding.AxisType.Manual
    for size, kind in zip(mesh.axis_sizes, mesh.axis_types)
  )
