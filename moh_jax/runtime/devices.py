"""Kinds of GPUs and TPUs, sets of them by name, and devices to compile for.

A program for GPUs or TPUs can be compiled on any machine that has the compiler:
for GPUs the packages `jax-cuda13-plugin`, `jax-cuda13-pjrt`,
`nvidia-cudnn-cu13` and `nvidia-cublas`, for TPUs `libtpu`. The result tells the
kernels, the memory and the communication, but cannot run.

Importable without JAX: a name is checked before anything long begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import jax

# Share of a device's memory that programs can have: allocators leave gaps.
USABLE = 0.95


@dataclasses.dataclass(frozen=True)
class Chip:
  """A kind of device, one of those that JAX counts.

  Attributes:
    kind: as `jax.Device.device_kind`.
    memory: bytes.
    per_host: devices of a host.
    cores: multiprocessors of a GPU, cores of a TPU.
    dimensions: of a TPU's torus; 0 for a GPU.
    per_chip: devices of a chip.
    counts_cores: whether the number in names such as v5p-64 is that of cores,
      two a chip; else it is that of chips.
  """

  kind: str
  memory: float
  per_host: int
  cores: int
  dimensions: int = 0
  per_chip: int = 1
  counts_cores: bool = False

  @property
  def platform(self) -> str:
    """Platform as JAX names it."""
    return "tpu" if self.dimensions else "gpu"


_GIB = 2**30
# Of TPUs the pages of docs.cloud.google.com/tpu/docs, where a chip of TPU7x is
# two devices; of GPUs NVIDIA's data sheets. TPUs of a slice of several hosts
# are on hosts of four chips.
CHIPS = {
  "v5e": Chip("TPU v5 lite", 16 * _GIB, 4, 1, 2),
  "v5p": Chip("TPU v5", 95 * _GIB, 4, 2, 3, counts_cores=True),
  "v6e": Chip("TPU v6 lite", 32 * _GIB, 4, 1, 2),
  "tpu7x": Chip("TPU7x", 96 * _GIB, 8, 1, 3, per_chip=2, counts_cores=True),
  "a100": Chip("NVIDIA A100-SXM4-80GB", 80 * _GIB, 8, 108),
  "h100": Chip("NVIDIA H100 80GB HBM3", 84.9e9, 8, 132),
  "h200": Chip("NVIDIA H200", 151.3e9, 8, 132),
  "b200": Chip("NVIDIA B200", 191.5e9, 8, 148),
  "rtx4090": Chip("NVIDIA GeForce RTX 4090", 24 * _GIB, 8, 128),
}
_ALIASES = {"v5litepod": "v5e", "v6": "v6e", "7x": "tpu7x"}
_NAME = re.compile(
  r"(?P<kind>[a-z0-9]+)((?P<separator>[:-])(?P<size>\d{1,6}(x\d{1,6})*))?",
  re.ASCII,
)
# What XLA must know of a GPU: a text proto each, the published figures of it.
_GPU_DIR = pathlib.Path(__file__).parent / "gpu_targets"
# libtpu would ask a metadata server for a TPU's network.
_TPU_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """A set of devices that a program can be compiled for.

  Attributes:
    name: of a slice, "v5p:2x4x4" or "h100:16".
    chip: their kind.
    shape: of a TPU's slice, in chips; (devices,) for GPUs.
    slices: number of equal slices, which only the hosts' network joins.
  """

  name: str
  chip: Chip
  shape: tuple[int, ...]
  slices: int = 1

  @property
  def devices(self) -> int:
    """Number of devices of all slices as JAX counts them."""
    return self.slices * math.prod(self.shape) * self.chip.per_chip

  @property
  def hosts(self) -> int:
    """Number of hosts of all slices; of a TPU as its compiler counts them."""
    return self.slices * -(-self.devices // self.slices // self.chip.per_host)


def parse_topology(name: str) -> Topology:
  """Reads the name of a topology.

  Args:
    name: a GPU and a number, "h100:16" (or "h100" for one); a TPU and the shape
      of its slice, "v5p:2x4x4"; or a TPU and the number that Google Cloud
      counts it by, "v5p-64" (cores) or "v5litepod-16" (chips).

  Raises:
    ValueError: there is no such topology; the message lists those known.
  """
  match = _NAME.fullmatch(name)
  kind = match and _ALIASES.get(match["kind"], match["kind"])
  if kind not in CHIPS:
    raise ValueError(f"topology={name!r} must be {_known()}")
  chip, size = CHIPS[kind], match["size"] or "1"
  numbers = tuple(int(part) for part in size.split("x"))
  if len(numbers) == 1:
    counts_cores = match["separator"] == "-" and chip.counts_cores
    shape = _shape(f"topology={name!r}", chip, numbers[0], counts_cores)
  elif len(numbers) == chip.dimensions:
    shape = numbers
  else:
    raise ValueError(f"topology={name!r} must be {_known()}")
  most = chip.per_host
  if not math.prod(shape):
    raise ValueError(f"topology={name!r} must have 1 chip or more")
  if not chip.dimensions and shape[0] > most and shape[0] % most:
    raise ValueError(
      f"topology={name!r} must have a multiple of {most} devices, those of a "
      f"host, or at most {most}"
    )
  return Topology(f"{kind}:{'x'.join(map(str, shape))}", chip, shape)


def _shape(
  given: str, chip: Chip, number: int, counts_cores: bool
) -> tuple[int, ...]:
  """The shape of a set that is named by its number of chips or cores."""
  if not chip.dimensions:
    return (number,)
  chips = number // 2 if counts_cores else number
  if chips < 1 or chips & (chips - 1) or (chip.dimensions > 2 and chips < 4):
    counted = "cores" if counts_cores else "chips"
    raise ValueError(
      f"{given}: {number} {counted} name no slice; give its shape in "
      f"chips, {'x'.join(['2'] * chip.dimensions)} for instance"
    )
  # Google's shapes: as even as possible, the longer sides last.
  exponent, count = chips.bit_length() - 1, chip.dimensions
  sides = tuple(2 ** ((exponent + i) // count) for i in range(count))
  return (2, 2, 1) if sides == (1, 2, 2) else sides


def _known() -> str:
  gpus = ", ".join(name for name, chip in CHIPS.items() if not chip.dimensions)
  tpus = ", ".join(name for name, chip in CHIPS.items() if chip.dimensions)
  return (
    f"one of {gpus} with a number of devices, as h100:16; or one of {tpus} "
    "with a slice's shape, as v5e:4x4 or v5p:2x4x4, or with the number that "
    "Google Cloud names it by, as v5litepod-16 or v5p-64"
  )


def missing_packages(name: str) -> tuple[str, ...]:
  """Packages that `absent_devices` needs for a target and that are not here."""
  packages = ("libtpu",)
  if parse_topology(name).chip.platform == "gpu":
    packages = "jax-cuda13-plugin", "jax-cuda13-pjrt"
  installed = importlib.metadata.distributions
  return tuple(name for name in packages if not any(installed(name=name)))


def absent_devices(name: str, slices: int = 1) -> list[jax.Device]:
  """Devices to compile for, which need not exist.

  Args:
    name: see `parse_topology`.
    slices: number of equal slices.

  Returns:
    The devices, for a mesh. Under `jax.set_mesh` of it a jitted function is
    lowered from `ShapeDtypeStruct`s with shardings of the mesh, and compiled.

  Raises:
    ValueError: the target is unknown, or a package is missing.
  """
  import jax
  from jax.experimental import topologies

  wanted = dataclasses.replace(parse_topology(name), slices=slices)
  if missing := missing_packages(name):
    raise ValueError(
      f"topology={name!r} needs the package {', '.join(missing)}, see 'Plan a "
      "run' in docs/launching.md"
    )
  changes: dict[str, str] = {}
  if wanted.chip.platform == "gpu":
    kind = wanted.name.partition(":")[0]
    hosts = wanted.hosts // wanted.slices
    shape = slices, hosts, wanted.devices // wanted.hosts
    asked = {
      "platform": "cuda",
      "topology_name": "",
      "topology": "x".join(map(str, shape)),
      "target_config": (_GPU_DIR / f"{kind}.txtpb").read_text(),
    }
  else:
    # libtpu aborts on flags of XLA that are for CPUs.
    changes = {"XLA_FLAGS": "", **_TPU_ENVIRONMENT}
    asked = {
      "platform": "tpu",
      "topology_name": wanted.name,
      "num_slices": slices,
    }
  try:
    with environment(changes):
      return list(topologies.get_topology_desc(**asked).devices)
  except (ValueError, jax.errors.JaxRuntimeError) as error:
    reason = str(error).splitlines()[0]
    raise ValueError(f"topology={name!r} cannot be had: {reason}") from None


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


def random_settings() -> dict[str, Any]:
  """Settings of JAX that change random numbers, where they are not its own.

  JAX's own are left out, so checkpoints that recorded none agree with them.
  """
  import jax

  usual = {
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_enable_x64": False,
  }
  found = {name: getattr(jax.config, name, usual[name]) for name in usual}
  return {name: x for name, x in found.items() if x != usual[name]}
