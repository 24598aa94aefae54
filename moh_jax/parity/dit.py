"""Recorded cases of MoH-DiT and DiT."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import DiTConfig
from moh_jax.config.heads import RouterConfig
from moh_jax.convert.dit import model_rules
from moh_jax.convert.rules import mix_rules, projection_rules, router_rules
from moh_jax.diffusion.guidance import LabelledPredict, Predict, guide
from moh_jax.layers.moh import MoHAttention
from moh_jax.models.dit import DiT
from moh_jax.parity.case import (
  Arrays,
  Case,
  attention_results,
  channels_first,
  channels_last,
  head_budget,
  load_weights,
  routed_losses,
)

_GUIDED = 3  # the release applies guidance to the first three channels only


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
  hyper, arrays = case.hyper, case.arrays
  config = model_config(hyper)
  model = DiT(config)
  params = load_network(config, case.weights)
  x = channels_last(arrays["x"])

  @jax.jit
  def run(params, x, t, y):
    return model.apply({"params": params}, x, t, y, mutable=["intermediates"])

  (out, aux), recorded = run(params, x, arrays["t"], arrays["y"])
  recorded = recorded["intermediates"]
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

  def predict(x, t, labels):
    return model.apply({"params": params}, x, t, labels)[0]

  doubled = guided_twice(predict, arrays["y_cfg"], hyper["cfg_scale"])
  outputs["out_cfg"] = channels_first(jax.jit(doubled)(x, arrays["t"]))
  return outputs


def guided_twice(
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


def load_network(config: DiTConfig, weights: Arrays) -> Any:
  """Parameters of `DiT(config)` from the recorded weights."""
  number = jax.ShapeDtypeStruct((1,), jnp.int32)
  x = jax.ShapeDtypeStruct((1, *config.input_shape), jnp.float32)
  inputs = (x, number, number)
  return load_weights(DiT(config), inputs, model_rules(config), weights)


def model_config(hyper: Mapping[str, Any]) -> DiTConfig:
  """The config of a recorded network; only MoH's name their shared heads.

  Raises:
    ValueError: its layers differ in their head width.
  """
  heads = tuple(hyper["heads_per_block"])
  widths = set(hyper["head_dim_per_block"])
  if len(widths) > 1:
    raise ValueError(f"head_dim_per_block {sorted(widths)} must be one width")
  size = hyper["input_size"]
  return DiTConfig(
    input_size=(size, size),
    channels=hyper["in_channels"],
    num_classes=hyper["num_classes"],
    patch_size=hyper["patch_size"],
    width=hyper["hidden_size"],
    num_heads=heads,
    head_dim=widths.pop(),
    shared_heads=tuple(hyper.get("shared_head", heads)),
    top_k=tuple(hyper.get("routed_head", (0,) * len(heads))),
    mlp_ratio=hyper["mlp_ratio"],
    label_dropout=hyper["class_dropout_prob"],
    learn_sigma=hyper["learn_sigma"],
    router=RouterConfig("two_stage" if "shared_head" in hyper else "none"),
  )
