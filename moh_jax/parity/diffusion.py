"""Recorded diffusion: tables, losses, gradients and samplers on an MoH-DiT."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.convert.dit import model_rules
from moh_jax.diffusion.objective import training_losses
from moh_jax.diffusion.prediction import reverse_step
from moh_jax.diffusion.process import (
  Process,
  make_process,
  q_sample,
  respace,
  spaced_timesteps,
)
from moh_jax.diffusion.samplers import sample
from moh_jax.models.dit import DiT
from moh_jax.parity.case import (
  Arrays,
  Case,
  channels_first,
  channels_last,
  named_grads,
)
from moh_jax.parity.dit import guided_twice, load_network, model_config

# Recorded table -> attribute of our `Process`.
_TABLES = {
  "betas": "betas",
  "alphas_cumprod": "alphas_cumprod",
  "posterior_variance": "posterior_variance",
  "posterior_log_variance_clipped": "posterior_log_variance",
  "posterior_mean_coef1": "posterior_mean_x0",
  "posterior_mean_coef2": "posterior_mean_xt",
}
# (parameters, x, t, labels) -> output of the network.
_Predict = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
_MAP = "timestep_map_"  # followed by the spacing, "_" for ","


def diffusion(case: Case) -> dict[str, Any]:
  """Results of a diffusion case: tables, losses, gradients and samples.

  The names of the case's timestep maps say which respacings it recorded.
  """
  arrays = case.arrays
  config = model_config(case.hyper)
  params = load_network(config, case.weights)
  process = make_process("linear", case.hyper["diffusion_steps"])
  x0, noise = (channels_last(arrays[name]) for name in ("x_start", "noise"))
  t = jnp.asarray(arrays["t"])
  x = q_sample(process, x0, t, noise)

  def predict(params, x, t, labels):
    return DiT(config).apply({"params": params}, x, t, labels)[0]

  def objective(params):
    out = predict(params, x, t, arrays["y"])
    losses = training_losses(
      process, "epsilon", out, x0=x0, x=x, t=t, noise=noise
    )
    return (losses["weighted_mse"] + losses["vb"]).mean(), losses

  grads, losses = jax.jit(jax.grad(objective, has_aux=True))(params)
  return {
    **_tables(process, arrays),
    "x_t": channels_first(x),
    "mse": losses["mse"],
    "vb": losses["vb"],
    "loss": losses["mse"] + losses["vb"],
    **named_grads("grads", model_rules(config), grads),
    **_reverse(predict, params, respace(process, 50), arrays),
    **_samples(predict, params, process, case),
  }


def _tables(process: Process, arrays: Arrays) -> dict[str, Any]:
  spaced = respace(process, 50)
  out = {}
  for name, attribute in _TABLES.items():
    out[name] = getattr(process, attribute)
    out[f"spaced50_{name}"] = getattr(spaced, attribute)
  for name in arrays:
    if name.startswith(_MAP):
      spacing = name.removeprefix(_MAP).replace("_", ",")
      out[name] = spaced_timesteps(process.num_steps, spacing)
  return out


def _reverse(
  predict: _Predict, params: Any, process: Process, arrays: Arrays
) -> dict[str, Any]:
  x, t = channels_last(arrays["pmv_x"]), jnp.asarray(arrays["pmv_t"])

  @jax.jit
  def run(params):
    # A respaced process counts its own steps; the network knows the original.
    original = jnp.asarray(process.timesteps)[t]
    out = predict(params, x, original, arrays["pmv_y"])
    return [
      reverse_step(process, "epsilon", out, x, t, clip=clip)
      for clip in (False, True)
    ]

  plain, clipped = run(params)
  out = {
    "pmv_mean": plain.mean,
    "pmv_log_variance": plain.log_variance,
    "pmv_variance": jnp.exp(plain.log_variance),
    "pmv_pred_xstart": plain.x0,
    "pmv_clipped_mean": clipped.mean,
    "pmv_clipped_pred_xstart": clipped.x0,
  }
  return {name: channels_first(array) for name, array in out.items()}


def _samples(
  predict: _Predict, params: Any, process: Process, case: Case
) -> dict[str, Any]:
  arrays = case.arrays
  z = channels_last(arrays["z"])
  noises = channels_last(arrays["ddpm10_noises"])

  @jax.jit
  def run(params):
    guided = guided_twice(
      functools.partial(predict, params),
      arrays["sample_y"],
      case.hyper["cfg_scale"],
    )
    path = sample(
      guided,
      z,
      respace(process, len(noises)),
      method="ddpm",
      noise=lambda step: noises[step],
      trajectory=True,
    )
    ddim, clipped = (
      sample(guided, z, respace(process, 50), method="ddim", clip=clip)
      for clip in (False, True)
    )
    return path, ddim, clipped

  path, ddim, clipped = (channels_first(x) for x in run(params))
  return {
    "ddpm10_trajectory": path,
    "ddpm10_sample": path[-1],
    "ddim50_sample": ddim,
    "ddim50_sample_clipped": clipped,
  }
