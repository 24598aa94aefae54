"""Recorded cases of MoH-ViT and TransNeXt."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import ViTConfig
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.convert.vit import attention_rules, model_rules
from moh_jax.layers.aggregated import AggregatedAttention, FullAttention
from moh_jax.models.vit import ViT
from moh_jax.ops.position import RelativeCoordinates, relative_coordinates
from moh_jax.ops.routing import RouterAux
from moh_jax.parity.case import (
  Arrays,
  Case,
  attention_results,
  channels_last,
  load_weights,
  named_grads,
)

_COORDINATE_ATOL = 1e-6


def attention(case: Case, *, pooled: bool) -> dict[str, Any]:
  """Results of one attention module of MoH-ViT, see `attention_results`.

  Args:
    case: the recorded case.
    pooled: whether it is aggregated attention (with pooled keys), or full.
  """
  hyper, arrays = case.hyper, case.arrays
  heads, dim = hyper["num_heads"], hyper["dim"]
  budget = HeadBudget(
    heads, hyper["shared_head"], hyper["routed_head"], dim // heads
  )
  grid = (hyper["H"], hyper["W"])
  if pooled:
    module = AggregatedAttention(
      budget,
      grid=grid,
      pool_grid=(hyper["pool_H"], hyper["pool_W"]),
      window=hyper["window_size"],
      qkv_bias=hyper["qkv_bias"],
    )
    keys = hyper["pool_H"] * hyper["pool_W"]
  else:
    module = FullAttention(budget, qkv_bias=hyper["qkv_bias"])
    keys = math.prod(grid)
  coordinates = RelativeCoordinates(
    arrays["relative_coords_table"],
    arrays["relative_pos_index"].reshape(-1, keys),
  )
  table = attention_rules(
    budget, RouterConfig(), pooled=pooled, qkv_bias=hyper["qkv_bias"]
  )
  return attention_results(case, module, table, coordinates)


def classifier(case: Case, *, moh: bool) -> dict[str, Any]:
  """Results of a whole classifier: stages, logits, gates, losses, gradients.

  Args:
    case: the recorded case.
    moh: whether the network has routers, so gates and balance losses.
  """
  arrays = case.arrays
  config = model_config(case.hyper, moh=moh)
  _check_coordinates(config, arrays)
  model, table = ViT(config), model_rules(config)
  images = channels_last(arrays["images"])
  params = load_weights(model, (images,), table, case.weights)
  # Without labels a case records neither losses nor gradients.
  labels = arrays.get("labels")
  outputs, recorded, grads = jax.jit(
    functools.partial(_forward_backward, model, config)
  )(params, images, labels)
  for index, depth in enumerate(config.depths):
    stage = f"stage{index + 1}"
    (outputs[stage],) = recorded[f"{stage}_out"]
    if moh:
      router = recorded[stage]["blocks"]["attn"]["router"]
      (routing,) = router["routing"]
      for block in range(depth):
        outputs[f"gates_{stage}_block{block}"] = routing.gates[block]

  for prefix, tree in grads.items():
    outputs.update(named_grads(prefix, table, tree))
  return outputs


def _forward_backward(
  model: ViT,
  config: ViTConfig,
  params: Any,
  images: jax.Array,
  labels: jax.Array | None,
) -> tuple[dict[str, Any], Any, dict[str, Any]]:
  """Returns outputs, recorded intermediates, and gradients of both losses.

  Gradients are {"grads": of the cross-entropy, "grad_total": of the total},
  empty where there are no labels.
  """

  def losses(params: Any) -> tuple[jax.Array, Any]:
    (logits, aux), recorded = model.apply(
      {"params": params}, images, mutable=["intermediates"]
    )
    moh_loss = 0.01 * aux.balance_loss
    outputs = {
      "logits": logits,
      "l_aux_mean": aux.balance_loss,
      "moh_loss": moh_loss,
      "l_aux_per_layer": _routed_losses(aux.layers),
    }
    if labels is None:
      return jnp.zeros(2), (outputs, recorded["intermediates"])
    rows = jnp.arange(len(labels))
    cross_entropy = -jax.nn.log_softmax(logits)[rows, labels].mean()
    total = cross_entropy + moh_loss
    outputs |= {"cross_entropy": cross_entropy, "total_loss": total}
    pair = jnp.stack([cross_entropy, total])
    return pair, (outputs, recorded["intermediates"])

  if labels is None:
    _, (outputs, recorded) = losses(params)
    return outputs, recorded, {}
  _, pull, (outputs, recorded) = jax.vjp(losses, params, has_aux=True)
  # One row of the Jacobian per loss: cross-entropy, total.
  rows = {"grads": jnp.array([1.0, 0.0]), "grad_total": jnp.array([0.0, 1.0])}
  return outputs, recorded, {name: pull(row)[0] for name, row in rows.items()}


def model_config(hyper: Mapping[str, Any], *, moh: bool) -> ViTConfig:
  """The config of a recorded network, with routers if `moh`.

  Raises:
    ValueError: its stages differ in the window of their local attention.
  """
  heads = tuple(hyper["num_heads"])
  size = hyper["img_size"]
  windows = {w for w in hyper.get("window_size", [3]) if w}
  if len(windows) > 1:
    raise ValueError(
      f"window_size {sorted(windows)} must be one for all stages"
    )
  return ViTConfig(
    image_size=(size, size),
    channels=hyper.get("in_chans", 3),
    num_classes=hyper["num_classes"],
    patch_stride=hyper["patch_size"],
    embed_dims=tuple(hyper["embed_dims"]),
    depths=tuple(hyper["depths"]),
    num_heads=heads,
    shared_heads=tuple(hyper["shared_head"]) if moh else heads,
    top_k=tuple(hyper["routed_head"]) if moh else (0,) * len(heads),
    mlp_ratios=tuple(hyper["mlp_ratios"]),
    sr_ratios=tuple(hyper["sr_ratios"]),
    window=windows.pop() if windows else 3,
    fixed_pool_size=hyper.get("fixed_pool_size") or 0,
    pretrain_image_size=hyper.get("pretrain_size") or 0,
    router=RouterConfig("two_stage" if moh else "none"),
    qkv_bias=hyper.get("qkv_bias", False),
  )


def _routed_losses(layers: Mapping[str, RouterAux]) -> jax.Array:
  """Balance losses [layers with a router] in the network's order."""
  losses = [aux.balance_loss for aux in layers.values() if aux.routed]
  return jnp.concatenate(losses) if losses else jnp.zeros(0)


def _check_coordinates(config: ViTConfig, arrays: Arrays) -> None:
  """Compares our relative coordinates with the recorded tables, pair by pair.

  Raises:
    ValueError: they differ by more than a rounding.
  """
  for index, shape in enumerate(config.stage_shapes()):
    name = f"relative_coords_table{index + 1}"
    if name not in arrays:
      continue
    ours = relative_coordinates(
      shape.grid, shape.pool_grid or shape.grid, shape.pretrain_grid
    )
    recorded = arrays[name][arrays[f"relative_pos_index{index + 1}"]]
    error = np.abs(ours.table[ours.index].reshape(recorded.shape) - recorded)
    if error.max() > _COORDINATE_ATOL:
      raise ValueError(
        f"{name}: coordinates differ by {error.max():.1e}, at most "
        f"{_COORDINATE_ATOL} allowed"
      )
