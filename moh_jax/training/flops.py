"""FLOPs of a training step, and the published peaks of devices."""

import dataclasses
import math
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from moh_jax.config import Config, DistillConfig
from moh_jax.models.adapters import Adapters, join
from moh_jax.runtime.parameters import abstract_params, unbox
from moh_jax.training.task import task_builder

_LOOPS = ("while", "pallas_call")
# FLOP/s of dense bfloat16 products with float32 sums, by `device_kind`. GPUs:
# NVIDIA's data sheets, whose figures with sparsity are halved. TPUs: the pages
# of the versions at cloud.google.com/tpu/docs.
_BFLOAT16 = {
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H100 NVL": 835e12,
  "NVIDIA H100 80GB HBM3": 989e12,
  "NVIDIA H200": 989e12,
  "NVIDIA H200 NVL": 835e12,
  "NVIDIA B200": 2250e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
  "NVIDIA A100-PCIE-40GB": 312e12,
  "NVIDIA A100 80GB PCIe": 312e12,
  "NVIDIA GeForce RTX 4090": 165.2e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "TPU7x": 2307e12 / 2,  # JAX counts a chip as two devices
}


def published_peak(kind: str) -> float | None:
  """FLOP/s of bfloat16 products that a device's maker states, None if unknown.

  Args:
    kind: `jax.Device.device_kind`.
  """
  return _BFLOAT16.get(kind)


def step_flops(run: Config) -> float:
  """FLOPs of one training step, by its program and its layers' attention.

  The forward pass counts three times: once itself, twice for its gradients.
  With adapters, matrix products count twice: frozen matrices get no gradient.
  Only active heads are counted, although every form of attention also computes
  the queries and outputs of the others; attention in windows is counted for all
  heads. A teacher adds a forward pass of every head, divided by
  `tune.distill.every`. What is recomputed (`remat`) is not counted. XLA's own
  count would have the body of a scanned stack once.
  """
  # Whatever the form, which may be impossible on the device of this trace.
  model = dataclasses.replace(run.model, attention_impl="auto")
  distill, tune = run.tune.distill, run.tune
  tune = dataclasses.replace(tune, distill=DistillConfig())
  prefers, data = run.prefers, run.data
  if prefers:  # the loss without its reference, which is added below
    data = dataclasses.replace(data, source="chat")
  run = dataclasses.replace(run, model=model, tune=tune, data=data)
  objective = task_builder(run).make_objective(run)
  boxed = abstract_params(objective.model, objective.inputs)
  params, passes = unbox(boxed), 3
  if run.tune.lora.rank:
    adapters = Adapters.of(boxed, run.tune.lora)
    params = join(unbox(adapters.frozen), unbox(adapters.trained))
    passes = 2
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
  whole = products = _products(program.jaxpr)  # of every head; of the active
  attended, attended_whole = 0.0, 0.0
  for group in run.model.layer_groups():
    budget, depth = group.budget, group.depth
    length = getattr(run.data, "sequence_length", group.tokens)
    tokens = examples * length
    idle = tokens * (budget.num_heads - budget.active)
    # Queries and outputs of heads whose result no token uses.
    products -= depth * idle * 4 * group.width * budget.head_dim
    if group.sees != "window":
      # Causal token n of N sees n + 1 keys, (N + 1) / 2 on average. For each
      # the two products, logits and mixed values, take 2 D FLOPs a head.
      seen = (length + 1) / 2 if group.sees == "before" else length
      one = depth * 4 * tokens * seen * budget.head_dim
      attended += budget.active * one
      attended_whole += budget.num_heads * one
  found = passes * products + 3 * attended
  if distill.weight:  # the forward pass of every head
    found += (whole + attended_whole) / distill.every
  if prefers:  # the forward pass without adapters
    found += products + attended
  return found


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
      branches = eqn.params["branches"]
      total += max(_products(branch.jaxpr) for branch in branches)
    elif name not in _LOOPS:
      times = eqn.params["length"] if name == "scan" else 1
      for inner in jax.extend.core.jaxprs_in_params(eqn.params):
        total += times * _products(inner)
  return total
