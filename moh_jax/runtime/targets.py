"""Devices that programs are compiled for where there are none.

A program for GPUs or TPUs can be compiled on any machine that has the compiler:
for GPUs the packages `jax-cuda13-plugin`, `jax-cuda13-pjrt`,
`nvidia-cudnn-cu13` and `nvidia-cublas`, for TPUs `libtpu`. The result tells the
kernels, the memory and the communication, but cannot run.
"""

import contextlib
import importlib.util
import os
import pathlib
from collections.abc import Iterator

import jax
from jax.experimental import topologies

# What XLA must know of a GPU: a text proto each, the published figures of it.
_GPU_DIR = pathlib.Path(__file__).parent / "gpu_targets"
GPUS = tuple(sorted(path.stem for path in _GPU_DIR.glob("*.txtpb")))
_TPUS = ("v5e", "v5p", "v6e", "tpu7x")
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
  if name.split(":")[0] in GPUS:
    modules = {"jax-cuda13-plugin": "jax_cuda13_plugin"}
  return tuple(
    package
    for package, module in modules.items()
    if importlib.util.find_spec(module) is None
  )


def absent_devices(name: str) -> list[jax.Device]:
  """Devices to compile for, which need not exist.

  Args:
    name: a GPU of `GPUS` and how many, "h100" or "h100:4"; or a TPU and its
      topology, "v5e:2x2", "v5p:2x2x1", "v6e:4x4", "tpu7x:2x2x1".

  Returns:
    The devices, for a mesh. Under `jax.set_mesh` of it a jitted function is
    lowered from `ShapeDtypeStruct`s with shardings of the mesh, and compiled.

  Raises:
    ValueError: the target is unknown, or a package is missing.
  """
  kind, _, shape = name.partition(":")
  if kind not in (*GPUS, *_TPUS):
    raise ValueError(
      f"target={name!r} must be one of {', '.join(GPUS)}, with :COUNT, or of "
      f"{', '.join(_TPUS)}, with a topology such as :2x2"
    )
  if missing := missing_packages(name):
    raise ValueError(
      f"target={name!r} needs the package {', '.join(missing)} in the version "
      "of jax"
    )
  try:
    return _gpus(kind, shape) if kind in GPUS else _tpus(kind, shape)
  except (ValueError, jax.errors.JaxRuntimeError) as error:
    reason = str(error).splitlines()[0]
    raise ValueError(f"target={name!r} cannot be had: {reason}") from None


def _gpus(kind: str, count: str) -> list[jax.Device]:
  number = int(count or 1)
  text = (_GPU_DIR / f"{kind}.txtpb").read_text()
  return list(
    topologies.get_topology_desc(
      platform="cuda",
      topology_name="",
      topology=f"1x1x{number}",
      target_config=text,
    ).devices
  )


def _tpus(kind: str, shape: str) -> list[jax.Device]:
  # libtpu aborts on flags of XLA that are for CPUs.
  with _environment({"XLA_FLAGS": "", **_TPU_ENVIRONMENT}):
    return list(
      topologies.get_topology_desc(
        platform="tpu", topology_name=f"{kind}:{shape}"
      ).devices
    )


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
  """Context with other environment variables."""
  before = dict(os.environ)
  os.environ.update(changes)
  try:
    yield
  finally:
    os.environ.clear()
    os.environ.update(before)
