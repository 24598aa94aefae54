"""The router of Mixture-of-Head attention: tokens to gates.

`HeadRouter` does what all kinds have in common; a kind, a subclass of `Router`,
says how tokens or queries become a `Routing`. A kind of another package is
registered with `moh_jax.register_router`.

Shapes: B batch, N tokens, C width, H heads, R routed heads, S shared heads.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.heads import HeadBudget, RouterConfig, Units
from moh_jax.config.registry import get_router, imported
from moh_jax.layers.linear import KernelInit, initializer, normal_init
from moh_jax.layers.partitioning import declare, examples_key
from moh_jax.ops import routing
from moh_jax.ops.basics import as_mask, check_array
from moh_jax.ops.routing import RouterAux, Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadChoice:
  """Runtime overrides of a layer's head choice; parameters are unchanged.

  Attributes:
    top_k: [] int32 routed heads per token, in place of the budget's; rounded
      down to what the router's structure allows, but not to none.
    order: [H] int32, the heads, those to be shared first: (4, 0, 5, 2, 1, 3)
      shares heads 4 and 0 where the budget shares two. With a structure other
      than "free" it must be listed as `Units.order` does. None is 0, 1, 2, ...,
      or `Units.order()`. The recorded `Routing` lists heads in this order;
      gates and side values are in the layer's own.
    scale: [H] or [B, 1, H] float32 that multiplies the gates, to measure what a
      head contributes.
  """

  top_k: jax.Array | None = None
  order: jax.Array | None = None
  scale: jax.Array | None = None


class HeadRouter(nn.Module):
  """Decides which heads a token uses and with what weight.

  It calls the module of its kind (`moh_jax.layers.router`), whose parameters
  are its own, and does what all kinds have in common: the balance loss, the
  statistics and the runtime overrides.

  Under `mutable=["intermediates"]` the layer records a `Routing`, "routing".

  Attributes:
    budget: the layer's head split.
    config: the kind and form of the router.
    kernel_init: makes the matrices' initializer, see `KernelInit`.
    kv_heads: K, which `config.structure` reads; None is one per query head.
  """

  budget: HeadBudget
  config: RouterConfig = RouterConfig()
  kernel_init: KernelInit = normal_init
  kv_heads: int | None = None

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    norms: jax.Array | None = None,
    time: jax.Array | None = None,
    choice: HeadChoice | None = None,
  ) -> tuple[jax.Array | None, RouterAux]:
    """Routes tokens.

    Args:
      x: [B, N, C] the tokens that the attention reads.
      token_mask: [B, N] bool, True for the tokens that the balance loss and
        the statistics count; None counts all.
      norms: [B, N, H] float32 norms of the queries (`ops.routing.query_norms`),
        where `config.reads_norms`.
      time: [B, any width] embedding of each example's diffusion step, where
        `config.reads_time`. The balance loss counts examples, not tokens.
      choice: runtime overrides of the budget.

    Returns:
      gates [B, N, H] float32, or None for the kind "none" (every head weighs
      one), and the side values.

    Raises:
      ValueError: the mask has another shape or dtype, the kind reads norms or
        steps and there are none, or a registered router returned something
        else.
    """
    budget, config = self.budget, self.config
    if x.ndim != 3:
      raise ValueError(f"x has shape {x.shape}, must be [B, N, C]")
    token_mask = as_mask(token_mask)
    check_array("token_mask", token_mask, bool, x.shape[:-1])
    choice = HeadChoice() if choice is None else choice
    if config.kind == "none":
      gates = None
      if choice.scale is not None:
        gates = jnp.broadcast_to(choice.scale, (*x.shape[:2], budget.num_heads))
      return gates, routing.all_heads_aux(budget.num_heads)

    if config.reads_norms and norms is None:
      raise ValueError(
        "norms=None must be the norms [B, N, H] of the queries where the "
        f"router's kind is {config.kind!r}"
      )
    heads = *x.shape[:2], budget.num_heads
    check_array("norms", norms, jnp.floating, heads)
    tokens = x.shape[1]
    if config.reads_time:
      if time is None:
        kind = f"where the router's kind is {config.kind!r}"
        raise ValueError(f"time=None must be embeddings of steps {kind}")
      check_array("time", time, jnp.floating, (len(x), time.shape[-1]))
      x = time[:, None]
      if token_mask is not None:
        token_mask = token_mask.any(1, keepdims=True)
    units = Units.of(budget, config, self.kv_heads)
    order, top_k = choice.order, choice.top_k
    if order is None and units.parts > 1:
      order = jnp.asarray(units.order())
    if norms is not None and order is not None:
      norms = jnp.take(norms, order, axis=-1)
    if units.size > 1:
      top_k = None if top_k is None else jnp.maximum(top_k // units.size, 1)
      if norms is not None:
        squares = jnp.square(norms.reshape(*norms.shape[:-1], -1, units.size))
        norms = jnp.sqrt(squares.sum(-1))
    module = imported(get_router(config.kind).module)
    router = module(units.budget, config, self.kernel_init, parts=units.parts)
    nn.share_scope(self, router)  # parameters lie directly under this layer
    decided = router(x, norms=norms, top_k=top_k)
    what = f"router.kind={config.kind!r} returned gates"
    shape = *x.shape[:2], units.budget.num_heads
    check_array(what, decided.gates, jnp.floating, shape)
    aux = routing.router_aux(
      decided, units.budget, token_mask=token_mask, form=config.gate_form
    )
    if units.size > 1:
      decided, aux = (x.of_heads(units.size) for x in (decided, aux))
    if config.reads_time:  # every token of an example has the same heads
      decided = jax.tree.map(lambda a: jnp.repeat(a, tokens, axis=1), decided)
    self.sow("intermediates", "routing", decided)
    gates = decided.gates
    if order is not None:
      own = jnp.argsort(order)
      values = gates, aux.counts, aux.scores, aux.balance
      gates, *sums = (jnp.take(x, own, axis=-1) for x in values)
      aux = RouterAux(aux.tokens, *sums, routed=aux.routed)
    if choice.scale is not None:
      gates = gates * jax.lax.broadcast_to_rank(choice.scale, gates.ndim)
    return gates, aux


@contextlib.contextmanager
def count_examples(mask: jax.Array) -> Iterator[None]:
  """Makes models that are applied inside count some of their examples alone.

  It is for side values (`RouterAux`) of batches with padding; outputs do not
  change. An example may be several sequences that stand side by side, as where
  a model reshapes [B, V, N, C] to [B * V, N, C].

  Args:
    mask: [B], 0 for examples that do not count.
  """

  def route(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
    is_router = isinstance(context.module, HeadRouter)
    if is_router and context.method_name == "__call__":
      kwargs = dict(zip(("x", "token_mask"), args)) | kwargs
      shape, given = kwargs["x"].shape[:2], kwargs.get("token_mask")
      if shape[0] % len(mask):
        many = f"has {shape[0]} sequences for {len(mask)} examples"
        raise ValueError(f"x {many}, must have as many for each")
      counted = jnp.repeat(mask > 0, math.prod(shape) // len(mask))
      counted = counted.reshape(shape) & (True if given is None else given)
      args, kwargs["token_mask"] = (), counted
    return call(*args, **kwargs)

  with nn.intercept_methods(route):
    yield


class Router(nn.Module):
  """A kind of router: subclass it and define `__call__`.

  Parameters lie directly under the layer's router: `self.param("bias", ...)` is
  `attn/router/bias`. In training `self.make_rng("dropout")` gives random keys;
  `self.has_rng("dropout")` tells whether there is one.

  Attributes:
    budget: the layer's head split; where `config.structure` is "whole_group" it
      counts key/value groups in place of heads.
    config: section `model.router`.
    kernel_init: the family's initializer of matrices.
    parts: key/value groups where `config.structure` is "per_group", else 1. The
      routed heads of a part are side by side; `select` selects as many of each.
  """

  budget: HeadBudget
  config: RouterConfig = RouterConfig()
  kernel_init: KernelInit = normal_init
  parts: int = 1

  def __call__(
    self,
    x: jax.Array,
    *,
    norms: jax.Array | None = None,
    top_k: jax.Array | None = None,
  ) -> Routing:
    """Decides for each token; override it.

    Args:
      x: [B, N, C] the tokens that the attention reads.
      norms: [B, N, H] float32 norms of the queries, the shared heads first,
        where the kind reads them.
      top_k: [] int32 routed heads per token in place of the budget's.

    Returns:
      Gates [B, N, H] float32, exactly 0 for heads that are not selected, and
      what the balance loss and the statistics need.
    """
    raise NotImplementedError(f"{type(self).__name__} has no __call__")

  def logits(self, x: jax.Array, **sizes: int) -> dict[str, jax.Array]:
    """Products with bias-free matrices [C, size], all in one.

    Float32 at full matrix precision whatever the compute dtype: a rounding
    that swaps the last selected head changes the output.

    Args:
      x: [B, N, C] tokens.
      **sizes: columns of each matrix, by its name; 0 makes no matrix.

    Returns:
      [B, N, size] float32 by name.
    """
    init, width = initializer(self.kernel_init, 0, 1), x.shape[-1]
    # Whole on every device: to gather them would take longer than the memory is
    # worth.
    kernels = [
      declare(self, name, init, (width, size), (None, None))
      for name, size in sizes.items()
      if size
    ]
    if not kernels:
      return {name: x[..., :0].astype(jnp.float32) for name in sizes}
    kernel = jnp.concatenate([k.astype(jnp.float32) for k in kernels], axis=-1)
    logits = jnp.matmul(
      x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST
    )
    bounds = np.cumsum(list(sizes.values()))[:-1]
    return dict(zip(sizes, jnp.split(logits, bounds, axis=-1)))

  @nn.nowrap
  def make_rng(self, name: str = "params") -> jax.Array:
    """A random key; in a training step each device of the batch has its own."""
    return examples_key(super().make_rng(name))

  @nn.nowrap
  def select(self, scores: jax.Array, top_k: jax.Array | None) -> jax.Array:
    """Marks the heads with the best scores, as many as budget and config say.

    Args:
      scores: [B, N, R].
      top_k: as `__call__` gets it.

    Returns:
      [B, N, R] bool.
    """
    return routing.select_heads(
      scores, self.budget, parts=self.parts, top_k=top_k
    )

  @nn.nowrap
  def routing(
    self, gates: jax.Array, probs: jax.Array, selected: jax.Array
  ) -> Routing:
    """A `Routing` in which the shared heads weigh one.

    Args:
      gates: [B, N, R] float32 of the routed heads, 0 where not selected.
      probs: [B, N, R] float32 scores that the balance loss reads; they add up
        to 1.
      selected: [B, N, R] bool.
    """
    return routing.beside_shared(self.budget, gates, probs, selected)


class TwoStageRouter(Router):
  """The paper's learned router, in the forms of `moh_jax.ops.routing`.

  It has up to three matrices: `routed` [C, R] (W_r), `shared` [C, S] (W_s, for
  two or more shared heads) and `group` [C, 2] (W_h, where both groups are in
  use).
  """

  @staticmethod
  def matrices(budget: HeadBudget, config: RouterConfig) -> dict[str, int]:
    """Columns of each matrix that a layer has."""
    sizes = {
      "routed": budget.routed if budget.top_k else 0,
      "shared": budget.shared if budget.shared > 1 else 0,
      "group": 2 if config.two_stage and budget.shared and budget.top_k else 0,
    }
    return {name: size for name, size in sizes.items() if size}

  @nn.compact
  def __call__(self, x, *, norms=None, top_k=None):
    """See `Router`."""
    logits = self.logits(x, **self.matrices(self.budget, self.config))
    choice = {"parts": self.parts, "top_k": top_k}
    return routing.two_stage_gates(
      logits, self.budget, x.shape[:2], form=self.config.gate_form, **choice
    )


class GateRouter(Router):
  """A sigmoid per head and no selection (arXiv:2505.06708).

  Its matrix `gate` is [C, H]; every head is on, with a gate in (0, 1).
  """

  @nn.compact
  def __call__(self, x, *, norms=None, top_k=None):
    """See `Router`."""
    gates = jax.nn.sigmoid(self.logits(x, gate=self.budget.num_heads)["gate"])
    none = gates[..., :0]
    decided = self.routing(none, none, none.astype(bool))
    share = gates / gates.sum(-1, keepdims=True)
    return dataclasses.replace(decided, gates=gates, shared_scores=share)


class TimestepRouter(Router):
  """Gates 0 and 1 from the step of diffusion (as in arXiv:2410.03456).

  Its matrix `time` is [C, R]; what it multiplies is the step's embedding, so
  all tokens of all examples at one step have the same heads, and a sampler
  computes no others (`models.time_heads`).
  """

  @nn.compact
  def __call__(self, x, *, norms=None, top_k=None):
    """See `Router`."""
    size = self.budget.routed if self.budget.top_k else 0
    return routing.hard_gates(
      self.logits(nn.silu(x), time=size)["time"],
      self.budget,
      straight_through=self.config.straight_through,
      parts=self.parts,
      top_k=top_k,
    )


class QueryNormRouter(Router):
  """The paper's router of pre-trained models; it has no parameters."""

  def __call__(self, x, *, norms=None, top_k=None):
    """See `Router`."""
    return routing.query_norm_gates(
      norms,
      self.budget,
      straight_through=self.config.straight_through,
      parts=self.parts,
      top_k=top_k,
    )
