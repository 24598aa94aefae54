"""Mixture-of-Head language models (MoH, arXiv:2410.11842) for transformers.

A LLaMA in which each token selects some of a layer's heads. The heads' outputs
are multiplied by gates, 0 for heads that a token did not select. Attention
itself is transformers' attention interface (eager, SDPA, FlashAttention,
FlexAttention or what a server registers), which computes every head.

Shapes: B texts, N tokens, C width, H heads, D width of a head, S shared heads,
R = H - S routed heads.

Needs transformers 5 or later.
"""

import functools

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder

from .configuration_moh import MoHLlamaConfig

# Norms count as equal if they deviate from their mean by less than this factor.
_EQUAL_TO = 1e-6
_TINY = 1e-30


# What a router says of its routed heads: their softmax [B, N, R] float32, and
# [B, N, R] bool, whether a token selected them. None where tokens select none.
Scores = tuple[torch.Tensor, torch.Tensor] | None


class MoHScores(nn.Module):
  """Logits of a softmax by a matrix that stays float32.

  It is no `nn.Linear`: servers replace these by layers of their own, whose
  products and weights have the model's dtype and their own layout.
  """

  def __init__(self, width: int, size: int):
    super().__init__()
    self.weight = nn.Parameter(torch.empty(size, width, dtype=torch.float32))

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """Maps [B, N, C] float32 to [B, N, size] float32."""
    return nn.functional.linear(x, self.weight.float())


class MoHRouter(nn.Module):
  """Weighs the heads of a layer for every token.

  "two_stage" (eq. 5 and 6 of the paper) has up to three matrices: scores of the
  routed heads, scores of the shared heads, and the weights of both groups.
  "query_norm" has none: the heads with the largest queries are selected, and
  gates are 0 or 1 (eq. 9 and 10). Float32 throughout.
  """

  def __init__(self, config: MoHLlamaConfig, layer_idx: int):
    super().__init__()
    self.options = config.router
    heads, shared, selected = config.heads(layer_idx)
    groups, structure = config.num_key_value_heads, self.options["structure"]
    # Heads of what tokens choose among, and parts of each of which they choose
    # as many.
    self.unit = heads // groups if structure == "whole_group" else 1
    self.parts = groups if structure == "per_group" else 1
    step = self.unit * self.parts
    if shared % step or selected % step:
      raise ValueError(
        f"shared_heads={config.shared_heads} and selected_heads="
        f"{config.selected_heads} must be multiples of {step} in layer "
        f"{layer_idx}, whose router.structure is {structure!r}"
      )
    self.num_shared = shared // self.unit
    self.num_selected = selected // self.unit
    self.num_routed = heads // self.unit - self.num_shared
    order = (config.head_order or {layer_idx: None})[layer_idx]
    if order or self.parts > 1:
      order = self._order(list(order or range(heads)), shared)
    self.order = order
    # From the order of sharing to the heads' own.
    self.own = order and sorted(range(heads), key=self.order.__getitem__)
    self.indices = {}  # (device, order) -> tensor
    self.by_norm = self.options["kind"] == "query_norm"
    if self.by_norm:
      return
    routes = self.num_selected > 0
    both = self.options["two_stage"] and routes and self.num_shared
    sizes = {
      "routed": self.num_routed if routes else 0,
      "shared": self.num_shared if self.num_shared > 1 else 0,
      "group": 2 if both else 0,
    }
    for name, size in sizes.items():
      setattr(self, name, MoHScores(config.hidden_size, size) if size else None)

  def forward(
    self, x: torch.Tensor, query: torch.Tensor
  ) -> tuple[torch.Tensor, Scores]:
    """Routes tokens x [B, N, C] with queries [B, N, H, D] before RoPE.

    Returns:
      [B, N, H] float32 weights of the heads in their own order, and `Scores`.
    """
    found = self._by_norm(query) if self.by_norm else self._two_stage(x)
    gates, *scores = found
    gates = gates.repeat_interleave(self.unit, -1)
    if self.order:
      gates = self._reordered(gates, "own")
    return gates, tuple(scores) if self.num_selected else None

  def _order(self, heads: list[int], shared: int) -> list[int]:
    """The shared heads, then the others, both part by part, units together."""
    if self.unit > 1:
      places = {}
      for place, head in enumerate(heads):
        group = head // self.unit
        places[group] = places.get(group, 0) + place
      heads.sort(key=lambda head: (places[head // self.unit], head))
    size, first = len(heads) // self.parts, shared // self.parts
    parts = [[x for x in heads if x // size == i] for i in range(self.parts)]
    lists = [x[:first] for x in parts] + [x[first:] for x in parts]
    return [head for part in lists for head in part]

  def _reordered(self, values: torch.Tensor, order: str) -> torch.Tensor:
    """Heads in the order "order" or "own".

    The indices stay on the device: a copy cannot be part of a CUDA graph.
    """
    key = values.device, order
    if key not in self.indices:
      self.indices[key] = torch.tensor(getattr(self, order), device=key[0])
    return values.index_select(-1, self.indices[key])

  def _two_stage(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.float()
    shared = x.new_ones(*x.shape[:-1], self.num_shared)
    if self.num_shared > 1:
      shared = self.shared(x).softmax(-1)
    scores = probs = x.new_zeros(*x.shape[:-1], self.num_routed)
    if self.num_selected:
      scores = self.routed(x)
      probs = scores.softmax(-1)
    selected = self._selected(scores)
    routed = torch.where(selected, probs, 0.0)
    released = self.options["gate_form"] == "released"
    if released:  # an active head of a uniform router weighs 1
      shared = shared * self.num_shared
      total = routed.sum(-1, keepdim=True)
      total = total.clamp(min=torch.finfo(torch.float32).eps)
      routed = routed / total * selected.sum(-1, keepdim=True)
    if self.num_shared and self.num_selected:
      groups = x.new_full((*x.shape[:-1], 2), 0.5)
      if self.group is not None:
        groups = self.group(x).softmax(-1)
      groups = groups * 2 if released else groups
      shared, routed = shared * groups[..., :1], routed * groups[..., 1:]
    return torch.cat((shared, routed), -1), probs, selected

  def _selected(self, scores: torch.Tensor) -> torch.Tensor:
    """Marks each token's best heads; of equal ones the first, unlike topk."""
    if not self.num_selected:
      return torch.zeros_like(scores, dtype=torch.bool)
    parts = scores.unflatten(-1, (self.parts, -1))
    _, order = parts.sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(order.shape[-1], device=order.device)
    kept = (kept < self.num_selected // self.parts).expand_as(order)
    return torch.zeros_like(kept).scatter(-1, order, kept).view(scores.shape)

  def _by_norm(self, query: torch.Tensor) -> tuple[torch.Tensor, ...]:
    squares = query.float().square().sum(-1)
    norms = squares.clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    if self.order:
      norms = self._reordered(norms, "order")
    if self.unit > 1:
      norms = norms.unflatten(-1, (-1, self.unit)).square().sum(-1).sqrt()
    shared = torch.ones_like(norms[..., : self.num_shared])
    norms = norms[..., self.num_shared :]
    if not self.num_selected:
      return (torch.cat((shared, torch.zeros_like(norms)), -1),)
    if self.num_routed > 1:
      mean = norms.mean(-1, keepdim=True)
      variance = (norms - mean).square().sum(-1, keepdim=True)
      variance = variance / (self.num_routed - 1)
      # Equal norms differ by rounding alone, which must not decide.
      differ = variance > (_EQUAL_TO * mean).square() + _TINY
      scale = torch.where(differ, variance, 1.0).rsqrt()
      norms = torch.where(differ, norms * scale, 0.0)
    probs = norms.softmax(-1)
    selected = self._selected(norms)
    passed = probs - probs.detach()  # 0 with the gradient of the scores
    if self.options["straight_through"] == "selected":
      passed = torch.where(selected, passed, 0.0)
    return torch.cat((shared, selected + passed), -1), probs, selected


def balance_loss(
  layers, router: dict, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
  """Load-balance loss (eq. 7), the mean over the layers that route.

  The sum over routed heads of the share of tokens that select a head times its
  mean score; the "released" form multiplies by the number of routed heads.

  Args:
    layers: `Scores` of every layer that routes.
    router: the config's `router`.
    attention_mask: [B, M] 0 for tokens that do not count; the last N are used.

  Returns:
    [] float32.
  """
  losses = []
  for probs, selected in layers:
    weight = torch.ones_like(probs[..., 0])
    if attention_mask is not None:
      weight = attention_mask[:, -probs.shape[1] :].to(weight)
    weight = weight[..., None] / weight.sum().clamp(min=1)
    frequency = (selected * weight).sum((0, 1))
    loss = (frequency * (probs * weight).sum((0, 1))).sum()
    if router["gate_form"] == "released":
      loss = loss * probs.shape[-1]
    losses.append(loss)
  if not losses:
    return torch.zeros(())
  return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


class MoHAttention(llama.LlamaAttention):
  """Causal attention whose heads are weighed by a router."""

  def __init__(self, config: MoHLlamaConfig, layer_idx: int):
    super().__init__(config, layer_idx)
    heads, kv_heads = config.heads(layer_idx)[0], config.num_key_value_heads
    width, dim = config.hidden_size, self.head_dim
    self.num_key_value_groups = heads // kv_heads
    self.q_proj = nn.Linear(width, heads * dim, bias=config.qkv_bias)
    self.k_proj = nn.Linear(width, kv_heads * dim, bias=config.qkv_bias)
    self.v_proj = nn.Linear(width, kv_heads * dim, bias=config.qkv_bias)
    self.o_proj = nn.Linear(heads * dim, width, bias=config.out_bias)
    self.q_norm = self.k_norm = self.router = None
    if config.qk_norm:
      self.q_norm = llama.LlamaRMSNorm(dim, config.rms_norm_eps)
      self.k_norm = llama.LlamaRMSNorm(dim, config.rms_norm_eps)
    if config.router["kind"] != "none":
      self.router = MoHRouter(config, layer_idx)

  def forward(
    self,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    cache: Cache | None = None,
    past_key_values: Cache | None = None,
    **kwargs,
  ) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Maps [B, N, C] to [B, N, C] and attention weights, if there are any."""
    if cache is None:  # its name before transformers 5.24
      cache = past_key_values
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query = self.q_proj(hidden_states).view(shape)
    key = self.k_proj(hidden_states).view(shape)
    value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    gates = None
    if self.router is not None:
      gates = self.router(hidden_states, query)[0]  # before the norm
    if self.q_norm is not None:
      query, key = self.q_norm(query), self.k_norm(key)
    query, key = llama.apply_rotary_pos_emb(
      query.transpose(1, 2), key.transpose(1, 2), *position_embeddings
    )
    if cache is not None:
      key, value = cache.update(key, value, self.layer_idx)
    attend = llama.eager_attention_forward
    if self.config._attn_implementation != "eager":
      attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    out, weights = attend(
      self,
      query,
      key,
      value,
      attention_mask,
      dropout=self.attention_dropout if self.training else 0.0,
      scaling=self.scaling,
      **kwargs,
    )
    out = out.reshape(shape)
    if gates is not None:
      out = out * gates[..., None].to(out.dtype)
    return self.o_proj(out.flatten(-2)), weights


class MoHDecoderLayer(llama.LlamaDecoderLayer):
  """Attention and gated MLP, each after RMSNorm."""

  def __init__(self, config: MoHLlamaConfig, layer_idx: int):
    super().__init__(config, layer_idx)
    self.self_attn = MoHAttention(config, layer_idx)


class MoHPreTrainedModel(llama.LlamaPreTrainedModel):
  """What the models have in common."""

  config_class = MoHLlamaConfig
  _no_split_modules = ["MoHDecoderLayer"]
  _keep_in_fp32_modules_strict = ["router"]
  _can_record_outputs = {
    "hidden_states": MoHDecoderLayer,
    "attentions": MoHAttention,
    "router_logits": OutputRecorder(MoHRouter, index=1),
  }

  def _init_weights(self, module: nn.Module):
    """Draws the weights of a new module."""
    super()._init_weights(module)
    if isinstance(module, MoHScores):
      nn.init.normal_(module.weight, std=self.config.initializer_range)

  def _set_gradient_checkpointing(
    self, enable=True, gradient_checkpointing_func=None, **kwargs
  ):
    """Recomputes layers, never by reentrant autograd.

    That would record the routers' scores in a pass without gradients, so that
    the balance loss had none.
    """
    again = gradient_checkpointing_func or torch.utils.checkpoint.checkpoint
    again = functools.partial(again, use_reentrant=False)
    super()._set_gradient_checkpointing(enable, again, **kwargs)


class MoHModel(MoHPreTrainedModel, llama.LlamaModel):
  """The network without its output layer.

  `forward` is `LlamaModel`'s. With `output_router_logits=True` the result has
  `router_logits`, the `Scores` of each layer that routes.
  """

  def __init__(self, config: MoHLlamaConfig):
    if config._attn_implementation == "vllm" and config.heads_per_layer:
      raise ValueError(
        f"config.heads_per_layer is {config.heads_per_layer}: without the "
        "plug-in of moh_jax, vLLM serves as many heads in every layer"
      )
    super(llama.LlamaModel, self).__init__(config)  # its own makes other layers
    self.padding_idx = config.pad_token_id
    self.vocab_size = config.vocab_size
    self.embed_tokens = nn.Embedding(
      config.vocab_size, config.hidden_size, self.padding_idx
    )
    self.layers = nn.ModuleList(
      MoHDecoderLayer(config, i) for i in range(config.num_hidden_layers)
    )
    self.norm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    self.rotary_emb = llama.LlamaRotaryEmbedding(config)
    self.gradient_checkpointing = False
    self.post_init()


class MoHLlamaForCausalLM(MoHPreTrainedModel, llama.LlamaForCausalLM):
  """The network with its output layer."""

  def __init__(self, config: MoHLlamaConfig):
    super(llama.LlamaForCausalLM, self).__init__(config)  # as in `MoHModel`
    self.model = MoHModel(config)
    self.vocab_size = config.vocab_size
    self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    self.post_init()

  @can_return_tuple
  def forward(
    self,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    output_router_logits: bool | None = None,
    logits_to_keep: int | torch.Tensor = 0,
    **kwargs,
  ) -> MoeCausalLMOutputWithPast:
    """Predicts the next token at every place.

    Args:
      input_ids: [B, N].
      attention_mask: [B, M] 0 for padding, which the balance loss leaves out.
      labels: [B, N] the tokens themselves, -100 where they do not count.
      output_router_logits: return `aux_loss`, the balance loss, and as
        `router_logits` the scores [B, N, R] of every layer that routes; the
        loss then has `router_aux_loss_coef` times `aux_loss` in it.
      logits_to_keep: the last tokens to predict for, or their places; 0 is all.
      **kwargs: as for `LlamaModel.forward`.
    """
    config = self.config
    if output_router_logits is None:
      output_router_logits = config.output_router_logits
    out = self.model(
      input_ids=input_ids,
      attention_mask=attention_mask,
      output_router_logits=output_router_logits,
      **kwargs,
    )
    kept = logits_to_keep
    if isinstance(kept, int):
      kept = slice(-kept, None)
    logits = self.lm_head(out.last_hidden_state[:, kept])
    loss = aux_loss = scores = None
    if labels is not None:
      loss = self.loss_function(
        logits=logits, labels=labels, vocab_size=config.vocab_size, **kwargs
      )
    if output_router_logits:
      aux_loss = balance_loss(out.router_logits, config.router, attention_mask)
      scores = tuple(probs for probs, _ in out.router_logits)
      if loss is not None:
        weight = config.router_aux_loss_coef
        if (items := kwargs.get("num_items_in_batch")) is not None:
          # `Trainer` adds up the losses of the parts of a batch.
          weight = weight * (labels[:, 1:] != -100).sum() / items
        loss = loss + (weight * aux_loss).to(loss.device)
    # The cache, under its name in this version, and what else was asked for.
    taken = ("last_hidden_state", "router_logits")
    return MoeCausalLMOutputWithPast(
      loss=loss,
      aux_loss=aux_loss,
      logits=logits,
      router_logits=scores,
      **{name: value for name, value in out.items() if name not in taken},
    )


__all__ = ["MoHLlamaForCausalLM", "MoHModel", "MoHPreTrainedModel"]
