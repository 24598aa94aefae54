"""Kernels for devices that are not here: what else a machine can check."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from unittest import mock

import jax
from jax.experimental import topologies

HERE = jax.devices()[0].platform
# The back end of Pallas that runs kernels here; none on a CPU.
BACKEND = {"gpu": "triton", "tpu": "mosaic_tpu"}.get(HERE)
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


def traced_for(
  platform: str, kind: str = "", cores: int | None = None
) -> contextlib.AbstractContextManager:
  """Context in which functions are traced for a device that is not here."""
  device = jax.sharding.AbstractDevice(
    device_kind=kind or platform, num_cores=cores, platform=platform
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  return jax.sharding.use_abstract_mesh(mesh)


def as_if_on_a_gpu() -> contextlib.AbstractContextManager:
  """Context in which Triton kernels can be lowered, with or without a GPU."""
  if HERE == "gpu":
    return contextlib.nullcontext()
  return traced_for("gpu", "NVIDIA H100")


@contextlib.contextmanager
def tpu(topology: str) -> Iterator[jax.sharding.Sharding]:
  """The sharding of one TPU that libtpu compiles for."""
  # libtpu aborts on flags that are for CPUs, and looks for a TPU's network.
  settings = {"XLA_FLAGS": "", "TPU_SKIP_MDS_QUERY": "1"}
  with mock.patch.dict(os.environ, settings):
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    yield jax.sharding.SingleDeviceSharding(devices[0])
