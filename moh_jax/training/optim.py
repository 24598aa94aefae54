"""Optimizer, its learning-rate schedule, and rates that fall by layer."""

import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from moh_jax.config import OptimConfig, RoutedLayers
from moh_jax.runtime.parameters import is_box

_UPDATE_RMS = 0.2  # of Muon's updates: AdamW's (arXiv:2502.16982, section 2.2)
# Adafactor keeps row and column means of dimensions of this size or more; with
# optax's 128 the kernels of heads of 64 would keep whole second moments.
_LEAST_FACTORED = 32


def make_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
  """Makes the learning-rate schedule: a linear warm-up, then `config.schedule`.

  Args:
    config: section `optim` of the config.
    steps: steps of the run, warm-up included.

  Returns:
    step -> learning rate; step 0 has `warmup_lr` where there is a warm-up.
  """
  warmup, decay = config.warmup(steps), config.decay(steps)
  parts, ends = [optax.constant_schedule(config.lr)], []
  if config.schedule == "cosine":
    # cosine_decay_schedule takes its floor as a fraction of the peak.
    floor = config.final_lr / config.lr if config.lr else 0.0
    length = max(steps - warmup, 1)
    parts = [optax.cosine_decay_schedule(config.lr, length, floor)]
  if warmup:
    ramp = optax.linear_schedule(config.warmup_lr, config.lr, warmup)
    parts, ends = [ramp, *parts], [warmup]
  if decay:
    fall = optax.linear_schedule(config.lr, config.final_lr, decay)
    parts.append(fall)
    ends.append(steps - decay)
  return optax.join_schedules(parts, ends) if ends else parts[0]


def decay_mask(params: Any, no_decay: tuple[str, ...]) -> Any:
  """Marks the parameters that weight decay applies to.

  Args:
    params: parameter tree.
    no_decay: fnmatch patterns of paths without decay. A path is like
      "stage1/blocks/attn/q/bias".

  Returns:
    Tree of bool with the structure of `params`.
  """

  def decays(path, _) -> bool:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return not any(fnmatch.fnmatch(name, pattern) for pattern in no_decay)

  return jax.tree_util.tree_map_with_path(decays, params)


def muon_axes(boxed: Any) -> Any:
  """Marks the matrices that Muon makes orthogonal: those of attention and MLPs.

  These map the width of the model to heads or hidden columns, or back. Layers,
  and queries, keys and values in one kernel, are matrices of their own.
  Embeddings, output layers, routers and modulations are left to AdamW.

  Args:
    boxed: abstract parameters in Linen's boxes of logical axes, see
      `runtime.parameters`.

  Returns:
    Tree with the structure of the unboxed parameters: which dimensions are the
    rows and the columns of a matrix, None where there is none.
  """

  def one(leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
    axes = {name: i for i, name in enumerate(getattr(leaf, "names", ()))}
    for inner in (("heads", "head_dim"), ("mlp",)):
      if axes.keys() >= {"embed", *inner}:
        return optax.contrib.MuonDimensionNumbers(
          (axes["embed"],), tuple(axes[name] for name in inner)
        )
    return None

  return jax.tree.map(one, boxed, is_leaf=is_box)


def make_optimizer(
  config: OptimConfig,
  steps: int,
  boxed: Any = None,
  model: RoutedLayers | None = None,
) -> optax.GradientTransformation:
  """Makes the optimizer; gradients are clipped by their global norm.

  Args:
    config: section `optim` of the config.
    steps: steps of the run.
    boxed: abstract parameters in Linen's boxes of logical axes; "muon" needs
      them.
    model: section of the network; rates that fall by layer need it.
  """
  optimizer = optax.chain(
    _direction(config, boxed),
    optax.add_decayed_weights(
      config.weight_decay, lambda params: decay_mask(params, config.no_decay)
    ),
    optax.scale_by_learning_rate(make_schedule(config, steps)),
  )
  if config.clip_norm:
    clip = optax.clip_by_global_norm(config.clip_norm)
    optimizer = optax.chain(clip, optimizer)
  if config.layer_decay != 1:
    optimizer = decay_by_layer(optimizer, config.layer_decay, model)
  if config.skip_nonfinite:
    optimizer = optax.apply_if_finite(optimizer, config.skip_nonfinite)
  return optimizer


def _direction(config: OptimConfig, boxed: Any) -> optax.GradientTransformation:
  """Gradients to updates, before weight decay and learning rate."""
  b1, b2, dtype = config.b1, config.b2, jnp.dtype(config.moment_dtype)
  if config.name == "lion":
    return optax.scale_by_lion(b1, b2, mu_dtype=dtype)
  if config.name == "muon":
    return optax.contrib.muon(
      -1.0,  # undoes optax's sign; the learning rate comes later
      beta=b1,
      eps=config.eps,
      mu_dtype=dtype,
      adam_b1=b1,
      adam_b2=b2,
      muon_weight_dimension_numbers=muon_axes(boxed),
      consistent_rms=_UPDATE_RMS,
    )
  if config.name == "adafactor":
    second = optax.scale_by_factored_rms(
      min_dim_size_to_factor=_LEAST_FACTORED,
      decay_rate_fn=lambda step, power: jnp.minimum(
        b2, 1.0 - (step + 1.0) ** -power
      ),
    )
    parts = [second, optax.clip_by_block_rms(1.0)]
    if b1:
      parts.append(optax.ema(b1, debias=False, accumulator_dtype=dtype))
    return optax.chain(*parts)
  return optax.scale_by_adam(b1, b2, config.eps, mu_dtype=dtype)


def decay_by_layer(
  optimizer: optax.GradientTransformation, decay: float, model: RoutedLayers
) -> optax.GradientTransformation:
  """Gives layers learning rates that fall from the output to the input.

  As in arXiv:2106.08254: fine-tuning changes the last layers most, and the
  first ones serve any task. The factor is the decay to the power of the layers
  above: 1 for the output, `decay` for the last layer, the least before the
  first one. The state is the optimizer's own, so a run may be continued with
  another decay.

  Args:
    optimizer: gradient transformation whose updates include the learning rate.
    decay: factor from a layer to the one before it, in (0, 1].
    model: section of the network.
  """
  firsts, layers = {}, 0
  for name, group in zip(model.stack_names(), model.layer_groups()):
    firsts[name] = (layers, group.depth)
    layers += group.depth

  def scaled(path: tuple, leaf: jax.Array) -> jax.Array:
    names = [key.key for key in path]
    first, depth = firsts.get(names[0], (layers, 0))
    if names[0] in model.INPUTS:
      depths = 0
    elif any(name.startswith("blocks") for name in names[:2]):
      # Stacked layers: their index is the first axis.
      depths = first + 1 + jnp.arange(depth)
      depths = depths.reshape(depth, *(1,) * (leaf.ndim - 1))
    elif names[0] in firsts:  # beside a stage's layers
      depths = first if "embed" in names[1] else first + depth
    else:
      depths = layers + 1
    return leaf * jnp.float32(decay) ** (layers + 1 - jnp.asarray(depths))

  def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    updates, state = optimizer.update(grads, state, params)
    return jax.tree_util.tree_map_with_path(scaled, updates), state

  return optax.GradientTransformation(optimizer.init, update)
