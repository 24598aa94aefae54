"""Recorded diffusion: tables, losses, gradients and samplers on an MoH-DiT."""

from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.config import DiTConfig
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
_MAP = "timestep_map_"  # followed by the spacing, "_" for ","


def diffusion(case: Case) -> dict[str, Any]:
  """Results of a diffusion case: tables, losses, gradients and samples.

  The names of the case's timestep maps say which respacings it recorded.
  """
  hyper, arrays, weights = case.hyper, case.arrays, case.weights
  config = model_config(hyper)
  process = make_process("linear", hyper["diffusion_steps"])
  params = load_network(config, weights)
  x0 = channels_last(arrays["x_start"])
  noise = channels_last(arrays["noise"])
  x = q_sample(process, x0, arrays["t"], noise)
  losses, grads = _losses(config, params, process, arrays, x0, x, noise)
  return {
    **_tables(process, arrays),
    "x_t": channels_first(x),
    "mse": losses["mse"],
    "vb": losses["vb"],
    "loss": losses["mse"] + losses["vb"],
    **named_grads("grads", model_rules(config), grads),
    **_reverse(config, params, respace(process, 50), arrays),
    **_samples(config, params, process, arrays, hyper["cfg_scale"]),
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


def _losses(
  config: DiTConfig,
  params: Any,
  process: Process,
  arrays: Arrays,
  x0: jax.Array,
  x: jax.Array,
  noise: jax.Array,
) -> tuple[dict[str, jax.Array], Any]:
  """The losses of every example, and the gradients of their mean."""
  t = jnp.asarray(arrays["t"])

  def objective(params: Any) -> tuple[jax.Array, Any]:
    out, _ = DiT(config).apply({"params": params}, x, t, arrays["y"])
    losses = training_losses(
      process, "epsilon", out, x0=x0, x=x, t=t, noise=noise
    )
    return (losses["weighted_mse"] + losses["vb"]).mean(), losses

  grads, losses = jax.jit(jax.grad(objective, has_aux=True))(params)
  return losses, grads


def _reverse(
  config: DiTConfig, params: Any, process: Process, arrays: Arrays
) -> dict[str, Any]:
  x, t = channels_last(arrays["pmv_x"]), jnp.asarray(arrays["pmv_t"])

  @jax.jit
  def run(params):
    # A respaced process counts its own steps; the network knows the original.
    original = jnp.asarray(process.timesteps)[t]
    out, _ = DiT(config).apply({"params": params}, x, original, arrays["pmv_y"])
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
  config: DiTConfig,
  params: Any,
  process: Process,
  arrays: Arrays,
  cfg_scale: float,
) -> dict[str, Any]:
  z = channels_last(arrays["z"])
  noises = channels_last(arrays["ddpm10_noises"])

  @jax.jit
  def run(params):
    def predict(x, t, labels):
      return DiT(config).apply({"params": params}, x, t, labels)[0]

    guided = guided_twice(predict, arrays["sample_y"], cfg_scale)
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
