"""Where the heads of a layer lie: on which devices, and in which vector lanes.

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

A TPU keeps the last axis of an array in rows of 128 lanes. Narrower heads would
leave lanes empty, so XLA stores [B, N, H, D] with the tokens last instead, and
transposes the arrays before and after every kernel. Where D divides 128,
neighbouring heads share the lanes of a row here: [B, N, S, W] with m = 128 / D
heads in a set, S = H / m sets and W = m * D = 128 lanes.

Whatever takes such an array apart along its lanes, or puts one together, writes
all of it again. So queries, keys and values are separate products on a TPU, and
the halves of heads (RoPE) are never arrays of their own.

Other head dims are padded with zeros where that costs little (`padded_dim`):
the products that make and read the heads do more, but write whole rows.

Shapes: B batch, N tokens, H heads, K key/value heads, D head dim, m heads of a
set, S sets, W lanes.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh

from moh_jax.config import LayerGroup, RoutedLayers
from moh_jax.config.heads import HeadBudget
from moh_jax.ops.target import target

LANES = 128


@dataclasses.dataclass(frozen=True)
class HeadPlacement:
  """The heads of a layer on the devices of a mesh axis.

  Attributes:
    heads: query heads of the layer, H.
    kv_heads: its key/value heads, K.
    devices: devices along the axis that splits parameters, a divisor of K.
    axis: name of that mesh axis.
    sequence: devices along the axis `sequence`, see `place_heads`.
  """

  heads: int
  kv_heads: int
  devices: int
  axis: str = "tensor"
  sequence: int = 1

  def order(self, heads: int) -> tuple[int, ...]:
    """Index of the head at each position, in the order of the devices.

    Args:
      heads: H or K.
    """
    group = heads // self.kv_heads
    repeats = kv_repeats(self.kv_heads, self._total)
    if repeats > 1:  # key/value heads stay where they are
      if group == 1:
        return tuple(range(heads))
      queries = np.arange(heads).reshape(self.kv_heads, -1, repeats)
      return tuple(queries.swapaxes(1, 2).reshape(-1).tolist())
    dealt = np.arange(self.kv_heads).reshape(-1, self._total).T.reshape(-1, 1)
    return tuple((dealt * group + np.arange(group)).reshape(-1).tolist())

  def expected_active(
    self, budget: HeadBudget, order: Sequence[int] = ()
  ) -> tuple[float, ...]:
    """Active heads of a token on each device, if routed heads are used evenly.

    Args:
      budget: the layer's head split.
      order: the heads in the order in which the first are shared; () is their
        own.
    """
    chance = budget.top_k / budget.routed if budget.routed else 0.0
    shared = self._shared(budget, order)
    routed = self.heads // self._total - shared
    return tuple((shared + chance * routed).tolist())

  def mean_active(self, budget: HeadBudget) -> float:
    """Mean over the devices of the active heads of a token.

    Args:
      budget: the layer's head split.
    """
    return budget.active / self._total

  def most_active(self, budget: HeadBudget) -> int:
    """Active heads that one token can have on one device.

    Args:
      budget: the layer's head split, whose first heads are shared.
    """
    shared = self._shared(budget)
    routed = self.heads // self._total - shared
    return int((shared + np.minimum(routed, budget.top_k)).max())

  def imbalance(self, budget: HeadBudget, order: Sequence[int] = ()) -> float:
    """Largest number of `expected_active` over their mean; 1 is balanced.

    Args:
      budget: the layer's head split.
      order: as in `expected_active`.
    """
    active = self.expected_active(budget, order)
    return max(active) / self.mean_active(budget)

  @property
  def _total(self) -> int:
    """Devices that heads are dealt to."""
    return self.devices * self.sequence

  def _shared(
    self, budget: HeadBudget, order: Sequence[int] = ()
  ) -> np.ndarray:
    """Number of shared heads on each device."""
    heads = np.asarray(self.order(self.heads)).reshape(self._total, -1)
    first = (order or range(self.heads))[: budget.shared]
    return np.isin(heads, first).sum(1)

  def deal(self, x: jax.Array, dim: int) -> jax.Array:
    """Moves heads to the devices that compute them.

    Each device sends every other one only the heads that it needs.

    Args:
      x: an array whose dimension `dim`, of H or K heads, the axis splits.
      dim: index of the dimension.

    Returns:
      x with the heads in the order of the devices, split in the same way.
    """
    order = self.order(x.shape[dim])
    if self.devices == 1:  # every device has all heads
      return jnp.take(x, jnp.asarray(order), axis=dim)
    sends, takes = _routes(order, self.devices)

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


def kv_repeats(kv_heads: int, devices: int) -> int:
  """How often key/value heads are repeated so that devices can split them."""
  return devices // math.gcd(kv_heads, devices)


def place_heads(
  heads: int, kv_heads: int, devices: int, sequence: int = 1, axis="tensor"
) -> HeadPlacement | None:
  """How a mesh holds a layer's heads.

  Args:
    heads: H.
    kv_heads: K.
    devices: devices along the axis that splits parameters.
    sequence: devices along the axis `sequence`.
    axis: name of the former.

  Returns:
    The placement; None if `devices` does not divide K, or if not every device
    of both axes would have as many query heads of the same key/value heads.
  """
  repeats = kv_repeats(kv_heads, devices * sequence)
  if kv_heads % devices or heads % (kv_heads * repeats):
    return None
  return HeadPlacement(heads, kv_heads, devices, axis, sequence)


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


def check_heads(
  model: RoutedLayers,
  mesh: Mesh | AbstractMesh,
  max_imbalance: float = math.inf,
) -> None:
  """Checks that the heads of every layer can be split over the mesh.

  Args:
    model: the config's section of the model.
    mesh: the devices.
    max_imbalance: see `MeshConfig`.

  Raises:
    ValueError: mesh.tensor does not divide a layer's key/value heads, or with
      mesh.sequence cannot give every device as many heads, or leaves more
      active ones on a device than on others.
  """
  tensor, sequence = mesh.shape["tensor"], mesh.shape["sequence"]
  for index, group in enumerate(model.layer_groups(), 1):
    place = f"mesh.tensor={tensor}"
    if sequence > 1:
      place += f" with mesh.sequence={sequence}"
    place += f": the {index}. group of equal layers has"
    placement = head_placement(group, tensor, sequence)
    kv_heads = group.kv_heads or group.budget.num_heads
    if placement is None and kv_heads % tensor:
      raise ValueError(
        f"{place} {kv_heads} key/value heads, must be a multiple of it"
      )
    if placement is None:
      raise ValueError(
        f"{place} {group.attended} heads on {kv_heads} key/value "
        f"heads, which {tensor * sequence} devices cannot share evenly"
      )
    if works_equally(model, group):
      continue
    orders = set(group.order_of_each)
    ratio = max(placement.imbalance(group.budget, order) for order in orders)
    if ratio > max_imbalance:
      ordered = " in model.head_order" if group.orders else ""
      raise ValueError(
        f"{place} {group.budget.shared} shared heads of "
        f"{group.budget.num_heads}{ordered}: the busiest device would have "
        f"{ratio:.3f} times the mean of active heads, allowed is "
        f"mesh.max_imbalance={max_imbalance}"
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
        f"mesh.sequence={devices}: the {index}. group of equal layers has "
        f"{tokens} tokens, must be a multiple of it"
      )


def works_equally(model: RoutedLayers, group: LayerGroup) -> bool:
  """Whether devices work equally, whatever heads tokens choose."""
  return (
    model.POSITION_BIAS
    or group.sees == "window"
    or group.parts > 1  # as many heads of every key/value head
    or model.router.needs_all_heads
  )


def head_placement(
  group: LayerGroup, tensor: int, sequence: int = 1
) -> HeadPlacement | None:
  """How a mesh holds a layer's heads; None if it cannot split them."""
  kv_heads = group.kv_heads or group.budget.num_heads
  return place_heads(group.attended, kv_heads, tensor, sequence)


def heads_in_lanes(heads: int, dim: int) -> int:
  """How many neighbouring heads fill the lanes, m; 1 if none do.

  Args:
    heads: H that a device has, a multiple of m.
    dim: D.
  """
  count = LANES // dim if LANES % dim == 0 else 1
  return 1 if heads % count else count


def padded_dim(dim: int) -> int:
  """Width of heads with zeros in the lanes that they leave empty.

  It is D if less than three quarters of the lanes would be the heads' own. The
  wider products then cost more than the copies that they save, by the estimates
  of XLA's compiler for TPU v5e and v6e: 96 as 128 pays, 72 as 128 does not.

  Args:
    dim: D.
  """
  if dim > LANES:
    width = -(-dim // LANES) * LANES
  else:
    width = next(x for x in range(dim, LANES + 1) if LANES % x == 0)
  return width if 4 * dim >= 3 * width else dim


def on_tpu() -> bool:
  """Whether the function that is traced will run on a TPU."""
  return target().platform == "tpu"


def fill_lanes(x: jax.Array, count: int) -> jax.Array:
  """Shapes [..., H, D] as [..., S, W], with m = count heads in a set."""
  *lead, heads, dim = x.shape
  return x.reshape(*lead, heads // count, count * dim)


def in_place(places: jax.Array, count: int, dim: int) -> jax.Array:
  """Whether a lane belongs to a place among the m = count heads of a set.

  Args:
    places: [...] int32, from 0 to m - 1.
    count: m.
    dim: D.

  Returns:
    [..., W] bool.
  """
  places = jnp.asarray(places)[..., None]
  shape = (*[1] * (places.ndim - 1), count * dim)
  return places == lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) // dim


def store_by_head(x: jax.Array) -> jax.Array:
  """Has padded heads [B, N, S, W] stored in the order [B, S, N, W].

  Left to itself, XLA stores results of products with padded weights with the
  tokens last (v6e), as it does without padding. The gradient is stored alike.
  """
  return with_layout_constraint(x, Layout((0, 2, 1, 3)))


def over_lanes(x: jax.Array, count: int, dim: int) -> jax.Array:
  """Repeats one number per head over its lanes.

  Args:
    x: [..., H].
    count: m.
    dim: D.

  Returns:
    [..., S, W]; [..., H, 1], which broadcasts to that, if m = 1.
  """
  x = x.reshape(*x.shape[:-1], x.shape[-1] // count, count, 1)
  out = x[..., 0, :]
  ones = [1] * (x.ndim - 2)
  # Place by place: a masked sum over places compiles to more memory on a TPU.
  for i in range(1, count):
    own = in_place(jnp.full(ones, i), count, dim)
    out = jnp.where(own, x[..., i, :], out)
  return out


@dataclasses.dataclass(frozen=True)
class HeadLayout:
  """How the arrays of a layer hold its heads: one value for all of its parts.

  Attributes:
    dim: D, width of a head.
    width: that of heads in arrays, with zeros after a head's own numbers.
    sets: for each number of heads that an array of the layer has, m; those that
      are missing stand alone.
    placement: the order in which devices compute the heads; None is the order
      of the parameters.
  """

  dim: int
  width: int
  sets: tuple[tuple[int, int], ...] = ()
  placement: HeadPlacement | None = None

  def count(self, heads: int) -> int:
    """Heads of a set, m, in an array of so many heads."""
    return dict(self.sets).get(heads, 1)

  def dealt(self, x: jax.Array) -> jax.Array:
    """Brings numbers per head, [..., H], to the order of the devices."""
    if self.placement is None:
      return x
    return x[..., self.placement.order(x.shape[-1])]

  def undealt(self, x: jax.Array) -> jax.Array:
    """Brings numbers per head, [..., H], back to the order of the layer."""
    if self.placement is None:
      return x
    return x[..., np.argsort(self.placement.order(x.shape[-1]))]


def head_layout(
  dim: int,
  devices: Mapping[int, int],
  *,
  pads: bool = False,
  placement: HeadPlacement | None = None,
) -> HeadLayout:
  """Makes the layout for the device that a function is traced for.

  Args:
    dim: D.
    devices: for each number of heads that an array of the layer has, how many
      devices hold different ones.
    pads: whether heads may be wider than D, where that fills the lanes.
    placement: as in `HeadLayout`.
  """
  if not on_tpu():
    return HeadLayout(dim, dim, placement=placement)

  def sets(width: int) -> dict[int, int]:
    return {
      heads: heads_in_lanes(heads // count, width)
      for heads, count in devices.items()
    }

  width = padded_dim(dim) if pads else dim
  if width % LANES and sets(width)[min(devices)] == 1:
    width = dim
  return HeadLayout(dim, width, tuple(sets(width).items()), placement)
