"""The programs of a run: initialization, and one step on a global batch."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from moh_jax.config import Config, MeshConfig
from moh_jax.layers.linear import adapter_dropout
from moh_jax.layers.partitioning import constrain
from moh_jax.layers.stack import ModelAux
from moh_jax.models.adapters import Adapters, join
from moh_jax.runtime import parameters
from moh_jax.runtime.mesh import axes_of_entry, replicated, split_by_batch
from moh_jax.training import optim


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything that a step reads and writes, and an exact continuation needs.

  Attributes:
    step: [] int32, number of optimizer steps done.
    params: tree of the parameters that are trained, float32.
    opt_state: state of the optax optimizer.
    ema: averaged parameters, float32, or None.
    rng: [2] uint32, data of the run's random key; a step folds its number in.
  """

  step: jax.Array
  params: Any
  opt_state: optax.OptState
  ema: Any
  rng: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
  """A metric that is a ratio of two sums over the examples of a batch.

  Over the microbatches of a step both sums are added before they are divided,
  so the metric is the whole batch's whatever each microbatch weighs. Where all
  weights are 0 it is NaN, a mean of nothing, and not logged.

  Attributes:
    total: [] weighted sum, 0 where the weight is 0.
    weight: [] sum of the weights.
  """

  total: jax.Array
  weight: jax.Array


# A plain array is a mean over examples of equal weight.
Metrics = dict[str, jax.Array | Mean | tuple[jax.Array, ...]]
# The metric that is no number but the load of every head: for each stack of
# equal layers, in order, [layers, H] share of tokens that use each head.
HEAD_LOADS = "head_loads"
# What a step adds to a batch with "weights" [B, N] of targets: [B] float32, the
# mean of their sum over all of the step's examples.
TARGETS = "targets_per_example"
# (params, batch, rng, [] int32 number of earlier steps) -> ([] loss, metrics).
LossFn = Callable[[Any, Any, jax.Array, jax.Array], tuple[jax.Array, Metrics]]


@dataclasses.dataclass(frozen=True)
class Objective:
  """A network and its training loss, which need no data to be built.

  Attributes:
    model: Linen module of the network.
    inputs: abstract positional arguments of the network, with batch size 1.
    example: abstract training example, without the axis of the batch.
    loss_fn: (params, batch, rng, step) -> (loss, metrics).
    unit: unit of throughput, "images" or "tokens".
    units_per_step: number of units in a global batch.
    by_device: whether the loss may see the examples of one device alone, so
      that gradients are exchanged once a step: it is their mean, draws what is
      random by `layers.partitioning.draw_examples`, and adds up over the batch
      by `sum_examples`.
  """

  model: nn.Module
  inputs: tuple[jax.ShapeDtypeStruct, ...]
  example: Mapping[str, jax.ShapeDtypeStruct]
  loss_fn: LossFn
  unit: str
  units_per_step: int
  by_device: bool = False


def add_balance_loss(
  loss: jax.Array, aux: ModelAux, weight: float, /, **metrics: jax.Array | Mean
) -> tuple[jax.Array, Metrics]:
  """Adds the weighted balance loss to a task's loss: what a `LossFn` returns.

  Args:
    loss: [] loss of the task.
    aux: the routers' side values.
    weight: of the balance loss.
    **metrics: more metrics, or other values for those of this function.

  Returns:
    The sum, and the metrics; both losses are logged apart.
  """
  total, layers = loss + weight * aux.balance_loss, aux.layers
  found = {
    "loss": total,
    "task_loss": loss,
    "balance_loss": aux.balance_loss,
    "activated_share": aux.activated_share,
  }
  layers = list(layers.values() if isinstance(layers, Mapping) else layers)
  if any(layer.routed for layer in layers):
    found[HEAD_LOADS] = tuple(jnp.atleast_2d(layer.load) for layer in layers)
  return total, found | metrics


def train_step(
  state: TrainState,
  batch: Any,
  frozen: Any = None,
  *,
  gradients: Callable[..., tuple[Any, Metrics]],
  optimizer: optax.GradientTransformation,
  schedule: optax.Schedule,
  ema_decay: float = 0.0,
) -> tuple[TrainState, Metrics]:
  """Updates the state with one global batch.

  Args:
    state: state before the step.
    batch: dict of arrays [B, ...]; see `TARGETS`.
    frozen: tree of the parameters that are not trained; None where all are.
    gradients: (params, batch, rng, step, frozen) -> (gradients, metrics), see
      `mean_gradients` and `exchange_once`.
    optimizer: gradient transformation.
    schedule: step -> learning rate, which is logged.
    ema_decay: decay per step of the averaged parameters; 0 leaves them
      unchanged.

  Returns:
    The state after the step, and metrics as float32 scalars, the loads of heads
    as arrays.
  """
  rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
  if "weights" in batch:
    # Before microbatches and devices get their parts: none knows the whole sum.
    mean = batch["weights"].sum() / len(batch["weights"])
    batch = {**batch, TARGETS: jnp.broadcast_to(mean, len(batch["weights"]))}
  grads, metrics = gradients(state.params, batch, rng, state.step, frozen)
  metrics = metric_values(metrics)
  metrics["grad_norm"] = optax.tree.norm(grads)
  skips = isinstance(state.opt_state, optax.ApplyIfFiniteState)
  taken = state.step
  if skips:  # optax counts no step that it skips
    taken -= state.opt_state.total_notfinite
  metrics["lr"] = jnp.asarray(schedule(taken), jnp.float32)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  ema, moves = state.ema, 1.0 - ema_decay
  if skips:
    metrics["skipped"] = opt_state.notfinite_count
    moves = jnp.where(opt_state.notfinite_count > 0, 0.0, moves)
  if ema_decay:
    ema = optax.incremental_update(params, ema, moves)
  new_state = TrainState(state.step + 1, params, opt_state, ema, state.rng)
  return new_state, metrics


def mean_gradients(
  loss_fn: LossFn,
  parts: int,
  params: Any,
  batch: Any,
  rng: jax.Array,
  step: jax.Array,
  frozen: Any,
) -> tuple[Any, Metrics]:
  """Mean gradients over `parts` microbatches, and the metrics of each.

  Args:
    loss_fn: (params, batch, rng, step) -> ([] loss, metrics). The loss must be
      a mean over examples of equal weight, which neither microbatches nor the
      examples' devices change (`layers.partitioning` has what concerns all).
    parts: number of microbatches that the batch is cut into; gradients and
      metrics are those of the whole batch. Only the balance loss, a product of
      means over tokens, is then computed for each microbatch and averaged.
    params: tree of the parameters that are trained.
    batch: tree of arrays [B, ...].
    rng: key of the step.
    step: number of earlier steps, which the loss may need.
    frozen: tree of the others, or None.

  Returns:
    The gradients; and the metrics, of several microbatches with a leading axis
    [parts].
  """

  def gradients(batch: Any, rng: jax.Array) -> tuple[Any, Metrics]:
    def loss(params: Any) -> tuple[jax.Array, Metrics]:
      return loss_fn(join(frozen, params), batch, rng, step)

    return jax.grad(loss, has_aux=True)(params)

  if parts == 1:
    return gradients(batch, rng)

  def split(x: jax.Array) -> jax.Array:
    # Example i goes to microbatch i % parts. So each microbatch is spread over
    # the devices as the batch is, and no example moves to another device.
    x = x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
    return constrain(x, None, "batch", *[None] * (x.ndim - 2))

  def add(total: Any, inputs: Any) -> tuple[Any, Metrics]:
    microbatch, index = inputs
    grads, metrics = gradients(microbatch, jax.random.fold_in(rng, index))
    return jax.tree.map(jnp.add, total, grads), metrics

  inputs = (jax.tree.map(split, batch), jnp.arange(parts))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
  total, metrics = jax.lax.scan(add, zeros, inputs)
  return jax.tree.map(lambda x: x / parts, total), metrics


def metric_values(metrics: Metrics) -> dict[str, Any]:
  """Metrics from one value each or one per microbatch.

  They are scalars [], but for the stacks of `HEAD_LOADS`, [layers, H] each.
  """
  return {name: _value(metric) for name, metric in metrics.items()}


def _value(metric: Any) -> Any:
  if isinstance(metric, Mean):
    return metric.total.sum() / metric.weight.sum()
  if isinstance(metric, tuple):
    # Whole on every device, since every process reads them.
    means = (x.reshape(-1, *x.shape[-2:]).mean(0) for x in metric)
    return tuple(constrain(mean, None, None) for mean in means)
  return metric.mean()


def exchange_once(
  gradients: Callable[..., tuple[Any, Any]],
  params: Any,
  boxed: Any,
  config: MeshConfig,
  mesh: Mesh | AbstractMesh,
  frozen: Any,
) -> Callable[..., tuple[Any, Any]]:
  """Wraps a gradient function so that devices exchange its results at its end.

  The compiler alone would sum the gradients over the devices in every
  microbatch, and the routers' statistics in every layer. So the axes of the
  batch are taken from it (`jax.shard_map`): each device computes the gradients
  of its own examples, adds them up over the microbatches, and only then sends
  them. The axes `tensor` and `sequence` stay with the compiler.

  Args:
    gradients: (params, batch, rng, step, frozen) -> (gradients, metrics), the
      means over the examples of a batch.
    params: abstract parameters with shardings.
    boxed: the same in their boxes of logical axes.
    config: section `mesh`.
    mesh: the devices.
    frozen: the parameters that are not trained, in boxes of logical axes; None
      where all are.

  Returns:
    The same function of global arrays. Gradients are split as the parameters
    are; metrics have a leading axis, of the devices that had other examples.
  """
  sizes = dict(mesh.shape)
  axes = ("data", "fsdp") if config.gather == "step" else ("data",)
  axes = tuple(axis for axis in axes if sizes[axis] > 1)
  if not axes:
    return gradients
  parts = math.prod(sizes[axis] for axis in axes)
  dtype = jnp.dtype(config.exchange)
  split, whole = PartitionSpec(axes), PartitionSpec()
  leaves, tree = jax.tree.flatten(params)
  specs = [leaf.sharding.spec for leaf in leaves]
  boxes = jax.tree.leaves(boxed, is_leaf=parameters.is_box)

  def rounded(box: Any, param: jax.Array) -> jax.Array:
    # As its layer would, so that half is gathered, and that the gradients of a
    # microbatch take half the memory.
    dtype = getattr(box, "dtype", None)
    is_rounded = dtype is not None and param.dtype == jnp.float32
    return param.astype(dtype) if is_rounded else param

  def partial_sums(params: list, *args: Any) -> tuple[list, Any]:
    grads, metrics = gradients(jax.tree.unflatten(tree, params), *args)
    return jax.tree.map(lambda x: x[None], (jax.tree.leaves(grads), metrics))

  def partial_spec(spec: PartitionSpec) -> PartitionSpec:
    entries = (axes_of_entry(entry) for entry in spec)
    kept = (tuple(a for a in entry if a not in axes) for entry in entries)
    return PartitionSpec(axes, *kept)

  def exchange(spec: PartitionSpec, grad: jax.Array) -> jax.Array:
    grad, rest = (grad[0].astype(jnp.float32) / parts).astype(dtype), axes
    for dim, entry in enumerate(spec):
      if "fsdp" in axes and "fsdp" in axes_of_entry(entry):
        how = {"scatter_dimension": dim, "tiled": True}
        grad = jax.lax.psum_scatter(grad, "fsdp", **how)
        rest = tuple(axis for axis in axes if axis != "fsdp")
    grad = jax.lax.psum(grad, rest) if rest else grad
    return grad.astype(jnp.float32)

  # The axes before these have one device. They are put under manual control
  # too, since XLA of jax 0.12 wants those of a nested `shard_map` to follow.
  # With all axes so, kernels need no further one.
  names = list(sizes)
  manual = names[: max(map(names.index, axes)) + 1]
  if all(sizes[axis] == 1 for axis in names if axis not in manual):
    manual = names
  compute = jax.shard_map(
    partial_sums,
    in_specs=(whole, split, whole, whole, whole),
    out_specs=split,
    axis_names=set(manual),
    check_vma=False,
  )
  # Under control of all axes, so that no axis is gathered on the way.
  join = jax.shard_map(
    lambda grads: list(map(exchange, specs, grads)),
    in_specs=([partial_spec(spec) for spec in specs],),
    out_specs=specs,
    check_vma=False,
  )

  def exchanged(params: Any, *args: Any) -> tuple[Any, Any]:
    params = list(map(rounded, boxes, jax.tree.leaves(params)))
    *args, others = args
    others = jax.tree.map(rounded, frozen, others, is_leaf=parameters.is_box)
    grads, metrics = compute(params, *args, others)
    return jax.tree.unflatten(tree, join(grads)), metrics

  return exchanged


@dataclasses.dataclass(frozen=True)
class Program:
  """The jitted functions of a run, and what they take.

  Attributes:
    random: () -> initial parameters of the whole network, to be traced.
    init: (trained parameters, or None for random ones) -> initial state, of
      which each device initialises its part.
    state: abstract, with shardings, to restore a checkpoint into.
    batch: abstract global batch, with shardings.
    step: (state, batch, frozen) -> (state, metrics), donating the state.
    frozen: abstract, with shardings: the parameters that are not trained; None
      where all are.
    adapters: what is trained in their place, or None.
  """

  random: Callable[[], Any]
  init: Callable[..., TrainState]
  state: TrainState
  batch: Any
  step: Callable
  frozen: Any = None
  adapters: Adapters | None = None


def make_program(
  config: Config, objective: Objective, mesh: Mesh | AbstractMesh
) -> Program:
  """Builds the functions of a run; nothing is computed and no data are read.

  Training and `plan` both take their step from here.

  Args:
    config: config of the run.
    objective: its network and loss; a `Task` is one.
    mesh: the devices; they may be absent, or abstract. What is abstract cannot
      be compiled for, but its shardings are known.
  """
  section, steps = config.optim, config.train.steps
  boxed = parameters.abstract_params(objective.model, objective.inputs)
  lora, adapters, frozen = config.tune.lora, None, None
  if lora.rank:
    adapters = Adapters.of(boxed, lora)
    boxed, frozen = (
      adapters.trained,
      parameters.abstract_boxed(adapters.frozen, mesh),
    )
  plain = parameters.unbox(boxed)
  params = parameters.abstract_boxed(boxed, mesh)
  schedule = optim.make_schedule(section, steps)
  optimizer = optim.make_optimizer(section, steps, boxed, config.model)
  opt_state = jax.eval_shape(optimizer.init, plain)
  shardings = _state_shardings(config, params, opt_state, mesh)
  split = split_by_batch(mesh)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (config.data.batch_size, *x.shape), x.dtype, sharding=split
    ),
    objective.example,
  )

  def loss_fn(*args: Any) -> tuple[jax.Array, Metrics]:
    with adapter_dropout(lora.dropout):
      return objective.loss_fn(*args)

  def gradients(*args: Any) -> tuple[Any, Metrics]:
    ours = functools.partial(mean_gradients, loss_fn, section.accumulation)
    if objective.by_device:
      others = adapters and adapters.frozen
      ours = exchange_once(ours, params, boxed, config.mesh, mesh, others)
    return ours(*args)

  step = functools.partial(
    train_step,
    gradients=gradients,
    optimizer=optimizer,
    schedule=schedule,
    ema_decay=section.ema_decay,
  )

  def random() -> Any:
    key = jax.random.fold_in(jax.random.key(config.train.seed), 0)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in objective.inputs]
    return parameters.unbox(parameters.init_params(objective.model, key, zeros))

  def init(params: Any = None) -> TrainState:
    rng = jax.random.key(config.train.seed)
    if params is None:
      params = random()
      if adapters is not None:
        params = adapters.begin(rng, params)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=optimizer.init(params),
      ema=jax.tree.map(jnp.copy, params) if section.ema_decay else None,
      rng=jax.random.key_data(jax.random.fold_in(rng, 1)),
    )

  state = parameters.with_shardings(jax.eval_shape(init), shardings)
  # It runs once, and on CPUs optimizing it takes longer than running it.
  device = mesh.abstract_mesh.abstract_device
  on_cpu = device is not None and device.platform == "cpu"
  options = {"xla_backend_optimization_level": 0} if on_cpu else None
  init = jax.jit(init, out_shardings=shardings, compiler_options=options)
  step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
  return Program(random, init, state, batch, step, frozen, adapters)


def _state_shardings(
  config: Config, params: Any, opt_state: Any, mesh: Mesh | AbstractMesh
) -> TrainState:
  """Shardings of an abstract state, whose parameters have theirs.

  An array of the optimizer at the path of a parameter
  ("mu/blocks0/mlp/up/kernel") is sharded as the parameter if it has its shape,
  and without the missing dimension if it lacks one, as means over rows or
  columns do. Others are replicated.
  """
  whole = replicated(mesh)
  paths = dict(jax.tree_util.tree_flatten_with_path(params)[0])

  def moments(path: tuple, leaf: Any) -> NamedSharding:
    ends = (path[start:] for start in range(len(path)))
    param = next((paths[end] for end in ends if end in paths), None)
    if param is None:
      return whole
    shape, spec = param.shape, tuple(param.sharding.spec)
    if leaf.shape == shape:
      return param.sharding
    spec += (None,) * (len(shape) - len(spec))
    # Of dimensions of one size, the last is the one that Adafactor averages.
    for axis in reversed(range(len(shape))):
      if leaf.shape == shape[:axis] + shape[axis + 1 :]:
        rest = spec[:axis] + spec[axis + 1 :]
        return NamedSharding(param.sharding.mesh, PartitionSpec(*rest))
    return whole

  opt_state = jax.tree_util.tree_map_with_path(moments, opt_state)
  params = jax.tree.map(lambda x: x.sharding, params)
  ema = params if config.optim.ema_decay else None
  return TrainState(whole, params, opt_state, ema, whole)
