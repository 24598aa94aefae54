"""Kernels for devices that are not here: what else a machine can check."""

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from unittest import mock

import jax
from jax.experimental import topologies

HERE = jax.devices()[0].platform
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


@contextlib.contextmanager
def as_if_on_a_gpu() -> Iterator[None]:
  """Lets Triton kernels be lowered without a GPU, warnings aside."""
  with contextlib.ExitStack() as stack:
    stack.enter_context(warnings.catch_warnings())
    # JAX 0.11 announces that its Triton backend will go one day.
    warnings.filterwarnings("ignore", message=".*Triton backend is deprecated")
    if HERE != "gpu" and hasattr(jax.sharding, "AbstractDevice"):
      device = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H100", num_cores=None, platform="gpu"
      )
      mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
      stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
    yield


@contextlib.contextmanager
def tpu(topology: str) -> Iterator[jax.sharding.Sharding]:
  """The sharding of one TPU that libtpu compiles for."""
  # libtpu aborts on flags that are for CPUs, and looks for a TPU's network.
  settings = {"XLA_FLAGS": "", "TPU_SKIP_MDS_QUERY": "1"}
  with mock.patch.dict(os.environ, settings):
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    yield jax.sharding.SingleDeviceSharding(devices[0])
