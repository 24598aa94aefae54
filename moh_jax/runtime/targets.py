"""Devices that programs are compiled for where there are none.

A program for GPUs or TPUs can be compiled on any machine that has the compiler:
for GPUs the packages `jax-cuda13-plugin`, `jax-cuda13-pjrt`,
`nvidia-cudnn-cu13` and `nvidia-cublas`, for TPUs `libtpu`. The result tells the
kernels, the memory and the communication, but cannot run.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
from collections.abc import Iterator

import jax
from jax.experimental import topologies

from moh_jax.runtime import topology
from moh_jax.runtime.topology import Topology

# What XLA must know of a GPU: a text proto each, the published figures of it.
_GPU_DIR = pathlib.Path(__file__).parent / "gpu_targets"
# libtpu would ask a metadata server for a TPU's network.
_TPU_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def missing_packages(name: str) -> tuple[str, ...]:
  """Packages that `absent_devices` needs for a target and that are not here.

  Args:
    name: see `absent_devices`.
  """
  modules = {"libtpu": "libtpu"}
  if topology.parse(name).chip.platform == "gpu":
    modules = {
      "jax-cuda13-plugin": "jax_cuda13_plugin",
      "jax-cuda13-pjrt": "jax_plugins.xla_cuda13",
    }
  return tuple(
    package for package, module in modules.items() if not _is_here(module)
  )


def _is_here(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ModuleNotFoundError:  # nor the package that it would be in
    return False


def absent_devices(name: str, slices: int = 1) -> list[jax.Device]:
  """Devices to compile for, which need not exist.

  Args:
    name: see `topology.parse`.
    slices: number of equal slices.

  Returns:
    The devices, for a mesh. Under `jax.set_mesh` of it a jitted function is
    lowered from `ShapeDtypeStruct`s with shardings of the mesh, and compiled.

  Raises:
    ValueError: the target is unknown, or a package is missing.
  """
  wanted = dataclasses.replace(topology.parse(name, "target"), slices=slices)
  if missing := missing_packages(name):
    raise ValueError(
      f"target={name!r} needs the package {', '.join(missing)} in the version "
      "of jax"
    )
  try:
    return _gpus(wanted) if wanted.chip.platform == "gpu" else _tpus(wanted)
  except (ValueError, jax.errors.JaxRuntimeError) as error:
    reason = str(error).splitlines()[0]
    raise ValueError(f"target={name!r} cannot be had: {reason}") from None


def abstract_device(wanted: Topology) -> jax.sharding.AbstractDevice:
  """What a program that is traced for a topology knows of its devices."""
  chip = wanted.chip
  return jax.sharding.AbstractDevice(
    device_kind=chip.kind, num_cores=chip.cores, platform=chip.platform
  )


def _gpus(wanted: Topology) -> list[jax.Device]:
  kind = wanted.name.split(":")[0]
  hosts = wanted.hosts // wanted.slices
  shape = (wanted.slices, hosts, wanted.devices // wanted.hosts)
  text = (_GPU_DIR / f"{kind}.txtpb").read_text()
  return list(
    topologies.get_topology_desc(
      platform="cuda",
      topology_name="",
      topology="x".join(map(str, shape)),
      target_config=text,
    ).devices
  )


def _tpus(wanted: Topology) -> list[jax.Device]:
  # libtpu aborts on flags of XLA that are for CPUs.
  with environment({"XLA_FLAGS": "", **_TPU_ENVIRONMENT}):
    return list(
      topologies.get_topology_desc(
        platform="tpu", topology_name=wanted.name, num_slices=wanted.slices
      ).devices
    )


@contextlib.contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
  """Context with other environment variables."""
  before = dict(os.environ)
  os.environ.update(changes)
  try:
    yield
  finally:
    os.environ.clear()
    os.environ.update(before)
