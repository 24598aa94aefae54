"""FLOPs of a training step, the forms of its attention, and published peaks."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from moh_jax.config import Config, DistillConfig, LayerGroup
from moh_jax.models.adapters import Adapters, join
from moh_jax.ops.attention import choose_form
from moh_jax.ops.attention_forms import AttentionCase
from moh_jax.ops.head_layout import head_placement
from moh_jax.ops.target import Target, has_cudnn, target
from moh_jax.runtime.sharding import BATCH_AXES, abstract_params, unbox
from moh_jax.training.task import task_builder

_PRODUCTS = ("dot_general", "conv_general_dilated")
_LOOPS = ("while", "pallas_call")
_REMAT = "remat2"  # the primitive of `jax.checkpoint`
# FLOP/s of dense bfloat16 products with float32 sums. GPUs: NVIDIA's data
# sheets, whose figures with sparsity are halved. TPUs: the pages of the
# versions at cloud.google.com/tpu/docs.
_BFLOAT16 = {
  "H100 PCIe": 756e12,
  "H100 NVL": 835e12,
  "H100": 989e12,
  "H200 NVL": 835e12,
  "H200": 989e12,
  "B200": 2250e12,
  "A100": 312e12,
  "RTX 4090": 165.2e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5p": 459e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
  "TPU7x": 2307e12 / 2,  # JAX counts a chip as two devices
}
# What a device's kind says beside that name: the maker, and of GPUs the form
# and the memory. Other words name another device, or a part of one (MIG), and
# so do other memories: an H100 with HBM2e is the PCIe card, an A100 or H100 of
# 64 GB was made for one computer.
_MAKER = re.compile(r"(NVIDIA )?(GeForce )?")
_FORM = re.compile(r"([ -](SXM\d?|PCIe|(40|80|96)GB|HBM3))*", re.IGNORECASE)


def published_peak(kind: str) -> float | None:
  """FLOP/s of bfloat16 products that a device's maker states.

  Args:
    kind: `jax.Device.device_kind`.

  Returns:
    The peak, or None for devices that are not in the table.
  """
  kind = kind[_MAKER.match(kind).end() :]
  for name, peak in _BFLOAT16.items():
    if kind.startswith(name) and _FORM.fullmatch(kind, len(name)):
      return peak
  return None


def attention_flops(
  pairs: int, keys: int, head_dim: int, causal: bool = False
) -> float:
  """FLOPs of the two products of attention, logits and mixed values.

  A (token, head) pair that sees M keys takes 2 M D FLOPs for each product.
  Causal token n of N sees n + 1 keys, (N + 1) / 2 on average. For example,
  1,000 pairs, 512 keys and head dim 64 take 131 MFLOP forward.

  Args:
    pairs: number of active (token, head) pairs.
    keys: keys of a sequence, M.
    head_dim: head dim, D.
    causal: whether later keys are hidden.
  """
  return 4 * pairs * ((keys + 1) / 2 if causal else keys) * head_dim


@dataclasses.dataclass(frozen=True)
class LayerForm:
  """How a layer computes attention.

  Attributes:
    name: of the form, see `ops.attention_forms`, or "window".
    heads: heads that attention computes over all heads.
    keys: keys that it computes over those that tokens see, on average. Blocks
      that are hidden in part count by what is seen.
  """

  name: str
  heads: float = 1.0
  keys: float = 1.0


def attention_form(
  config: Config,
  group: LayerGroup,
  mesh: Sequence[int] = (1, 1),
  device: Target | None = None,
  *,
  examples: int = 1,
  tokens: int | None = None,
) -> LayerForm:
  """The form that a layer has in training.

  Args:
    config: of the run.
    group: the layer's.
    mesh: sizes of the axes tensor and sequence, which split the heads.
    device: which computes its part of the heads, with the libraries that its
      kind can have; None is one like those of this machine.
    examples: that the device computes at a time.
    tokens: of an example; None is the most that the layer takes.

  Raises:
    ValueError: the form that the config asks for is impossible there.
  """
  if group.sees == "window":
    return LayerForm("window")
  model, budget, tokens = config.model, group.budget, tokens or group.tokens
  every = model.router.needs_all_heads or model.router.varies
  every = every or changes_heads(config)
  gathers = group.parts > 1 and not every
  share = 1.0 if every or gathers else budget.share
  heads = group.attended if gathers else budget.num_heads
  devices = math.prod(mesh)
  if (placement := head_placement(group, *mesh)) is None:
    devices = 1
  elif share < 1 and not group.orders:
    share = max(placement.expected_active(budget)) * devices / budget.num_heads
  causal = group.sees == "before"
  case = AttentionCase(
    target=device or target(),
    batch=examples,
    queries=tokens,
    keys=tokens,
    num_heads=heads // devices,
    group=heads // (group.kv_heads or heads),
    head_dim=budget.head_dim,
    share=share,
    causal=causal,
    masked=causal,  # texts are packed, in training
    biased=model.POSITION_BIAS,
    dtype=model.dtype,
    has_cudnn=device is not None or has_cudnn(),
  )
  form = choose_form(model.attention_impl, case)
  hidden = causal and form.name == "dense"
  return LayerForm(
    form.name,
    (share if form.packs else 1.0) * heads / budget.num_heads,
    2 * tokens / (tokens + 1) if hidden else 1.0,
  )


def changes_heads(config: Config) -> bool:
  """Whether the number of active heads changes in a run, down to its own."""
  return bool(config.tune.top_k_steps)


def step_forms(
  config: Config, sizes: Mapping[str, int], device: Target | None = None
) -> tuple[LayerForm, ...]:
  """The form of each group of equal layers in a training step.

  Args:
    config: of the run.
    sizes: of the mesh's axes; those that are left out are 1.
    device: as in `attention_form`.
  """
  shards = math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)
  examples = config.data.batch_size // (shards * config.optim.accumulation)
  return tuple(
    attention_form(
      config,
      group,
      [sizes.get(axis, 1) for axis in ("tensor", "sequence")],
      device,
      examples=max(1, examples),
      tokens=getattr(config.data, "sequence_length", None),
    )
    for group in config.model.layer_groups()
  )


def form_summary(
  config: Config, forms: Sequence[LayerForm]
) -> tuple[str, float]:
  """Names of a run's forms, and the share of all heads that they compute.

  Args:
    config: of the run.
    forms: of its groups of layers.
  """
  groups = config.model.layer_groups()
  heads = [group.depth * group.budget.num_heads for group in groups]
  computed = sum(n * form.heads for n, form in zip(heads, forms))
  names = dict.fromkeys(form.name for form in forms)
  return ", ".join(names), computed / sum(heads)


@dataclasses.dataclass(frozen=True)
class StepFlops:
  """FLOPs of one training step: three times those of the forward pass.

  Products are twice where adapters are trained, their own too: frozen matrices
  get no gradient. A teacher is a forward pass in some of the steps. Matrix
  products and convolutions are counted, nothing that is computed again.

  Attributes:
    active: for the active heads alone, without the queries and outputs of other
      heads, which every form computes all the same. The attention of windows is
      counted for all heads.
    every_head: as if all heads were active, as in multi-head attention; the
      routers' own products are in it.
    attention: the parts of `every_head` that are attention to all tokens, one
      for each group of equal layers.
    in_remat: forward products but those of attention, for all heads, of the
      layers that `model.remat` may compute again.
  """

  active: float
  every_head: float
  attention: tuple[float, ...]
  in_remat: float

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


def step_flops(run: Config) -> StepFlops:
  """FLOPs of one training step, by its program and its layers' attention."""
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
  every_head = passes * _products(program.jaxpr)
  active, attending, attention = every_head, 0.0, []
  for group in run.model.layer_groups():
    budget = group.budget
    length = getattr(run.data, "sequence_length", group.tokens)
    tokens, depth = examples * length, group.depth
    idle = tokens * (budget.num_heads - budget.active)
    # Queries and outputs of heads whose result no token uses.
    active -= passes * depth * idle * 4 * group.width * budget.head_dim
    one = 0.0
    if group.sees != "window":
      causal = group.sees == "before"
      one = depth * attention_flops(tokens, length, budget.head_dim, causal)
    attending += 3 * budget.active * one
    attention.append(3 * budget.num_heads * one)
  parts = (active, attending), (every_head, sum(attention))
  active, whole = map(sum, parts)
  forward = [products / passes + attended / 3 for products, attended in parts]
  if distill.weight:  # the forward pass of every head
    active, whole = (x + forward[1] / distill.every for x in (active, whole))
  if prefers:  # the forward pass without adapters
    active, whole = active + forward[0], whole + forward[1]
  in_remat = _products(program.jaxpr, _REMAT)
  return StepFlops(active, whole, tuple(attention), in_remat)


def _products(jaxpr: Any, inside: str = "") -> float:
  """FLOPs of the products of a program, 2 for each multiplication.

  Args:
    jaxpr: the program.
    inside: name of a primitive, to count what is inside it alone.
  """
  total = 0.0
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if inside and name in _PRODUCTS:
      continue
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
      total += max(_products(branch.jaxpr, inside) for branch in branches)
    elif name not in _LOOPS:
      times = eqn.params["length"] if name == "scan" else 1
      for inner in jax.extend.core.jaxprs_in_params(eqn.params):
        total += times * _products(inner, "" if name == inside else inside)
  return total
