"""Kernels for devices that are not here: what else a machine can check."""

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from jax.experimental.pallas import tpu as pltpu

from moh_jax.ops.kernels import tpu_plan

_WHOLE = jax.sharding.AbstractMesh((), ())


def traced_for(
  platform: str, kind: str = "", cores: int | None = None, mesh: Any = _WHOLE
) -> contextlib.AbstractContextManager:
  """Context in which functions are traced for devices that are not here."""
  device = jax.sharding.AbstractDevice(
    device_kind=kind or platform, num_cores=cores, platform=platform
  )
  return jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device))


def lowered_kernels(platform: str, function: Callable, *shapes: Any) -> int:
  """Counts the kernels in what a function lowers to for a GPU or TPU."""
  name, kernel = {
    "gpu": ("cuda", "__gpu$xla.gpu.triton"),
    "tpu": ("tpu", "@tpu_custom_call"),
  }[platform]
  with traced_for("gpu", "NVIDIA H100"):
    traced = jax.jit(function).trace(*shapes)
    text = traced.lower(lowering_platforms=(name,)).as_text()
  return text.count(kernel)


@contextlib.contextmanager
def simulated_tpu(cores: int) -> Iterator[None]:
  """Context in which interpreted TPU kernels run in Pallas's simulator.

  Memory that nothing was written to holds NaN, and a race of the cores is an
  error.
  """
  params = pltpu.InterpretParams(
    num_cores_or_threads=cores, detect_races=True, uninitialized_memory="nan"
  )
  told = io.StringIO()
  try:
    with (
      pltpu.force_tpu_interpret_mode(params),
      mock.patch.object(tpu_plan, "_LEAST", (16 << 20, cores)),
      contextlib.redirect_stdout(told),  # JAX 0.10 raises nothing
    ):
      yield
  finally:
    pltpu.reset_tpu_interpret_mode_state()
  if told.getvalue():
    raise AssertionError(told.getvalue())
