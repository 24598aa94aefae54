"""Sums and means of per-example metrics over a whole split."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

# (params, batch) -> {name: [] float32 sum over the batch's examples}, with the
# number of "examples"; padded examples (mask 0) count nothing.
EvalStep = Callable[[Any, Any], dict[str, jax.Array]]


def batch_sums(mask: jax.Array, **values: jax.Array) -> dict[str, jax.Array]:
  """Sums over one batch, as an `EvalStep` gives them.

  Args:
    mask: [B] float32, 0 for padded examples.
    **values: by name, [B] metric of each example, or [] their mean.

  Returns:
    "examples" and the sums of `values`.
  """
  sums = {name: (value * mask).sum() for name, value in values.items()}
  return {"examples": mask.sum(), **sums}


def mean_metrics(
  eval_step: EvalStep, params: Any, batches: Iterable[Any]
) -> dict[str, float]:
  """Means over a split: `sum_metrics` over the number of examples."""
  total = sum_metrics(eval_step, params, batches)
  examples = int(total.pop("examples"))
  means = {name: value / examples for name, value in total.items()}
  return {**means, "examples": examples}


def sum_metrics(
  eval_step: EvalStep, params: Any, batches: Iterable[Any]
) -> dict[str, float]:
  """Sums over a split.

  Args:
    eval_step: sums over one batch, jitted.
    params: the parameters.
    batches: global batches with "mask", on the devices.

  Returns:
    The sum of every metric, the number of "examples" among them.

  Raises:
    ValueError: there is no batch.
  """
  sums: list[dict[str, jax.Array]] = []
  for batch in batches:
    sums.append(eval_step(params, batch))
    # Two batches in flight: the device is busy, its memory not full of them.
    jax.block_until_ready(sums[-2:][0])
  if not sums:
    raise ValueError("the split to evaluate is empty")
  host = jax.device_get(sums)  # at once, not one scalar after the other
  return {name: sum(float(s[name]) for s in host) for name in host[0]}
