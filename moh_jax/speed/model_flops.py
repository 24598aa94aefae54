"""FLOPs of a model's training step, counted from its program's products."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from moh_jax.config import Config
from moh_jax.runtime.params import abstract_params, unbox
from moh_jax.speed.attention import attention_flops
from moh_jax.speed.model_forms import LayerForm
from moh_jax.speed.peaks import published_peak
from moh_jax.training.task import task_builder

_LOOPS = ("while", "pallas_call")


@dataclasses.dataclass(frozen=True)
class StepFlops:
  """FLOPs of one training step: three times those of the forward pass.

  Matrix products and convolutions are counted, nothing that is computed again.

  Attributes:
    active: for the active heads alone, neither the queries and outputs of other
      heads. The attention of windows is counted for all heads.
    every_head: as if all heads were active, as in multi-head attention; the
      routers' own products are in it.
    attention: the parts of `every_head` that are attention to all tokens, one
      for each group of equal layers.
  """

  active: float
  every_head: float
  attention: tuple[float, ...]

  def computed(self, forms: Sequence[LayerForm]) -> dict[str, float]:
    """What layers compute that have these forms of attention.

    Returns:
      {"products": all products but those of attention, for all heads whatever
      tokens chose, "attention": attention to all tokens}.
    """
    parts = zip(self.attention, forms)
    return {
      "products": self.every_head - sum(self.attention),
      "attention": sum(flops * x.heads * x.keys for flops, x in parts),
    }


def at_peak(run: Config) -> dict[str, float]:
  """Seconds of a step at the published bfloat16 peak of one device.

  Divided by the seconds of the run's step and the number of devices, they are
  "mfu", which counts active heads only, and "mfu_every_head", the usual formula
  of multi-head attention.

  Args:
    run: the run.

  Returns:
    Empty where the peak is not known, as for CPUs.
  """
  peak = published_peak(jax.devices()[0].device_kind)
  if peak is None:
    return {}
  flops = step_flops(run)
  return {
    "mfu": flops.active / peak,
    "mfu_every_head": flops.every_head / peak,
  }


def train_flops(run: Config) -> float:
  """`StepFlops.active` of a run."""
  return step_flops(run).active


def step_flops(run: Config) -> StepFlops:
  """FLOPs of one training step, by its program and its layers' attention."""
  objective = task_builder(run).make_objective(run)
  params = unbox(abstract_params(objective.model, objective.inputs))
  examples = run.data.batch_size
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((examples, *x.shape), x.dtype),
    objective.example,
  )
  # No platform holds the logits of this one at once, so attention to all tokens
  # is in loops, which are not counted below.
  nowhere = jax.sharding.AbstractDevice(
    device_kind="none", num_cores=None, platform="none"
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=nowhere)
  with jax.sharding.use_abstract_mesh(mesh):
    program = jax.make_jaxpr(lambda *args: objective.loss_fn(*args)[0])(
      params,
      batch,
      jax.eval_shape(lambda: jax.random.key(0)),
      jax.ShapeDtypeStruct((), jnp.int32),
    )
  every_head = active = _products(program.jaxpr)
  attention = []
  for group in run.model.layer_groups():
    budget = group.budget
    length = getattr(run.data, "sequence_length", group.tokens)
    tokens, depth = examples * length, group.depth
    idle = tokens * (budget.num_heads - budget.active)
    # Queries and outputs of heads whose result no token uses.
    active -= depth * idle * 4 * group.width * budget.head_dim
    one = 0.0
    if group.sees != "window":
      mode = "causal" if group.sees == "before" else "forward"
      one = depth * attention_flops(tokens, length, budget.head_dim, mode)
    active += budget.active * one
    attention.append(3 * budget.num_heads * one)
  whole = 3 * every_head + sum(attention)
  return StepFlops(3 * active, whole, tuple(attention))


def _products(jaxpr: Any) -> float:
  """FLOPs of the products of a program, 2 for each multiplication."""
  total = 0.0
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
      total += 2 * math.prod(out) * math.prod(left[i] for i in contracted)
    elif name == "conv_general_dilated":
      kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
      features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
      total += 2 * math.prod(out) * math.prod(kernel) / features
    elif name == "cond":
      total += max(_products(branch.jaxpr) for branch in eqn.params["branches"])
    elif name not in _LOOPS:
      times = eqn.params["length"] if name == "scan" else 1
      for inner in jax.extend.core.jaxprs_in_params(eqn.params):
        total += times * _products(inner)
  return total
