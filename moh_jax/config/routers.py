"""The table of the kinds of routers, in which `router.kind` is looked up."""

import dataclasses
import pkgutil
from collections.abc import Callable
from typing import Any

from moh_jax.config.checks import shown


@dataclasses.dataclass(frozen=True)
class RouterKind:
  """What configs and layers must know of a kind of router.

  Attributes:
    name: value of `model.router.kind`.
    module: subclass of `moh_jax.Router`, or a function of the same arguments
      that makes one. "MODULE:NAME" is imported when it is first used, since
      configs load without JAX. None leaves every head on.
    reads_norms: whether it reads the norms of the queries. Families whose
      queries have unit length refuse it.
    varies: whether a token may select more routed heads than its budget says.
      Attention then allows for all of them.
    straight_through: whether `RouterConfig.straight_through` says which heads'
      scores get a gradient from its gates.
  """

  name: str
  module: Callable[..., Any] | str | None
  reads_norms: bool = False
  varies: bool = False
  straight_through: bool = False

  def make(self, *fields: Any) -> Any:
    """The Linen module: budget, config and initializer of a layer's router."""
    module = self.module
    if isinstance(module, str):
      module = pkgutil.resolve_name(module)
    return module(*fields)


_BUILT_IN = (
  RouterKind("two_stage", "moh_jax.layers.routers:TwoStageRouter"),
  RouterKind(
    "query_norm",
    "moh_jax.layers.routers:QueryNormRouter",
    reads_norms=True,
    straight_through=True,
  ),
  RouterKind("none", None),
)
_registry = {kind.name: kind for kind in _BUILT_IN}


def register_router(
  name: str, module: Callable[..., Any], **properties: bool
) -> RouterKind:
  """Makes a router known to configs, checkpoints and commands.

  Args:
    name: value of `model.router.kind`.
    module: subclass of `moh_jax.Router`, or a function of the same arguments
      that makes one, such as a `functools.partial` with further fields.
    **properties: `reads_norms`, `varies` and `straight_through`, False unless
      given. `reads_norms`: the router needs the norms of the queries. `varies`:
      a token may select more heads than the budget's `top_k`; to leave it out
      for such a router gives wrong outputs. `straight_through`: the gates obey
      `RouterConfig.straight_through`.

  Returns:
    Its record. Registering a class of the same name again replaces it.

  Raises:
    ValueError: the name is that of another router.
  """
  return add_router(RouterKind(name, module, **properties))


def add_router(kind: RouterKind) -> RouterKind:
  """`register_router` of a record, which may be in the table already."""
  known = _registry.setdefault(kind.name, kind)
  taken = known in _BUILT_IN or _called(known.module) != _called(kind.module)
  if known != kind and taken:
    raise ValueError(f"router name={kind.name!r} is taken by another router")
  _registry[kind.name] = kind
  return kind


def get_router(name: str) -> RouterKind:
  """The record of a kind of router.

  Raises:
    ValueError: there is no such kind; the known ones are listed.
  """
  names = router_names()
  if name not in names:  # names, since a dict cannot look up a list
    raise ValueError(
      f"router.kind={shown(name)} must be one of {names}; a router of another "
      "package must be imported first (--import MODULE)"
    )
  return _registry[name]


def router_names() -> tuple[str, ...]:
  """Names of the built-in routers and of those registered so far."""
  return tuple(_registry)


def _called(module: Any) -> str:
  """Name of a class, also of one defined again; partials share theirs."""
  return getattr(module, "__qualname__", type(module).__qualname__)
