"""Benchmark of a whole layer: projections, router, attention, head mixing.

Shapes: B batch, N tokens, C width, H query heads, K key/value heads, D head
dim, R routed heads, S shared heads.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.layers.moh import MoHAttention
from moh_jax.speed import compare
from moh_jax.speed.attention import (
  attention_bytes,
  attention_flops,
  chosen_form,
  passes,
)
from moh_jax.speed.compare import Contest, Variant
from moh_jax.speed.options import LayerOptions
from moh_jax.speed.programs import jit_once, make_arrays
from moh_jax.speed.report import Row

_BALANCE_WEIGHT = 0.01


def layer_flops(
  budget: HeadBudget,
  *,
  tokens: int,
  length: int,
  width: int,
  kv_heads: int,
  routed: bool,
  mode: str = "forward",
) -> float:
  """FLOPs of a layer's products, counted for the active heads.

  A token with A active heads takes 2 C A D FLOPs for the queries, 4 C K D for
  keys and values, 2 A D C for the output, and 2 C (R + S + 2) for the router: a
  single shared head has no score, and the two group scores exist only if there
  are both shared and routed heads. To these comes attention, see
  `attention_flops`. Both passes take three times the forward pass.

  Args:
    budget: the layer's head split.
    tokens: tokens of the whole batch.
    length: tokens of a sequence.
    width: width of the tokens, C.
    kv_heads: key/value heads, K.
    routed: whether there is a router; multi-head attention has none and uses
      every head.
    mode: one of `options.MODES`.
  """
  active = budget.active if routed else budget.num_heads
  per_token = 4 * width * budget.head_dim * (active + kv_heads)
  if routed:
    scores = budget.routed if budget.top_k else 0
    scores += budget.shared if budget.shared > 1 else 0
    scores += 2 if budget.shared and budget.top_k else 0
    per_token += 2 * width * scores
  return tokens * per_token * passes(mode) + attention_flops(
    tokens * active, length, budget.head_dim, mode
  )


def layer_bytes(
  options: LayerOptions, share: float, computed: float, length: int, mode: str
) -> float:
  """Least bytes that a layer reads and writes.

  To those of its attention come the float32 weights, the tokens, read and
  written, and of the heads of the active queries the queries, keys and values
  that the projections write and the outputs that the mixing reads. Both passes
  take three times as many.

  Args:
    options: options of the benchmark.
    share: active heads over all heads.
    computed: heads that attention computes over all heads.
    length: tokens of a sequence.
    mode: one of `options.MODES`.
  """
  tokens, itemsize = options.batch * length, jnp.dtype(options.dtype).itemsize
  heads, groups, dim = options.heads, options.num_kv_heads, options.head_dim
  weights = 4 * 2 * options.features * dim * (heads + groups)
  values = 2 * options.features + 2 * dim * (heads * share + groups)
  return passes(mode) * (
    weights + tokens * values * itemsize
  ) + attention_bytes(
    round(tokens * heads * computed), tokens * groups, dim, itemsize, mode
  )


def measure(options: LayerOptions) -> list[Row]:
  """Compares a routed layer with the same layer without a router.

  Args:
    options: options of `bench layer`.
  """
  splits = (None, *options.budgets())
  params = {
    split: make_arrays(functools.partial(_random_params, options, split))
    for split in splits
  }
  variants = functools.partial(_variants, options, params)
  return compare.measure_heads(options, "layer", variants)


def _variants(
  options: LayerOptions,
  params: dict[HeadBudget | None, Any],
  mode: str,
  length: int,
) -> list[Variant]:
  shape = (options.batch, length, options.features)
  tokens = make_arrays(
    lambda: [
      jax.random.normal(key, shape, options.dtype)
      for key in jax.random.split(jax.random.key(0))
    ]
  )
  contests = []
  for split in params:  # None is multi-head attention
    share = 1.0 if split is None else split.share
    flops = layer_flops(
      split or options.budgets()[0],
      tokens=options.batch * length,
      length=length,
      width=options.features,
      kv_heads=options.num_kv_heads,
      routed=split is not None,
      mode=mode,
    )
    evaluation = functools.partial(_evaluation, options, split, mode)
    args = (params[split], *tokens)
    contests.append(
      Contest(
        split,
        form=functools.partial(chosen_form, options, mode, length, share),
        evaluation=evaluation,
        args=args,
        flops=flops,
        moved=lambda packs, share=share: layer_bytes(
          options, share, share if packs else 1.0, length, mode
        ),
        expected=lambda _, evaluation=evaluation, args=args: jax.jit(
          evaluation("dense")
        )(*args),
      )
    )
  return compare.compile_forms(options, contests)


def _module(
  options: LayerOptions,
  split: HeadBudget | None,
  mode: str = "forward",
  name: str = "dense",
) -> MoHAttention:
  """The benchmarked layer; a split of None leaves out the router."""
  return MoHAttention(
    split or options.budgets()[0],
    RouterConfig("none" if split is None else "two_stage"),
    num_kv_heads=options.num_kv_heads,
    causal="causal" in mode,
    implementation=name,
    dtype=jnp.dtype(options.dtype),
  )


def _random_params(options: LayerOptions, split: HeadBudget | None) -> Any:
  token = jnp.zeros((1, 1, options.features), options.dtype)
  init = jit_once(_module(options, split).init)
  return nn.meta.unbox(init(jax.random.key(1), token)["params"])


def _evaluation(
  options: LayerOptions,
  split: HeadBudget | None,
  mode: str,
  name: str,
) -> Callable:
  """Makes the function (params, x, cotangent) -> (outputs, gradients)."""
  module = _module(options, split, mode, name)

  def layer(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, aux = module.apply({"params": params}, x)
    return out, aux.balance_loss

  def run(params, x, cotangent):
    if "backward" not in mode:
      return layer(params, x)[0], ()
    (out, loss), pull = jax.vjp(layer, params, x)
    return out, pull((cotangent, jnp.full_like(loss, _BALANCE_WEIGHT)))

  return run
