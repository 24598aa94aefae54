"""Which head is computed on which device of a tensor axis.

The first heads of a layer are shared: every token uses them. Devices that hold
consecutive heads would work unequally: those with shared heads always, the
others only for tokens that chose theirs. So heads are dealt to the devices like
cards, key/value head by key/value head with the query heads that read it.

For instance, of 8 heads the first 4 are shared. On two devices one computes the
heads 0, 2, 4, 6, the other 1, 3, 5, 7; each has two shared ones.

Parameters stay in the layer's own order, on the devices and in checkpoints.
`deal_heads` moves a kernel's heads when it is used, and its gradient's back.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.heads import HeadBudget


@dataclasses.dataclass(frozen=True)
class HeadPlacement:
  """The heads of a layer on the devices of a mesh axis.

  Attributes:
    heads: query heads of the layer, H.
    kv_heads: its key/value heads, K.
    devices: devices along the axis, a divisor of K.
    axis: name of the mesh axis.
  """

  heads: int
  kv_heads: int
  devices: int
  axis: str = "tensor"

  def order(self, heads: int) -> tuple[int, ...]:
    """Index of the head at each position, in the order of the devices.

    Args:
      heads: H or K.
    """
    dealt = np.arange(self.kv_heads).reshape(-1, self.devices).T.reshape(-1, 1)
    group = heads // self.kv_heads
    return tuple((dealt * group + np.arange(group)).reshape(-1).tolist())

  def expected_active(self, budget: HeadBudget) -> tuple[float, ...]:
    """Active heads of a token on each device, if routed heads are used evenly.

    Args:
      budget: the layer's head split.
    """
    chance = budget.top_k / budget.routed if budget.routed else 0.0
    shared = self._shared(budget)
    routed = self.heads // self.devices - shared
    return tuple((shared + chance * routed).tolist())

  def most_active(self, budget: HeadBudget) -> int:
    """Active heads that one token can have on one device.

    Args:
      budget: the layer's head split.
    """
    shared = self._shared(budget)
    routed = self.heads // self.devices - shared
    return int((shared + np.minimum(routed, budget.top_k)).max())

  def imbalance(self, budget: HeadBudget) -> float:
    """Largest number of `expected_active` over their mean; 1 is balanced.

    Args:
      budget: the layer's head split.
    """
    active = self.expected_active(budget)
    return max(active) * len(active) / sum(active)

  def _shared(self, budget: HeadBudget) -> np.ndarray:
    """Number of shared heads on each device."""
    heads = np.asarray(self.order(self.heads)).reshape(self.devices, -1)
    return (heads < budget.shared).sum(1)

  def deal(self, x: jax.Array, dim: int) -> jax.Array:
    """Moves heads to the devices that compute them.

    Each device sends every other one only the heads that it needs.

    Args:
      x: an array whose dimension `dim`, of H or K heads, the axis splits.
      dim: index of the dimension.

    Returns:
      x with the heads in the order of the devices, split in the same way.
    """
    sends, takes = _routes(self.order(x.shape[dim]), self.devices)

    def exchange(x: jax.Array) -> jax.Array:
      device = jax.lax.axis_index(self.axis)
      x = jnp.take(x, jnp.asarray(sends)[device], axis=dim)
      x = jax.lax.all_to_all(x, self.axis, dim, dim, tiled=True)
      return jnp.take(x, jnp.asarray(takes)[device], axis=dim)

    spec = jax.sharding.PartitionSpec(*[None] * dim, self.axis)
    # Other axes stay with the compiler: fsdp may split another dimension.
    return jax.shard_map(
      exchange, in_specs=spec, out_specs=spec, axis_names={self.axis}
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
  wanted = np.asarray(order).reshape(devices, each)
  lists = [
    [[h % each for h in row if h // each == sender] for row in wanted]
    for sender in range(devices)
  ]
  slots = max(len(part) for row in lists for part in row)
  # Slots that hold nothing repeat a head that nobody takes.
  sends = [[(part + [0] * slots)[:slots] for part in row] for row in lists]
  takes = [
    [
      (h // each) * slots + lists[h // each][receiver].index(h % each)
      for h in row
    ]
    for receiver, row in enumerate(wanted)
  ]
  return np.asarray(sends).reshape(devices, -1), np.asarray(takes)
