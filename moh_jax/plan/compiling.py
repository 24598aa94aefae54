"""Compiles a run's train step for devices that are not here.

In a process of its own: compilers end the process on some errors, and read
variables of the environment when JAX starts.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import multiprocessing
import pickle
import re
import time

from moh_jax.config import Config
from moh_jax.config.registry import RouterKind, add_router, get_router
from moh_jax.plan.collectives import Collective, read_collectives
from moh_jax.runtime.devices import (
  USABLE,
  Topology,
  absent_devices,
)

_COMPILERS = {"tpu": "libtpu", "gpu": "jax-cuda13-plugin"}
_FULL = "RESOURCE_EXHAUSTED"
_SIZE = r"([\d.]+)([KMGT]?)"
# How libtpu says that a program does not fit.
_REFUSALS = (
  re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
  re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of a train step, for each device.

  Attributes:
    compiler: its name and version.
    seconds: that it took.
    fits: whether the step fits.
    limit: bytes that it may have.
    total: bytes that it needs.
    arguments: bytes of the state and the batch; None where the compiler gave
      up, as for the next.
    outputs: bytes of the new state that are not in place of the old one.
    temporaries: bytes of all else.
    collectives: of a step.
  """

  compiler: str
  seconds: float
  fits: bool
  limit: float
  total: float
  arguments: int | None = None
  outputs: int | None = None
  temporaries: int | None = None
  collectives: tuple[Collective, ...] = ()


def compile_step(config: Config, topology: Topology) -> Compiled:
  """Compiles the train step of a run for a topology.

  Args:
    config: of the run.
    topology: the devices.

  Raises:
    ValueError: the compiler is missing, or fails; one line.
  """
  flags = (
    ["--xla_gpu_autotune_level=0"] if topology.chip.platform == "gpu" else []
  )
  environment = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": " ".join(flags),
    "TF_CPP_MIN_LOG_LEVEL": "3",
  }
  spawn = multiprocessing.get_context("spawn")
  with (
    environment(environment),
    concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool,
  ):
    try:
      router = get_router(config.model.router.kind)
      return pool.submit(_compile, config, router, topology).result()
    except pickle.PicklingError as error:
      raise ValueError(
        f"the family or the router must be in a module that can be imported: "
        f"{error}"
      ) from None
    except concurrent.futures.process.BrokenProcessPool:
      raise ValueError(
        f"the compiler for {topology.name} ended its process; it may lack "
        "memory"
      ) from None


def _compile(config: Config, router: RouterKind, wanted: Topology) -> Compiled:
  """`compile_step` in a process of its own, which knows no routers but ours."""
  import jax

  from moh_jax.runtime import sharding
  from moh_jax.training.program import make_program
  from moh_jax.training.task import task_builder

  add_router(router)
  platform = wanted.chip.platform
  limit = USABLE * wanted.chip.memory
  devices = absent_devices(wanted.name, wanted.slices)
  package = _COMPILERS[platform]
  compiler = f"{package} {importlib.metadata.version(package)}"
  try:
    mesh = sharding.make_mesh(config.mesh, devices)
    objective = task_builder(config).make_objective(config)
    program = make_program(config, objective, mesh)
    start = time.perf_counter()
    with sharding.use_mesh(mesh):
      compiled = program.step.lower(program.state, program.batch).compile()
  except jax.errors.JaxRuntimeError as error:
    seconds = time.perf_counter() - start
    text = " ".join(str(error).split())
    sizes = refused_sizes(text)
    if sizes is None:
      raise ValueError(f"{compiler}: {text[:300]}") from None
    needed, allowed = sizes
    return Compiled(compiler, seconds, False, allowed, needed)
  except (NotImplementedError, RuntimeError, TypeError) as error:
    text = " ".join(str(error).split())
    raise ValueError(f"{compiler}: {text[:300]}") from None
  seconds = time.perf_counter() - start
  found = compiled.memory_analysis()
  outputs = found.output_size_in_bytes - found.alias_size_in_bytes
  # The program of several TPU slices is that of one of them.
  slices = wanted.slices if platform == "tpu" else 1
  total = found.argument_size_in_bytes + outputs + found.temp_size_in_bytes
  return Compiled(
    compiler=compiler,
    seconds=seconds,
    fits=total <= limit,
    limit=limit,
    total=total,
    arguments=found.argument_size_in_bytes,
    outputs=outputs,
    temporaries=found.temp_size_in_bytes,
    collectives=read_collectives(compiled.as_text(), dict(mesh.shape), slices),
  )


def refused_sizes(error: str) -> tuple[float, float] | None:
  """Bytes that a refused program needs and may have, as its compiler says.

  Args:
    error: of the compiler.

  Returns:
    None where the error is another.
  """
  found = [pattern.search(error) for pattern in _REFUSALS]
  match = next((one for one in found if one), None)
  if _FULL not in error or match is None:
    return None
  needed, allowed = (float(match[i]) * _UNITS[match[i + 1]] for i in (1, 3))
  return needed, allowed
