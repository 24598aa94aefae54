"""The device and the mesh that a function is traced for."""

import dataclasses
import functools
import importlib.util

import jax


@dataclasses.dataclass(frozen=True)
class Target:
  """A kind of device that a program is compiled for.

  Attributes:
    platform: "cpu", "gpu" or "tpu".
    kind: as `jax.Device.device_kind`, for instance "NVIDIA H100 80GB HBM3".
    cores: of a GPU its multiprocessors; None if unknown.
  """

  platform: str
  kind: str
  cores: int | None = None

  @property
  def is_hopper(self) -> bool:
    """Whether it is a GPU of compute capability 9.0."""
    return self.platform == "gpu" and any(x in self.kind for x in _HOPPER)


_HOPPER = ("H100", "H200", "H800", "H20", "GH200")


def target() -> Target:
  """The device that the function being traced will run on.

  A program can be compiled for devices that are not here. It is traced under
  their mesh (`jax.set_mesh`), which names them; without a mesh it will run on
  the default device.
  """
  mesh = jax.sharding.get_abstract_mesh()
  device = mesh.abstract_device
  if device is not None:
    return Target(device.platform, device.device_kind, device.num_cores)
  device = _default_device()
  cores = getattr(device, "core_count", None)
  return Target(device.platform, device.device_kind, cores)


@functools.cache
def has_cudnn() -> bool:
  """Whether JAX's plug-in for CUDA, which loads cuDNN, is installed."""
  plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
  return any(importlib.util.find_spec(name) for name in plugins)


def _default_device() -> jax.Device:
  device = jax.config.jax_default_device
  return device if isinstance(device, jax.Device) else jax.devices()[0]


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
