"""What model sections have in common: the layers that they describe."""

import dataclasses
import itertools
from typing import Any, Protocol, TypeVar

from moh_jax.config.checks import (
  DTYPES,
  IMPLEMENTATIONS,
  MOST_HEADS,
  MOST_LAYERS,
  REMATS,
  at_most,
  one_of,
  shown,
)
from moh_jax.config.heads import HeadBudget, RouterConfig


@dataclasses.dataclass(frozen=True)
class LayerGroup:
  """Consecutive equal layers, which a model scans as one stack.

  Attributes:
    budget: the head split of each layer.
    depth: number of layers.
    width: C.
    tokens: N; of a text the longest.
    sees: what a token attends to: "all" tokens, those "before" it, or a
      "window" and pooled tokens.
    kv_heads: key/value heads; 0 is one per query head.
    pairs: entries of the table of relative positions, 0 where there is none.
    orders: for each layer its heads in the order in which the first are shared;
      () is their own order.
  """

  budget: HeadBudget
  depth: int
  width: int
  tokens: int
  sees: str = "all"
  kv_heads: int = 0
  pairs: int = 0
  orders: tuple[tuple[int, ...], ...] = ()

  @property
  def order_of_each(self) -> tuple[tuple[int, ...], ...]:
    """`orders`, or where it is () each layer's own order."""
    own = tuple(range(self.budget.num_heads))
    return self.orders or (own,) * self.depth


@dataclasses.dataclass(frozen=True)
class RoutedLayers:
  """What the model sections of all families have in common.

  Attributes:
    family: name of the family.
    router: section of the router; its kind "none" is multi-head attention.
    attention_impl: form of the attention: "auto" takes the fastest that fits
      device and shapes; "dense" makes all logits at once; "packed" computes
      only the heads that tokens chose; "kernel" is "packed" as one Pallas
      kernel (GPU, TPU); "cudnn" is cuDNN's (NVIDIA GPUs).
    dtype: compute dtype, "float32" or "bfloat16".
    remat: what the backward pass computes again to save memory: "none"; "full"
      whole layers; "attention" all but the results of attention; "dots" all but
      these and products with weights; "all_dots" all but these and any
      products; "offload" as "dots", whose results lie in the host's memory
      until then.
  """

  family: str
  router: RouterConfig = RouterConfig()
  attention_impl: str = "auto"
  dtype: str = "float32"
  remat: str = "none"

  # Fields that change neither the parameters nor what they mean, so that a
  # checkpoint may be continued or served with other values.
  RUNTIME_FIELDS = ("attention_impl", "dtype", "remat")

  def check_common(self, family: str, **sections: type) -> None:
    """Checks the fields that all model sections have.

    Args:
      family: its name.
      **sections: classes of nested sections beside the router.

    Raises:
      ValueError: a value that is not allowed.
    """
    one_of(
      "model",
      self,
      family=(family,),
      dtype=DTYPES,
      remat=REMATS,
      attention_impl=IMPLEMENTATIONS,
    )
    for name, cls in {"router": RouterConfig, **sections}.items():
      value = getattr(self, name)
      if not isinstance(value, cls):
        raise ValueError(f"model.{name}={value!r} must be a {cls.__name__}")

  def check_lengths(self, part: str, like: str, *names: str) -> None:
    """Checks that tuples have one value per part of the model.

    Args:
      part: "layer" or "stage".
      like: field whose length is right.
      *names: fields to check.

    Raises:
      ValueError: not a tuple, or one of another length.
    """
    expected = getattr(self, like)
    for name in (like, *names):
      values = getattr(self, name)
      if not isinstance(values, tuple):
        raise ValueError(
          f"model.{name}={values!r} must be a tuple, one value per {part}"
        )
      if len(values) != len(expected):
        raise ValueError(
          f"model.{name}={shown(values)} must have one value per {part}, as "
          f"model.{like}={shown(expected)} has ({len(expected)})"
        )

  def layer_groups(self) -> tuple[LayerGroup, ...]:
    """The layers by groups of equal ones, in order."""
    raise NotImplementedError

  def check_complete(self) -> None:
    """Refuses a section with fields that are left to the data.

    Raises:
      ValueError: names the first of them.
    """
    for field in dataclasses.fields(self):
      if getattr(self, field.name) is None:
        raise ValueError(
          f"model.{field.name}=None must be stated, or filled in by "
          "`moh_jax.data.infer.resolve`, which reads it from the data"
        )

  @property
  def activated_share(self) -> float:
    """Heads that a token uses over heads present, all layers together."""
    groups = self.layer_groups()
    active = sum(group.depth * group.budget.active for group in groups)
    present = sum(group.depth * group.budget.num_heads for group in groups)
    return active / present

  def make_budget(
    self, place: str, num_heads: int, shared: int, top_k: int, head_dim: int
  ) -> HeadBudget:
    """One head split; without a router all heads are shared.

    Raises:
      ValueError: the counts do not add up; it names `place`.
    """
    if self.router.kind == "none":
      shared, top_k = num_heads, 0
    try:
      return HeadBudget(num_heads, shared, top_k, head_dim)
    except ValueError as error:
      raise ValueError(f"model, {place}: {error}") from error


_Model = TypeVar("_Model", bound=RoutedLayers)


def without_router(model: _Model, **changes: Any) -> _Model:
  """The multi-head baseline of a model: the same network, router off.

  Args:
    model: the section.
    **changes: further fields to change.
  """
  off = dataclasses.replace(model.router, kind="none", top_p=0.0)
  return dataclasses.replace(model, router=off, **changes)


class ImageModel(Protocol):
  """What the data pipeline needs to know of a model that reads images.

  Attributes:
    channels: of the input.
    num_classes: labels.
    input_shape: rows, columns and channels of an example.
  """

  channels: int
  num_classes: int
  input_shape: tuple[int, int, int]


class LayerStack(RoutedLayers):
  """What model sections with one value per layer have in common.

  Their fields `num_heads`, `shared_heads` and `top_k` are tuples of one value
  per layer; `head_dim` and `width` hold for all. `num_tokens` is the N of every
  layer, `sees` as in `LayerGroup`, `num_kv_heads` its `kv_heads`, and
  `head_order` holds its `orders`.
  """

  sees = "all"
  num_kv_heads = 0
  head_order = ()

  @property
  def depth(self) -> int:
    """Number of layers."""
    return len(self.num_heads)

  def check_layers(self) -> None:
    """Checks the head splits.

    Raises:
      ValueError: a tuple of another length, or a split that does not add up.
    """
    if not self.num_heads:
      raise ValueError(
        f"model.num_heads={self.num_heads!r} must have at least one layer"
      )
    if isinstance(self.num_heads, tuple) and self.depth > MOST_LAYERS:
      raise ValueError(
        f"model.num_heads={shown(self.num_heads)} must have at most "
        f"{MOST_LAYERS} layers, not {self.depth}"
      )
    self.check_lengths("layer", "num_heads", "shared_heads", "top_k")
    heads = ("num_heads", "shared_heads", "top_k")
    at_most("model", MOST_HEADS, self, *heads)
    self.budgets()

  def budgets(self) -> tuple[HeadBudget, ...]:
    """The head split of every layer.

    Raises:
      ValueError: a split that does not add up, with its layer.
    """
    splits = zip(self.num_heads, self.shared_heads, self.top_k)
    return tuple(
      self.make_budget(f"layer {layer}", *split, self.head_dim)
      for layer, split in enumerate(splits)
    )

  def layer_groups(self) -> tuple[LayerGroup, ...]:
    """The layers by groups of equal ones, in order.

    Without a router the counts of the section group the layers all the same, so
    that turning it off leaves every parameter in its place.
    """
    splits = zip(self.num_heads, self.shared_heads, self.top_k)
    layers = zip(splits, self.budgets())
    groups = []
    shape = self.width, self.num_tokens, self.sees, self.num_kv_heads
    for _, equal in itertools.groupby(layers, key=lambda layer: layer[0]):
      budgets = [budget for _, budget in equal]
      first = sum(group.depth for group in groups)
      orders = self.head_order[first : first + len(budgets)]
      group = LayerGroup(budgets[0], len(budgets), *shape, orders=orders)
      groups.append(group)
    return tuple(groups)
