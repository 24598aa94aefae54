"""Optimizer and learning-rate schedule."""

import fnmatch
from typing import Any

import jax
import optax

from moh_jax.config import OptimConfig


def make_schedule(config: OptimConfig, steps: int) -> optax.Schedule:
  """Makes the learning-rate schedule: linear warm-up, then cosine or constant.

  Args:
    config: section `optim` of the config.
    steps: steps of the run, warm-up included.

  Returns:
    step -> learning rate; step 0 has `warmup_lr` where there is a warm-up.
  """
  warmup = config.warmup(steps)
  if config.schedule == "cosine":
    # cosine_decay_schedule takes its floor as a fraction of the peak.
    floor = config.final_lr / config.lr if config.lr else 0.0
    main = optax.cosine_decay_schedule(
      config.lr, max(steps - warmup, 1), alpha=floor
    )
  else:
    main = optax.constant_schedule(config.lr)
  if not warmup:
    return main
  ramp = optax.linear_schedule(config.warmup_lr, config.lr, warmup)
  return optax.join_schedules([ramp, main], [warmup])


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


def make_optimizer(
  config: OptimConfig, steps: int
) -> optax.GradientTransformation:
  """Makes AdamW (arXiv:1711.05101) with gradients clipped by their global norm.

  Args:
    config: section `optim` of the config.
    steps: steps of the run.
  """
  adamw = optax.adamw(
    make_schedule(config, steps),
    b1=config.b1,
    b2=config.b2,
    eps=config.eps,
    weight_decay=config.weight_decay,
    mask=lambda params: decay_mask(params, config.no_decay),
  )
  if not config.clip_norm:
    return adamw
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
