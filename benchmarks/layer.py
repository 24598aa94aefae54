"""Times a whole layer with its router, beside the same layer without one.

  python -m benchmarks.layer --lengths 256 --shares 50,75  # the paper's Table 7

Projections, router, attention and head mixing. Shapes: B batch, N tokens, C
width, H query heads, K key/value heads, D head dim.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.attention import HeadOptions, Split, run_heads
from moh_jax.config.base import Count
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.layers.moh import MoHAttention

_BALANCE_WEIGHT = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOptions(HeadOptions):
  """Options of this benchmark.

  Attributes:
    width: width of the tokens, C; without it heads * head_dim.
  """

  width: Count | None = None

  @property
  def features(self) -> int:
    """Width of the tokens, C."""
    return self.width or self.heads * self.head_dim


def main(argv: Sequence[str] | None = None) -> int:
  """Prints a table; 1 if a form is not exact or does not run."""
  return run_heads(__doc__, argv, LayerOptions, "layer", splits)


def splits(options: LayerOptions, mode: str, length: int) -> Iterable[Split]:
  """The layer without a router, and with one for each of the shares."""
  shape = (options.batch, length, options.features)
  tokens = [
    jax.random.normal(key, shape, options.dtype)
    for key in jax.random.split(jax.random.key(0))
  ]
  for budget in (None, *options.budgets()):
    evaluation = functools.partial(_evaluation, options, budget, mode)
    args = (_params(options, budget), *tokens)
    yield Split(
      budget,
      evaluation=evaluation,
      args=args,
      expected=functools.cache(
        functools.partial(jax.jit(evaluation("dense")), *args)
      ),
    )


def _module(
  options: LayerOptions, budget: HeadBudget | None, mode: str, name: str
) -> MoHAttention:
  """The benchmarked layer; a budget of None leaves out the router."""
  return MoHAttention(
    budget or options.budgets()[0],
    RouterConfig("none")
    if budget is None
    else RouterConfig("two_stage", structure=options.structure),
    num_kv_heads=options.num_kv_heads,
    causal="causal" in mode,
    implementation=name,
    dtype=jnp.dtype(options.dtype),
  )


@functools.cache
def _params(options: LayerOptions, budget: HeadBudget | None) -> Any:
  token = jnp.zeros((1, 1, options.features), options.dtype)
  init = jax.jit(_module(options, budget, "forward", "dense").init)
  return nn.meta.unbox(init(jax.random.key(1), token)["params"])


def _evaluation(
  options: LayerOptions, budget: HeadBudget | None, mode: str, name: str
) -> Callable:
  """Makes the function (params, x, cotangent) -> (outputs, gradients)."""
  module = _module(options, budget, mode, name)

  def layer(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, aux = module.apply({"params": params}, x)
    return out, aux.balance_loss

  def run(params, x, cotangent):
    if "backward" not in mode:
      return layer(params, x)[0], ()
    (out, loss), pull = jax.vjp(layer, params, x)
    return out, pull((cotangent, jnp.full_like(loss, _BALANCE_WEIGHT)))

  return run


if __name__ == "__main__":
  sys.exit(main())
