"""What model sections have in common: layers, their heads, and their runs."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar, get_args

from moh_jax.config.base import Dtype, Positive, Section
from moh_jax.config.data import ClassifierConfig, DataConfig
from moh_jax.config.heads import HeadBudget, RouterConfig, Units
from moh_jax.config.registry import get_source
from moh_jax.config.run import Config, Fields

Implementation = Literal["auto", "dense", "packed", "kernel", "cudnn"]
IMPLEMENTATIONS = get_args(Implementation)


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
    parts: key/value groups of which a token uses as many heads each, so that
      attention has queries of no others; else 1.
  """

  budget: HeadBudget
  depth: int
  width: int
  tokens: int
  sees: str = "all"
  kv_heads: int = 0
  pairs: int = 0
  orders: tuple[tuple[int, ...], ...] = ()
  parts: int = 1

  def units(self, router: RouterConfig) -> Units:
    """What tokens choose among in these layers."""
    return Units.of(self.budget, router, self.kv_heads)

  @property
  def attended(self) -> int:
    """Heads whose queries attention gets."""
    return self.budget.num_heads if self.parts == 1 else self.budget.active

  @property
  def order_of_each(self) -> tuple[tuple[int, ...], ...]:
    """`orders`, or where it is () each layer's own order."""
    own = tuple(range(self.budget.num_heads))
    return self.orders or (own,) * self.depth


@dataclasses.dataclass(frozen=True)
class RoutedLayers(Section):
  """What the model sections of all families have in common.

  Attributes:
    family: name of the family.
    router: section of the router; its kind "none" is multi-head attention.
    attention_impl: form of the attention: "auto" takes the fastest that fits
      device and shapes; "dense" makes all logits at once; "packed" computes
      only the heads that tokens chose; "kernel" is "packed" as one Pallas
      kernel (GPU, TPU); "cudnn" is cuDNN's (NVIDIA GPUs).
    attention_out_multiplier: constant that multiplies what attention adds to
      the residual stream (as in Falcon-H1); `export` puts it into the weights.
    dtype: compute dtype, "float32" or "bfloat16".
    remat: what the backward pass computes again to save memory: "none"; "full"
      whole layers; "attention" all but the results of attention; "dots" all but
      these and products with weights; "all_dots" all but these and any
      products.
  """

  RUNTIME_FIELDS = ("attention_impl", "dtype", "remat")
  # Dataclass of the section `data`.
  DATA: ClassVar[type] = DataConfig
  # Further sections that only this family has, name to dataclass.
  SECTIONS: ClassVar[Mapping[str, type]] = {}
  # Whether a tokenizer belongs to a checkpoint.
  READS_TEXT: ClassVar[bool] = False
  # Whether matrices can be stored in the compute dtype without changing any
  # output.
  SERVED_IN_DTYPE: ClassVar[bool] = False
  # First names in the paths of the parameters before the first layer, see
  # `training.optim.decay_by_layer`.
  INPUTS: ClassVar[frozenset[str]] = frozenset({"embed"})
  # Paths of the parameters that have an axis of classes. A run that starts from
  # a model of other classes initialises these anew.
  CLASS_PARAMS: ClassVar[frozenset[str]] = frozenset()
  # Whether the layers get the embedding of a diffusion step.
  HAS_TIME: ClassVar[bool] = False

  family: str
  router: RouterConfig = dataclasses.field(default_factory=RouterConfig)
  attention_impl: Implementation = "auto"
  attention_out_multiplier: Positive = 1.0
  dtype: Dtype = "float32"
  remat: Literal["none", "full", "attention", "dots", "all_dots"] = "none"

  @property
  def example_inputs(self) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and dtypes of the network's inputs, with a batch of one."""
    raise NotImplementedError

  def layer_groups(self) -> tuple[LayerGroup, ...]:
    """The layers by groups of equal ones, in order."""
    raise NotImplementedError

  def stack_names(self) -> tuple[str, ...]:
    """First names in the paths of the layers' parameters, by layer group."""
    return tuple(f"blocks{i}" for i in range(len(self.layer_groups())))

  def layer_budgets(self) -> dict[str, HeadBudget]:
    """The head split of every layer, by its stack and place: "blocks0.1"."""
    return {
      f"{name}.{place}": group.budget
      for name, group in zip(self.stack_names(), self.layer_groups())
      for place in range(group.depth)
    }

  def check_run(self, run: Config) -> None:
    """Raises ValueError where the sections of a run do not fit together."""

  def inherited(self, trained: Config, stated: Mapping[str, Any]) -> Fields:
    """What a run takes from this model, which it starts from, unless stated.

    Args:
      trained: run that trained this model.
      stated: fields of the section `model` that the new run states.

    Returns:
      Fields by section.
    """
    return {"model": dataclasses.asdict(self)}

  def check_complete(self) -> None:
    """Refuses a section with fields that are left to the data.

    Raises:
      ValueError: names the first of them.
    """
    for field in dataclasses.fields(self):
      if getattr(self, field.name) is None:
        self.fail(field.name, "must be stated, or read by `data.infer.resolve`")

  @property
  def activated_share(self) -> float:
    """Heads that a token uses over heads present, all layers together."""
    budgets = self.layer_budgets().values()
    return sum(b.active for b in budgets) / sum(b.num_heads for b in budgets)


_Model = TypeVar("_Model", bound=RoutedLayers)


def without_router(model: _Model, **changes: Any) -> _Model:
  """The multi-head baseline of a model: the same network, router off.

  Args:
    model: the section.
    **changes: further fields to change.
  """
  off = dataclasses.replace(model.router, kind="none", structure="free")
  return dataclasses.replace(model, router=off, **changes)


class ImageModel(RoutedLayers):
  """What model sections of networks that read images, or latents, share.

  They have the fields `channels` and `num_classes`, and the one that `SIZE`
  names.
  """

  # Field of the rows and columns of the input.
  SIZE: ClassVar[str] = "image_size"

  @property
  def input_shape(self) -> tuple[int, int, int]:
    """Rows, columns and channels of an example."""
    return (*getattr(self, self.SIZE), self.channels)

  @property
  def example_inputs(self) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Images [1, X, Y, channels] float32."""
    return (((1, *self.input_shape), "float32"),)

  def token_grids(self) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the tokens, by layer group.

    Here those that come nearest to the shape of the image.
    """
    rows, columns, _ = self.input_shape

    def grid(tokens: int) -> tuple[int, int]:
      every = [(n, tokens // n) for n in range(1, tokens + 1) if not tokens % n]
      return min(
        every, key=lambda x: abs(math.log(x[0] * columns / x[1] / rows))
      )

    return tuple(grid(group.tokens) for group in self.layer_groups())

  def inherited(self, trained: Config, stated: Mapping[str, Any]) -> Fields:
    """The network and its normalization; the classes are those of the data."""
    data = trained.data
    return {
      "model": {**dataclasses.asdict(self), "num_classes": None},
      "data": {"mean": data.mean, "std": data.std},
    }

  def check_channels(self, run: Config) -> None:
    """Raises ValueError unless every channel of the model is normalized."""
    mean, channels = run.data.mean, self.channels
    if None not in (mean, channels) and len(mean) != channels:
      run.data.fail("mean", f"must have model.channels={channels} values")


class ImageClassifier(ImageModel):
  """What model sections of image classifiers share."""

  SECTIONS = {"classifier": ClassifierConfig}

  def check_run(self, run: Config) -> None:
    """Classifiers read images, normalized per channel."""
    if "images" not in get_source(run.data).holds:
      run.data.fail("source", f"must hold images, which {self.family!r} reads")
    self.check_channels(run)


class LayerStack(RoutedLayers):
  """What model sections with one value per layer have in common.

  Their fields `num_heads`, `shared_heads` and `top_k` are tuples of one value
  per layer; `head_dim` and `width` hold for all. `num_tokens` is the N of every
  layer, `sees` as in `LayerGroup`, `num_kv_heads` its `kv_heads`, and
  `head_order` holds its `orders`.
  """

  # What a value of the tuples is for, the number of the first in messages, and
  # the field that says how many there are.
  PART: ClassVar[str] = "layer"
  FIRST: ClassVar[int] = 0
  COUNTED_BY: ClassVar[str] = "num_heads"
  # Fields that have as many values, or one for all parts.
  COUNTED: ClassVar[tuple[str, ...]] = ("shared_heads", "top_k")
  OTHER_NAMES = dict.fromkeys(
    ("depth", "layers", "num_layers", "n_layer", "num_hidden_layers"),
    "num_heads has a value for each layer, such as (8,8,8)",
  )

  sees = "all"
  num_kv_heads = 0
  head_order = ()

  @property
  def depth(self) -> int:
    """Number of layers."""
    return len(self.num_heads)

  def check(self) -> None:
    """Checks the head splits.

    Raises:
      ValueError: a tuple of another length, or a split that does not add up.
    """
    if self.router.reads_time and not self.HAS_TIME:
      steps = "must not read diffusion steps"
      raise ValueError(f"model.router.kind={self.router.kind!r} {steps}")
    if not getattr(self, self.COUNTED_BY):
      self.fail(self.COUNTED_BY, f"must have at least one {self.PART}")
    self.fill_parts(*self.COUNTED)
    self.budgets()

  def fill_parts(self, *names: str) -> None:
    """Gives these fields a value for every part, where one number is for all.

    Raises:
      ValueError: a field has neither.
    """
    like = getattr(self, self.COUNTED_BY)
    for name in names:
      values = getattr(self, name)
      if len(values) == 1 and not isinstance(values[0], tuple):
        object.__setattr__(self, name, values * len(like))
      elif len(values) != len(like):
        parts = f"as model.{self.COUNTED_BY}={like!r} has ({len(like)})"
        self.fail(name, f"must have one value per {self.PART}, or one, {parts}")

  def head_dims(self) -> tuple[int, ...]:
    """The width of a head in every part."""
    return (self.head_dim,) * self.depth

  def budgets(self) -> tuple[HeadBudget, ...]:
    """The head split of every part; without a router all heads are shared.

    Raises:
      ValueError: a split that does not add up, with its place.
    """
    found, routes = [], self.router.selects
    splits = zip(self.num_heads, self.shared_heads, self.top_k)
    for (heads, *split), head_dim in zip(splits, self.head_dims()):
      split = split if routes else (heads, 0)
      try:
        budget = HeadBudget(heads, *split, head_dim)
        Units.of(budget, self.router, self.num_kv_heads)
      except ValueError as error:
        place = f"{self.PART} {len(found) + self.FIRST}"
        raise ValueError(f"model, {place}: {error}") from error
      found.append(budget)
    return tuple(found)

  def layer_groups(self) -> tuple[LayerGroup, ...]:
    """The layers by groups of equal ones, in order.

    Without a router the counts of the section group the layers all the same, so
    that turning it off leaves every parameter in its place.
    """
    splits = zip(self.num_heads, self.shared_heads, self.top_k)
    layers = zip(splits, self.budgets())
    groups, first = [], 0
    shape = self.width, self.num_tokens, self.sees, self.num_kv_heads
    for _, equal in itertools.groupby(layers, key=lambda layer: layer[0]):
      budgets = [budget for _, budget in equal]
      depth = len(budgets)
      orders = self.head_order[first : first + depth]
      units = Units.of(budgets[0], self.router, self.num_kv_heads)
      parts = units.parts
      if orders or parts > 1:
        orders = tuple(units.order(x) for x in orders or ((),) * depth)
      if self.router.needs_all_heads or self.router.varies:
        parts = 1
      group = LayerGroup(budgets[0], depth, *shape, orders=orders, parts=parts)
      groups.append(group)
      first += depth
    return tuple(groups)
