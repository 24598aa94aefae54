"""Configuration of Mixture-of-Head language models (arXiv:2410.11842)."""

from transformers.models.llama.configuration_llama import LlamaConfig


class MoHLlamaConfig(LlamaConfig):
  """A LLaMA whose tokens choose among the attention heads of a layer.

  Keys beside those of `LlamaConfig`, all of which keep their meaning:

    router: {"kind": "two_stage", "query_norm" or "none",
      "gate_form": "released" or "paper",
      "two_stage": whether the weights of the two groups of heads are learned,
      "straight_through": "selected" or "all",
      "structure": "free", "per_group" (as many heads of each key/value group)
      or "whole_group" (key/value groups with all of their heads)}.
    shared_heads: for each layer the number of heads that are always on.
    selected_heads: for each layer the number of the other heads that each
      token selects; positive numbers may be lowered after training (by
      structure: to multiples of the number of groups, or of their heads).
    heads_per_layer: for each layer its number of heads; None is
      `num_attention_heads` in each.
    head_order: for each layer its heads in the order in which the first are
      shared ("per_group": the first of each group; "whole_group": the first
      groups, by the mean place of their heads); None is their own order.
    qkv_bias: biases of the query, key and value projections.
    out_bias: bias of the attention's output projection.
    qk_norm: RMSNorm over `head_dim` of queries and keys, before RoPE.
    output_router_logits: return the routers' scores and the balance loss.
    router_aux_loss_coef: weight of the balance loss in the loss.

  Raises ValueError unless there is one number for every layer.
  """

  model_type = "moh_llama"
  keys_to_ignore_at_inference = ("cache", "past_key_values", "router_logits")
  # A head's weight comes from a softmax over all heads of its layer, so heads
  # cannot be split over devices without a sum of their own.
  base_model_tp_plan = None

  def __init__(
    self,
    router=None,
    shared_heads=None,
    selected_heads=None,
    heads_per_layer=None,
    head_order=None,
    qkv_bias=False,
    out_bias=False,
    qk_norm=False,
    output_router_logits=False,
    router_aux_loss_coef=0.01,
    **kwargs,
  ):
    self.router = {
      "kind": "none",
      "gate_form": "released",
      "two_stage": True,
      "straight_through": "selected",
      "structure": "free",
      **(router or {}),
    }
    self.shared_heads = shared_heads
    self.selected_heads = selected_heads
    self.heads_per_layer = heads_per_layer
    self.head_order = head_order
    self.qkv_bias = qkv_bias
    self.out_bias = out_bias
    self.qk_norm = qk_norm
    self.output_router_logits = output_router_logits
    self.router_aux_loss_coef = router_aux_loss_coef
    super().__init__(**kwargs)
    for name in ("shared_heads", "selected_heads", "heads_per_layer"):
      values, layers = getattr(self, name), self.num_hidden_layers
      if values is not None and len(values) != layers:
        raise ValueError(f"{name}={values} must have {layers} values")

  def validate_architecture(self):
    """The width of a head is `head_dim`, whatever the width of the model."""

  def heads(self, layer_idx):
    """Heads of a layer: all, shared, and selected by each token."""
    layers = self.num_hidden_layers
    total = (self.heads_per_layer or [self.num_attention_heads] * layers)[
      layer_idx
    ]
    if self.router["kind"] == "none":
      return total, total, 0
    return total, self.shared_heads[layer_idx], self.selected_heads[layer_idx]


__all__ = ["MoHLlamaConfig"]
