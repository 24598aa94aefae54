"""Meshes and accumulations with which a run should fit."""

import dataclasses

from moh_jax.config import Config
from moh_jax.plan.estimate import Estimate, Estimator
from moh_jax.runtime.devices import USABLE

# A proposal must fit even if its activations take this many times the bytes
# that are estimated.
MARGIN = 2
_MOST_SPLIT = 8  # devices that share an example


def proposals(config: Config, estimator: Estimator) -> list[Estimate]:
  """Meshes and accumulations that should fit, the fastest first.

  An example is split over no more devices than it has to be, along `tensor`
  before `sequence`.

  Args:
    config: of the run.
    estimator: of the run.

  Returns:
    Estimates; empty where nothing fits.
  """
  devices = estimator.topology.devices
  each = devices // estimator.topology.slices
  for split in _divisors(each):
    if split > _MOST_SPLIT or config.data.batch_size % (devices // split):
      continue
    for sequence in _divisors(split):
      if found := _fitting(config, estimator, split // sequence, sequence):
        return sorted(found, key=_rank)
  return []


def _fitting(
  config: Config, estimator: Estimator, tensor: int, sequence: int
) -> list[Estimate]:
  """The estimates that fit, of all meshes with these sizes of two axes."""
  topology = estimator.topology
  shards = topology.devices // (tensor * sequence)
  limit = USABLE * topology.chip.memory
  # Beyond two examples the activations grow by as much with each.
  one, two = (estimator.activations(n, tensor, sequence) for n in (1, 2))
  found = []
  for fsdp in _divisors(shards // topology.slices):
    mesh = dataclasses.replace(
      config.mesh,
      data=shards // topology.slices // fsdp,
      fsdp=fsdp,
      tensor=tensor,
      sequence=sequence,
    )
    per_device = config.data.batch_size // shards
    for accumulation in _divisors(per_device):
      examples = per_device // accumulation
      activations = one + (examples - 1) * (two - one)
      optim = dataclasses.replace(config.optim, accumulation=accumulation)
      changed = dataclasses.replace(config, mesh=mesh, optim=optim)
      try:
        estimate = estimator.estimate(changed, activations)
      except ValueError:  # what the devices cannot split
        continue
      if estimate.memory.total + (MARGIN - 1) * activations <= limit:
        found.append(estimate)
  return found


def _rank(one: Estimate) -> tuple[float, int, float]:
  """Fast before slow, then few microbatches before many."""
  accumulation = one.config.optim.accumulation
  return one.time.seconds, accumulation, one.memory.total


def _divisors(number: int) -> list[int]:
  return [n for n in range(1, number + 1) if number % n == 0]
