"""Meshes and accumulations with which a run should fit."""

import dataclasses

from moh_jax.config import Config
from moh_jax.plan.estimate import Estimate, Estimator
from moh_jax.runtime.topology import USABLE

# Activations are estimated: a proposal leaves room for so many times them.
MARGIN = 2
_MOST_TENSOR = 8


def proposals(config: Config, estimator: Estimator) -> list[Estimate]:
  """Meshes and accumulations that should fit, the fastest first.

  The axis `tensor` splits no more than it has to.

  Args:
    config: of the run.
    estimator: of the run.

  Returns:
    Estimates; empty where nothing fits.
  """
  devices = estimator.topology.devices
  for tensor in _divisors(devices):
    shards = devices // tensor
    if tensor > _MOST_TENSOR or config.data.batch_size % shards:
      continue
    try:
      found = _fitting(config, estimator, shards, tensor)
    except ValueError:  # heads that the devices of `tensor` cannot split
      continue
    if found:
      return sorted(found, key=_rank)
  return []


def _fitting(
  config: Config, estimator: Estimator, shards: int, tensor: int
) -> list[Estimate]:
  """The estimates that fit, of all meshes with one size of `tensor`."""
  limit = USABLE * estimator.topology.chip.memory
  # Beyond two examples the activations grow by as much with each.
  one, two = (estimator.activations(n, tensor) for n in (1, 2))
  found = []
  for fsdp in _divisors(shards):
    mesh = dataclasses.replace(
      config.mesh, data=shards // fsdp, fsdp=fsdp, tensor=tensor, sequence=1
    )
    per_device = config.data.batch_size // shards
    for accumulation in _divisors(per_device):
      examples = per_device // accumulation
      activations = one + (examples - 1) * (two - one)
      optim = dataclasses.replace(config.optim, accumulation=accumulation)
      changed = dataclasses.replace(config, mesh=mesh, optim=optim)
      estimate = estimator.estimate(changed, activations)
      room = (MARGIN - 1) * activations
      if estimate.memory.total + room <= limit:
        found.append(estimate)
  return found


def _rank(one: Estimate) -> tuple[float, int, float]:
  """Fast before slow, then few microbatches before many."""
  accumulation = one.config.optim.accumulation
  return one.time.seconds, accumulation, one.memory.total


def _divisors(number: int) -> list[int]:
  return [n for n in range(1, number + 1) if number % n == 0]
