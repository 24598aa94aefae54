"""Recorded cases of MoH-ViT and TransNeXt."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import optax

from moh_jax.config import ViTConfig
from moh_jax.config.heads import RouterConfig
from moh_jax.convert.vit import attention_rules, model_rules
from moh_jax.layers.aggregated import AggregatedAttention, FullAttention
from moh_jax.models.vit import ViT
from moh_jax.ops.position import RelativeCoordinates
from tests.parity.case import (
  Case,
  apply,
  attention_results,
  head_budget,
  named_grads,
  routed_losses,
)


def attention(case: Case) -> dict[str, Any]:
  """Results of one attention module of MoH-ViT, see `attention_results`.

  It is aggregated attention where the case has a pooled grid, else full.
  """
  hyper, arrays = case.hyper, case.arrays
  budget, qkv_bias = head_budget(hyper), hyper["qkv_bias"]
  pooled = "pool_H" in hyper
  if pooled:
    module = AggregatedAttention(
      budget,
      grid=(hyper["H"], hyper["W"]),
      pool_grid=(hyper["pool_H"], hyper["pool_W"]),
      window=hyper["window_size"],
      qkv_bias=qkv_bias,
    )
  else:
    module = FullAttention(budget, qkv_bias=qkv_bias)
  coordinates = RelativeCoordinates(
    arrays["relative_coords_table"],
    arrays["relative_pos_index"].reshape(hyper["H"] * hyper["W"], -1),
  )
  table = attention_rules(
    budget, RouterConfig(), pooled=pooled, qkv_bias=qkv_bias
  )
  return attention_results(case, module, table, coordinates)


def classifier(case: Case) -> dict[str, Any]:
  """Results of a whole classifier: stages, logits, gates, losses, gradients."""
  config = _model_config(case.hyper)
  model, table = ViT(config), model_rules(config)
  images = case.images("images")
  params = case.load(model, table, images)
  # Without labels a case records neither losses nor gradients.
  outputs, recorded, grads = jax.jit(
    functools.partial(_forward_backward, model)
  )(params, images, case.arrays.get("labels"))
  for index, depth in enumerate(config.depths):
    stage = f"stage{index + 1}"
    (outputs[stage],) = recorded[f"{stage}_out"]
    if config.router.kind != "none":
      (routing,) = recorded[stage]["blocks"]["attn"]["router"]["routing"]
      for block in range(depth):
        outputs[f"gates_{stage}_block{block}"] = routing.gates[block]
  for prefix, tree in grads.items():
    outputs |= named_grads(prefix, table, tree)
  return outputs


def _forward_backward(
  model: ViT, params: Any, images: jax.Array, labels: jax.Array | None
) -> tuple[dict[str, Any], Any, dict[str, Any]]:
  """Returns outputs, recorded intermediates, and gradients of both losses.

  Gradients are {"grads": of the cross-entropy, "grad_total": of the total},
  empty where there are no labels.
  """

  def losses(params: Any) -> tuple[dict[str, jax.Array], Any]:
    (logits, aux), recorded = apply(model, params, images)
    outputs = {
      "logits": logits,
      "l_aux_mean": aux.balance_loss,
      "moh_loss": 0.01 * aux.balance_loss,
      "l_aux_per_layer": routed_losses(aux.layers),
    }
    if labels is None:
      return {}, (outputs, recorded)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(
      logits, labels
    ).mean()
    total = cross_entropy + outputs["moh_loss"]
    outputs |= {"cross_entropy": cross_entropy, "total_loss": total}
    return {"grads": cross_entropy, "grad_total": total}, (outputs, recorded)

  if labels is None:
    return (*losses(params)[1], {})
  grads, (outputs, recorded) = jax.jacrev(losses, has_aux=True)(params)
  return outputs, recorded, grads


def _model_config(hyper: Mapping[str, Any]) -> ViTConfig:
  """The config of a recorded network; only MoH's name their shared heads."""
  heads = tuple(hyper["num_heads"])
  size = hyper["img_size"]
  (window,) = {w for w in hyper.get("window_size", [3]) if w} or {3}
  lists = ("embed_dims", "depths", "mlp_ratios", "sr_ratios")
  return ViTConfig(
    image_size=(size, size), channels=hyper.get("in_chans", 3),
    num_classes=hyper["num_classes"], patch_stride=hyper["patch_size"],
    **{name: tuple(hyper[name]) for name in lists}, num_heads=heads,
    shared_heads=tuple(hyper.get("shared_head", heads)),
    top_k=tuple(hyper.get("routed_head", (0,) * len(heads))), window=window,
    fixed_pool_size=hyper.get("fixed_pool_size") or 0,
    pretrain_image_size=hyper.get("pretrain_size") or 0,
    router=RouterConfig("two_stage" if "shared_head" in hyper else "none"),
    qkv_bias=hyper.get("qkv_bias", False),
  )  # fmt: skip
