"""How the heads of a family's network are watched on labelled examples."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import Config, get_family, imported
from moh_jax.evaluation.denoising import noise_of_index
from moh_jax.evaluation.importance import head_importance
from moh_jax.models.diffusion import make_process, q_sample

_TIME_GROUPS = 10  # ranges of timesteps that head statistics tell apart

Batch = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Grouping:
  """Examples by something that they have in common.

  Attributes:
    names: of the groups.
    index: batch -> [B] int32, the group of each example.
  """

  names: tuple[str, ...]
  index: Callable[[Batch], jax.Array]


@dataclasses.dataclass(frozen=True)
class Probe:
  """What head statistics must know of a family's network.

  Attributes:
    apply: (params, batch, **options) -> the result of the network's `apply` on
      a batch; the options are those of `flax.linen.Module.apply`.
    shown: key of what the network reads in a batch, which routing maps keep.
    label: what a label of the data stands for, "class" or "task".
    groupings: further groupings by name, such as the timesteps of diffusion.
    token_mask: batch -> [B, N] bool, False for padding; None counts all tokens.
    grids: rows and columns of the tokens in each group of equal layers, where
      they are patches of an image; () for text.
    importance: (params, batches) -> importance of every head [layers, H]; None
      where nothing measures it.
  """

  apply: Callable[..., Any]
  shown: str = "image"
  label: str = "class"
  groupings: Mapping[str, Grouping] = dataclasses.field(default_factory=dict)
  token_mask: Callable[[Batch], jax.Array] | None = None
  grids: tuple[tuple[int, int], ...] = ()
  importance: Callable[[Any, Iterable[Batch]], np.ndarray] | None = None


def make_probe(network: nn.Module, config: Config) -> Probe:
  """How `heads` runs a network on a held-out batch, and groups examples.

  Raises:
    NotImplementedError: the family does not say.
  """
  probe = imported(get_family(config.model.family).probe)
  if probe is None:
    raise NotImplementedError(
      f"model.family={config.model.family!r} has no probe: head statistics "
      "need one"
    )
  return probe(network, config)


def image_probe(network: nn.Module, config: Config) -> Probe:
  """Images by class."""

  def apply(params: Any, batch: Batch, **options: Any) -> Any:
    return network.apply({"params": params}, batch["image"], **options)

  return Probe(apply, grids=config.model.token_grids())


def diffusion_probe(network: nn.Module, config: Config) -> Probe:
  """Noisy examples by class and by timestep."""
  process = make_process(config.diffusion.schedule, config.diffusion.steps)
  steps = process.num_steps
  parts = min(_TIME_GROUPS, steps)
  bounds = [part * steps // parts for part in range(parts + 1)]
  names = [f"{a}-{b - 1}" for a, b in itertools.pairwise(bounds)]

  def apply(params: Any, batch: Batch, **options: Any) -> Any:
    x0, labels = batch["image"], batch["label"]
    t, noise = noise_of_index(batch["index"], x0.shape[1:], process)
    x = q_sample(process, x0, t, noise)
    times = jnp.asarray(process.timesteps)[t]
    return network.apply({"params": params}, x, times, labels, **options)

  def time_group(batch: Batch) -> jax.Array:
    shape = batch["image"].shape[1:]
    t, _ = noise_of_index(batch["index"], shape, process)
    inner = jnp.asarray(bounds[1:-1], jnp.int32)
    return (t[:, None] >= inner[None]).sum(-1)

  return Probe(
    apply,
    groupings={"timestep": Grouping(tuple(names), time_group)},
    grids=config.model.token_grids(),
  )


def text_probe(network: nn.Module, config: Config) -> Probe:
  """Packed sequences by task, and the importance of heads for the loss.

  Heads have no importance where layers differ in their number.
  """

  def token_mask(batch: Batch) -> jax.Array:
    return batch["segments"] > 0

  def apply(params: Any, batch: Batch, **options: Any) -> Any:
    return network.apply(
      {"params": params},
      batch["inputs"],
      positions=batch["positions"],
      segments=batch["segments"],
      token_mask=token_mask(batch),
      with_logits=False,
      **options,
    )

  importance = None
  if len(set(config.model.num_heads)) == 1:
    importance = functools.partial(head_importance, network, config.model)
  return Probe(
    apply,
    shown="inputs",
    label="task",
    token_mask=token_mask,
    importance=importance,
  )
