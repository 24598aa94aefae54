"""Recorded cases of MoH-DiT and DiT."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import DiTConfig
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.convert import rules
from moh_jax.convert.dit import model_rules
from moh_jax.convert.layers import mix_rules, projection_rules, router_rules
from moh_jax.diffusion.guidance import LabelledPredict, Predict, guide
from moh_jax.layers.moh import MoHAttention
from moh_jax.models.dit import DiT
from moh_jax.parity.attention import attention_results
from moh_jax.parity.case import Arrays, Case
from moh_jax.parity.layout import channels_first, channels_last
from moh_jax.runtime.params import abstract_params, unbox

_GUIDED = 3  # channels that the release guides


def attention(case: Case) -> dict[str, Any]:
  """One attention module: outputs and gradients of sum(y * r) + l_aux."""
  hyper = case.hyper
  heads = hyper["num_heads"]
  head_dim = hyper.get("head_dim") or hyper["dim"] // heads
  budget = HeadBudget(
    heads, hyper["shared_head"], hyper["routed_head"], head_dim
  )
  qkv_bias = hyper.get("qkv_bias", True)
  module = MoHAttention(budget)
  table = [
    *projection_rules("qkv", "qkv", 3, heads, head_dim, qkv_bias),
    *mix_rules("proj", "out", heads, head_dim),
    *router_rules(budget, RouterConfig()),
  ]
  return attention_results(module, table, case.arrays, case.weights)


def network(case: Case, *, moh: bool) -> dict[str, Any]:
  """A whole network: tokens, blocks, output, gates, losses, guidance."""
  hyper, arrays, weights = case.hyper, case.arrays, case.weights
  config = model_config(hyper, moh=moh)
  model = DiT(config)
  params = load_network(config, weights)
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
  }
  layer, losses = 0, []
  for index, group in enumerate(config.layer_groups()):
    name = f"blocks{index}"
    (blocks,) = recorded[name]["out"]
    for i in range(group.depth):
      outputs[f"block{layer}"] = blocks[i]
      if moh:
        (routing,) = recorded[name]["attn"]["router"]["routing"]
        outputs[f"gates{layer}"] = routing.gates[i]
        if aux.layers[name].routed:
          losses.append(aux.layers[name].balance_loss[i])
      layer += 1
  outputs["l_aux_per_layer"] = np.stack(losses) if losses else np.zeros(0)

  def predict(x, t, labels):
    return model.apply({"params": params}, x, t, labels)[0]

  doubled = guided_twice(predict, arrays["y_cfg"], hyper["cfg_scale"])
  outputs["out_cfg"] = channels_first(jax.jit(doubled)(x, arrays["t"]))
  return outputs


def guided_twice(
  predict: LabelledPredict, labels: np.ndarray, scale: float
) -> Predict:
  """Guidance as the release evaluates it, on a batch that is there twice.

  Args:
    predict: the network.
    labels: [2n], those of n examples and then as often "no label".
    scale: of the guidance.

  Returns:
    (x [2n, ...], t [2n]) -> output; both halves read the first half of x, and
    the second keeps its own output in the channels that are not guided.
  """
  labels, nothing = np.split(labels, 2)

  def call(x: jax.Array, t: jax.Array) -> jax.Array:
    def own_times(x: jax.Array, _: jax.Array, labels: jax.Array) -> jax.Array:
      return predict(x, t, labels)  # each half has timesteps of its own

    x = x[: len(labels)]
    guided = guide(own_times, labels, int(nothing[0]), scale=scale)
    first = guided(x, t[: len(labels)])
    rest = predict(x, t[len(labels) :], nothing)[..., _GUIDED:]
    second = jnp.concatenate([first[..., :_GUIDED], rest], axis=-1)
    return jnp.concatenate([first, second])

  return call


def load_network(config: DiTConfig, weights: Arrays) -> Any:
  """Our parameters from the recorded weights."""
  rows, columns, channels = config.input_shape
  inputs = (
    jax.ShapeDtypeStruct((1, rows, columns, channels), jnp.float32),
    jax.ShapeDtypeStruct((1,), jnp.int32),
    jax.ShapeDtypeStruct((1,), jnp.int32),
  )
  abstract = unbox(abstract_params(DiT(config), inputs))
  return rules.load_params(
    model_rules(config), weights, abstract, source="weights"
  )


def model_config(hyper: Mapping[str, Any], *, moh: bool) -> DiTConfig:
  """The config of a recorded network."""
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
    shared_heads=tuple(hyper["shared_head"]) if moh else heads,
    top_k=tuple(hyper["routed_head"]) if moh else (0,) * len(heads),
    mlp_ratio=hyper["mlp_ratio"],
    label_dropout=hyper["class_dropout_prob"],
    learn_sigma=hyper["learn_sigma"],
    router=RouterConfig("two_stage" if moh else "none"),
  )
