"""Where the heads of a layer lie on the devices of a mesh.

Devices of the mesh axes tensor and sequence compute different heads. The first
heads of a layer are shared: every token uses them. Devices that hold
consecutive heads would work unequally: those with shared heads always, the
others only for tokens that chose theirs. So heads are dealt to the devices like
cards, key/value head by key/value head with the query heads that read it.
Where `model.head_order` shares others, all are dealt in the same way.

For instance, of 8 heads the first 4 are shared. On two devices one computes the
heads 0, 2, 4, 6, the other 1, 3, 5, 7; each has two shared ones.

Devices along `sequence` hold different tokens, but in attention all tokens of
different heads (`layers.attend`), so heads are dealt to these devices too.
Where they are more than the key/value heads, several devices have the same one,
and the query heads that read it are dealt to them.

Parameters stay in the layer's own order, on the devices and in checkpoints.
`HeadPlacement.deal` moves a kernel's heads when it is used, and its gradient's
back.

Shapes: H heads, K key/value heads.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from moh_jax.config import RoutedLayers
from moh_jax.config.heads import HeadBudget


@dataclasses.dataclass(frozen=True)
class HeadPlacement:
  """The heads of a layer on the devices of a mesh.

  Attributes:
    heads: query heads of the layer, H.
    kv_heads: its key/value heads, K.
    devices: devices that split the heads of parameters, the axis `tensor` of
      our meshes; it divides K.
    sequence: devices along the axis `sequence`, see `place_heads`.
    axes: names of the axes of `devices`.
  """

  heads: int
  kv_heads: int
  devices: int
  sequence: int
  axes: tuple[str, ...]

  @property
  def total(self) -> int:
    """Devices that heads are dealt to."""
    return self.devices * self.sequence

  def order(self, heads: int) -> tuple[int, ...]:
    """Index of the head at each position, in the order of the devices.

    Args:
      heads: H or K.
    """
    group = heads // self.kv_heads
    repeats = kv_repeats(self.kv_heads, self.total)
    if repeats > 1:  # key/value heads stay where they are
      if group == 1:
        return tuple(range(heads))
      queries = np.arange(heads).reshape(self.kv_heads, -1, repeats)
      return tuple(queries.swapaxes(1, 2).reshape(-1).tolist())
    dealt = np.arange(self.kv_heads).reshape(-1, self.total).T.reshape(-1, 1)
    return tuple((dealt * group + np.arange(group)).reshape(-1).tolist())

  def active(self, budget: HeadBudget) -> tuple[float, int]:
    """Active heads of one token on the device that has most of them.

    Args:
      budget: the layer's head split, whose first heads are shared.

    Returns:
      Those expected where routed heads are used evenly, and the most possible.
    """
    heads = np.reshape(self.order(self.heads), (self.total, -1))
    shared = (heads < budget.shared).sum(1)
    routed = heads.shape[1] - shared
    chance = budget.top_k / budget.routed if budget.routed else 0.0
    most = shared + np.minimum(routed, budget.top_k)
    return float((shared + chance * routed).max()), int(most.max())

  def deal(self, x: jax.Array, dim: int) -> jax.Array:
    """Moves heads to the devices that compute them.

    Each device sends every other one only the heads that it needs.

    Args:
      x: an array whose dimension `dim`, of H or K heads, `axes` split.
      dim: index of the dimension.

    Returns:
      x with the heads in the order of the devices, split in the same way.
    """
    order = self.order(x.shape[dim])
    if self.devices == 1:  # every device has all heads
      return jnp.take(x, jnp.asarray(order), axis=dim)
    sends, takes = _routes(order, self.devices)

    def exchange(x: jax.Array) -> jax.Array:
      device = jax.lax.axis_index(self.axes)
      x = jnp.take(x, jnp.asarray(sends)[device], axis=dim)
      x = jax.lax.all_to_all(x, self.axes, dim, dim, tiled=True)
      return jnp.take(x, jnp.asarray(takes)[device], axis=dim)

    spec = jax.sharding.PartitionSpec(*[None] * dim, self.axes)
    # Other axes stay with the compiler: fsdp may split another dimension.
    return jax.shard_map(
      exchange, in_specs=spec, out_specs=spec, axis_names={*self.axes}
    )(x)


@functools.cache
def _routes(
  order: tuple[int, ...], devices: int
) -> tuple[np.ndarray, np.ndarray]:
  """What each device sends, and what it takes from all that it got.

  Args:
    order: index of the head at each position.
    devices: number of devices.

  Returns:
    sends [devices, devices * n], local heads in n slots for each receiver, and
    takes [devices, heads / devices], indices of the slots that are received.
  """
  each = len(order) // devices
  senders, heads = np.divmod(np.reshape(order, (devices, each)), each)
  slots = max(np.bincount(row).max() for row in senders)
  # Slots that hold nothing send a head that nobody takes.
  sends = np.zeros((devices, devices, slots), int)
  takes = np.zeros((devices, each), int)
  used = np.zeros((devices, devices), int)
  for receiver, place in np.ndindex(devices, each):
    sender = senders[receiver, place]
    slot = used[sender, receiver]
    sends[sender, receiver, slot] = heads[receiver, place]
    takes[receiver, place] = sender * slots + slot
    used[sender, receiver] += 1
  return sends.reshape(devices, -1), takes


def kv_repeats(kv_heads: int, devices: int) -> int:
  """How often key/value heads are repeated so that devices can split them."""
  return devices // math.gcd(kv_heads, devices)


def place_heads(
  heads: int,
  kv_heads: int,
  devices: int,
  sequence: int = 1,
  axes: tuple[str, ...] = ("tensor",),
) -> HeadPlacement | None:
  """How a mesh holds a layer's heads.

  Args:
    heads: H.
    kv_heads: K.
    devices: devices that split the heads of parameters.
    sequence: devices along the axis `sequence`.
    axes: names of the axes of `devices`.

  Returns:
    The placement; None if `devices` does not divide K, or if not every device
    of both axes would have as many query heads of the same key/value heads.
  """
  repeats = kv_repeats(kv_heads, devices * sequence)
  if kv_heads % devices or heads % (kv_heads * repeats):
    return None
  return HeadPlacement(heads, kv_heads, devices, sequence, axes)


def check_heads(model: RoutedLayers, mesh: Mesh | AbstractMesh) -> None:
  """Checks that the heads of every layer can be split over the mesh.

  Args:
    model: the config's section of the model.
    mesh: the devices.

  Raises:
    ValueError: mesh.tensor does not divide a layer's key/value heads, or with
      mesh.sequence cannot give every device as many heads.
  """
  tensor, sequence = mesh.shape["tensor"], mesh.shape["sequence"]
  for index, group in enumerate(model.layer_groups(), 1):
    kv_heads = group.kv_heads or group.budget.num_heads
    if place_heads(group.attended, kv_heads, tensor, sequence) is not None:
      continue
    raise ValueError(
      f"mesh.tensor={tensor} must divide the {kv_heads} key/value heads of "
      f"group {index} of equal layers, and with mesh.sequence={sequence} its "
      f"{group.attended} heads evenly"
    )


def check_tokens(
  model: RoutedLayers, mesh: Mesh | AbstractMesh, length: int | None
) -> None:
  """Checks that the tokens of one example can be split over the mesh.

  Args:
    model: the config's section of the model.
    mesh: the devices.
    length: tokens of a training sequence; None is what the model says.

  Raises:
    ValueError: mesh.sequence does not divide the tokens of a layer.
  """
  devices = mesh.shape["sequence"]
  for index, group in enumerate(model.layer_groups(), 1):
    tokens = length or group.tokens
    if tokens % devices:
      raise ValueError(
        f"mesh.sequence={devices}: group {index} of equal layers has "
        f"{tokens} tokens, must be a multiple of it"
      )
