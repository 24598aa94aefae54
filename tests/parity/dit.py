"""Recorded cases of MoH-DiT and DiT, and of diffusion with them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import DiffusionConfig, DiTConfig
from moh_jax.config.heads import RouterConfig
from moh_jax.convert.dit import model_rules
from moh_jax.convert.rules import mix_rules, projection_rules, router_rules
from moh_jax.layers.moh import MoHAttention
from moh_jax.models.diffusion import (
  Process,
  make_process,
  q_sample,
  respace,
  reverse_step,
  spaced_timesteps,
  training_losses,
)
from moh_jax.models.dit import DiT
from moh_jax.models.samplers import LabelledPredict, Predict, guide, sample
from tests.parity.case import (
  Case,
  apply,
  attention_results,
  channels_first,
  head_budget,
  named_grads,
  routed_losses,
)

_GUIDED = 3  # the release applies guidance to the first three channels only
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
# (x, t, labels, parameters) -> output of the network.
_Predict = Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]


def attention(case: Case) -> dict[str, Any]:
  """Results of one attention module of MoH-DiT, see `attention_results`."""
  budget = head_budget(case.hyper)
  heads, dim = budget.num_heads, budget.head_dim
  table = [
    *projection_rules("qkv", "qkv", 3, heads, dim, case.hyper["qkv_bias"]),
    *mix_rules("proj", "out", heads, dim),
    *router_rules(budget, RouterConfig()),
  ]
  return attention_results(case, MoHAttention(budget), table)


def network(case: Case) -> dict[str, Any]:
  """Results of a whole network, from its tokens to its guided output."""
  arrays = case.arrays
  config, params, predict = _load(case)
  x, t = case.images("x"), arrays["t"]
  run = jax.jit(functools.partial(apply, DiT(config)))
  (out, aux), recorded = run(params, x, t, arrays["y"])
  outputs = {
    "tokens": recorded["tokens"][0],
    "c": recorded["conditioning"][0],
    "out": channels_first(out),
    "l_aux_mean": aux.balance_loss,
    "l_aux_per_layer": routed_losses(aux.layers),
  }
  blocks, gates = [], []
  for index in range(len(config.layer_groups())):
    group = recorded[f"blocks{index}"]
    blocks += [*group["out"][0]]
    if config.router.kind != "none":
      gates += [*group["attn"]["router"]["routing"][0].gates]
  outputs |= {f"block{layer}": x for layer, x in enumerate(blocks)}
  outputs |= {f"gates{layer}": x for layer, x in enumerate(gates)}

  labelled = functools.partial(predict, params=params)
  doubled = _guided_twice(labelled, arrays["y_cfg"], case.hyper["cfg_scale"])
  outputs["out_cfg"] = channels_first(jax.jit(doubled)(x, t))
  return outputs


def diffusion(case: Case) -> dict[str, Any]:
  """Results of a diffusion case: tables, losses, gradients and samples.

  The names of the case's timestep maps say which respacings it recorded.
  """
  arrays = case.arrays
  config, params, predict = _load(case)
  process = make_process("linear", case.hyper["diffusion_steps"])
  x0, noise = case.images("x_start"), case.images("noise")
  t = jnp.asarray(arrays["t"])
  x = q_sample(process, x0, t, noise)

  def objective(params):
    out = predict(x, t, arrays["y"], params)
    losses = training_losses(process, DiffusionConfig(), out, x0, x, t, noise)
    return losses["loss"].mean(), losses

  grads, losses = jax.jit(jax.grad(objective, has_aux=True))(params)
  return {
    **_tables(process, arrays),
    "x_t": channels_first(x),
    "mse": losses["mse"],
    "vb": losses["vb"],
    "loss": losses["loss"],
    **named_grads("grads", model_rules(config), grads),
    **_reverse(predict, params, respace(process, 50), case),
    **_samples(predict, params, process, case),
  }


def _tables(process: Process, names: Mapping[str, Any]) -> dict[str, Any]:
  spaced = respace(process, 50)
  out = {}
  for name, attribute in _TABLES.items():
    out[name] = getattr(process, attribute)
    out[f"spaced50_{name}"] = getattr(spaced, attribute)
  for name in names:
    if name.startswith(_MAP):
      spacing = name.removeprefix(_MAP).replace("_", ",")
      out[name] = spaced_timesteps(len(process.timesteps), spacing)
  return out


def _reverse(
  predict: _Predict, params: Any, process: Process, case: Case
) -> dict[str, Any]:
  x, t = case.images("pmv_x"), jnp.asarray(case.arrays["pmv_t"])

  @jax.jit
  def run(params):
    # A respaced process counts its own steps; the network knows the original.
    original = jnp.asarray(process.timesteps)[t]
    out = predict(x, original, case.arrays["pmv_y"], params)
    return [
      reverse_step(process, "epsilon", out, x, t, clip=clip)
      for clip in (False, True)
    ]

  plain, clipped = jax.tree.map(channels_first, run(params))
  return {
    "pmv_mean": plain.mean,
    "pmv_log_variance": plain.log_variance,
    "pmv_variance": jnp.exp(plain.log_variance),
    "pmv_pred_xstart": plain.x0,
    "pmv_clipped_mean": clipped.mean,
    "pmv_clipped_pred_xstart": clipped.x0,
  }


def _samples(
  predict: _Predict, params: Any, process: Process, case: Case
) -> dict[str, Any]:
  z, noises = case.images("z"), case.images("ddpm10_noises")

  @jax.jit
  def run(params):
    labelled = functools.partial(predict, params=params)
    scale, labels = case.hyper["cfg_scale"], case.arrays["sample_y"]
    guided = _guided_twice(labelled, labels, scale)
    steps, draw = respace(process, len(noises)), lambda step: noises[step]
    path = sample(guided, z, steps, method="ddpm", noise=draw, trajectory=True)
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


def _guided_twice(
  predict: LabelledPredict, labels: np.ndarray, scale: float
) -> Predict:
  """Classifier-free guidance as the release evaluates it, on a doubled batch.

  Args:
    predict: the network.
    labels: [2n], the labels of n examples, then n times the label "none".
    scale: guidance scale.

  Returns:
    A function (x [2n, ...], t [2n]) -> output [2n, ...]. Both halves read the
    first half of x; in the channels without guidance the second half keeps the
    unconditional output.
  """
  labels, no_label = np.split(labels, 2)

  def call(x: jax.Array, t: jax.Array) -> jax.Array:
    def at_all_times(x, _, labels):
      return predict(x, t, labels)  # the two halves have their own timesteps

    x = x[: len(labels)]
    guided = guide(at_all_times, labels, int(no_label[0]), scale=scale)
    first = guided(x, t[: len(labels)])
    rest = predict(x, t[len(labels) :], no_label)[..., _GUIDED:]
    second = jnp.concatenate([first[..., :_GUIDED], rest], axis=-1)
    return jnp.concatenate([first, second])

  return call


def _load(case: Case) -> tuple[DiTConfig, Any, _Predict]:
  """Config and parameters of the recorded network, and its output.

  Only configs of MoH name their shared heads.
  """
  hyper = case.hyper
  heads = tuple(hyper["heads_per_block"])
  (width,) = set(hyper["head_dim_per_block"])
  size = hyper["input_size"]
  same = ("num_classes", "patch_size", "mlp_ratio", "learn_sigma")
  config = DiTConfig(
    **{name: hyper[name] for name in same}, input_size=(size, size),
    channels=hyper["in_channels"], width=hyper["hidden_size"],
    label_dropout=hyper["class_dropout_prob"], num_heads=heads, head_dim=width,
    shared_heads=tuple(hyper.get("shared_head", heads)),
    top_k=tuple(hyper.get("routed_head", (0,) * len(heads))),
    router=RouterConfig("two_stage" if "shared_head" in hyper else "none"),
  )  # fmt: skip
  model, number = DiT(config), jax.ShapeDtypeStruct((1,), jnp.int32)
  x = jax.ShapeDtypeStruct((1, *config.input_shape), jnp.float32)
  params = case.load(model, model_rules(config), x, number, number)

  def predict(x, t, labels, params):
    return model.apply({"params": params}, x, t, labels)[0]

  return config, params, predict
