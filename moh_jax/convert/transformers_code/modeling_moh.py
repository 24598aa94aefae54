"""Mixture-of-Head language models (MoH, arXiv:2410.11842) for transformers.

A LLaMA in which each token selects some of a layer's heads. The heads' outputs
are multiplied by gates, 0 for heads that a token did not select. Attention
itself is transformers' attention interface (eager, SDPA, FlashAttention,
FlexAttention or what a server registers), which computes every head.

Shapes: B texts, N tokens, C width, H heads, D width of a head, S shared heads,
R = H - S routed heads.

Needs transformers 4.53 or later.
"""

import inspect

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import (
  MoeCausalLMOutputWithPast,
  MoeModelOutputWithPast,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama.modeling_llama import (
  LlamaMLP,
  LlamaRMSNorm,
  LlamaRotaryEmbedding,
  apply_rotary_pos_emb,
  eager_attention_forward,
)
from transformers.utils import can_return_tuple

from .configuration_moh import MoHLlamaConfig
from .router_moh import MoHRouter, MoHScores, Routing, balance_loss

_MASK_ARGUMENTS = frozenset(inspect.signature(create_causal_mask).parameters)


class MoHAttention(nn.Module):
  """Causal attention whose heads are weighed by a router."""

  is_causal = True

  def __init__(self, config: MoHLlamaConfig, layer_idx: int):
    super().__init__()
    self.config = config
    self.layer_idx = layer_idx
    self.head_dim = config.head_dim
    heads = config.heads(layer_idx)[0]
    self.num_key_value_groups = heads // config.num_key_value_heads
    self.scaling = self.head_dim**-0.5
    self.attention_dropout = config.attention_dropout

    def projection(count: int) -> nn.Linear:
      return nn.Linear(
        config.hidden_size, count * self.head_dim, bias=config.qkv_bias
      )

    self.q_proj = projection(heads)
    self.k_proj = projection(config.num_key_value_heads)
    self.v_proj = projection(config.num_key_value_heads)
    self.o_proj = nn.Linear(
      heads * self.head_dim, config.hidden_size, bias=config.out_bias
    )
    self.q_norm = self.k_norm = None
    if config.qk_norm:
      self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps)
      self.k_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps)
    self.router = None
    if config.router["kind"] != "none":
      self.router = MoHRouter(config, layer_idx)

  def forward(
    self,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: Cache | None = None,
    cache_position: torch.Tensor | None = None,
    **kwargs,
  ) -> tuple[torch.Tensor, torch.Tensor | None, Routing | None]:
    """Maps [B, N, C] to [B, N, C], attention weights, and routing, if any."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query = self.q_proj(hidden_states).view(shape)
    key = self.k_proj(hidden_states).view(shape)
    value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
    routing = None
    if self.router is not None:
      routing = self.router(hidden_states, query)  # before the norm

    if self.q_norm is not None:
      query, key = self.q_norm(query), self.k_norm(key)
    cos, sin = position_embeddings
    query, key = apply_rotary_pos_emb(
      query.transpose(1, 2), key.transpose(1, 2), cos, sin
    )
    if past_key_values is not None:
      where = {"sin": sin, "cos": cos, "cache_position": cache_position}
      key, value = past_key_values.update(key, value, self.layer_idx, where)
    attend = eager_attention_forward
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
    if routing is not None:
      out = out * routing.gates[..., None].to(out.dtype)
    return self.o_proj(out.flatten(-2)), weights, routing


class MoHDecoderLayer(nn.Module):
  """Attention and gated MLP, each after RMSNorm."""

  def __init__(self, config: MoHLlamaConfig, layer_idx: int):
    super().__init__()
    self.self_attn = MoHAttention(config, layer_idx)
    self.mlp = LlamaMLP(config)
    self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    self.post_attention_layernorm = LlamaRMSNorm(
      config.hidden_size, config.rms_norm_eps
    )

  def forward(
    self, hidden_states: torch.Tensor, record: bool = False, **kwargs
  ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """Maps [B, N, C] to [B, N, C].

    Args:
      hidden_states: [B, N, C].
      record: return a tuple with the attention's weights and the routing's
        `probs` and `selected` too, each None if there is none. A tuple of
        tensors passes through gradient checkpointing and wrappers of layers.
      **kwargs: for the attention.
    """
    normed = self.input_layernorm(hidden_states)
    out, weights, routing = self.self_attn(normed, **kwargs)
    hidden_states = hidden_states + out
    normed = self.post_attention_layernorm(hidden_states)
    hidden_states = hidden_states + self.mlp(normed)
    if not record:
      return hidden_states
    if routing is None or not self.self_attn.router.num_selected:
      return hidden_states, weights, None, None
    return hidden_states, weights, routing.probs, routing.selected


class MoHPreTrainedModel(PreTrainedModel):
  """What the models have in common."""

  config_class = MoHLlamaConfig
  base_model_prefix = "model"
  supports_gradient_checkpointing = True
  _no_split_modules = ["MoHDecoderLayer"]
  _skip_keys_device_placement = ["past_key_values"]
  _supports_flash_attn = True
  _supports_sdpa = True
  _supports_flex_attn = True
  _supports_attention_backend = True

  def post_init(self):
    """Keeps the matrices of routers, where there are any, in float32."""
    # Versions before 5 refuse names that no parameter has.
    if any(".router." in name for name, _ in self.named_parameters()):
      self._keep_in_fp32_modules_strict = ["router"]
    super().post_init()

  def _init_weights(self, module: nn.Module):
    """Draws the weights of a new module."""
    super()._init_weights(module)
    if isinstance(module, MoHScores):
      nn.init.normal_(module.weight, std=self.config.initializer_range)


class MoHModel(MoHPreTrainedModel):
  """The network without its output layer."""

  def __init__(self, config: MoHLlamaConfig):
    if config._attn_implementation == "vllm" and config.heads_per_layer:
      raise ValueError(
        f"config.heads_per_layer is {config.heads_per_layer}: vLLM serves "
        "models with as many heads in every layer, transformers this one too"
      )
    super().__init__(config)
    self.padding_idx = config.pad_token_id
    self.vocab_size = config.vocab_size
    self.embed_tokens = nn.Embedding(
      config.vocab_size, config.hidden_size, self.padding_idx
    )
    self.layers = nn.ModuleList(
      MoHDecoderLayer(config, i) for i in range(config.num_hidden_layers)
    )
    self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    self.rotary_emb = LlamaRotaryEmbedding(config)
    self.gradient_checkpointing = False
    self.post_init()

  @can_return_tuple
  def forward(
    self,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Cache | None = None,
    inputs_embeds: torch.Tensor | None = None,
    use_cache: bool | None = None,
    cache_position: torch.Tensor | None = None,
    output_hidden_states: bool | None = None,
    output_attentions: bool | None = None,
    output_router_logits: bool | None = None,
    **kwargs,
  ) -> MoeModelOutputWithPast:
    """Maps tokens to what the output layer reads.

    Args:
      input_ids: [B, N] tokens, or `inputs_embeds` [B, N, C].
      attention_mask: [B, M] 0 for padding; M counts cached tokens too.
      position_ids: [B, N].
      past_key_values: cache of the tokens before.
      inputs_embeds: see `input_ids`.
      use_cache: return a cache; None is as the config says.
      cache_position: [N] places of the tokens in the cache.
      output_hidden_states: return the input of every layer and the result.
      output_attentions: return attention weights ("eager" alone has them).
      output_router_logits: return `router_logits`, for each layer that routes
        the pair of its router's `probs` and `selected`, see `Routing`.
      **kwargs: go to the attention function.
    """
    config = self.config
    if (input_ids is None) == (inputs_embeds is None):
      raise ValueError("give one of input_ids and inputs_embeds")
    if inputs_embeds is None:
      inputs_embeds = self.embed_tokens(input_ids)
    use_cache = config.use_cache if use_cache is None else use_cache
    recompute = self.gradient_checkpointing and self.training
    if recompute:
      use_cache = False
    if use_cache and past_key_values is None:
      past_key_values = DynamicCache(config=config)
    if cache_position is None:
      seen = 0 if past_key_values is None else past_key_values.get_seq_length()
      cache_position = seen + torch.arange(
        inputs_embeds.shape[1], device=inputs_embeds.device
      )
    if position_ids is None:
      position_ids = cache_position[None]
    x = inputs_embeds
    mask = {
      "config": config,
      "inputs_embeds": x,
      "input_embeds": x,  # its name before version 5
      "attention_mask": attention_mask,
      "cache_position": cache_position,
      "past_key_values": past_key_values,
      "position_ids": position_ids,
    }
    mask = {n: value for n, value in mask.items() if n in _MASK_ARGUMENTS}
    record = bool(output_attentions or output_router_logits)
    shared = {
      **kwargs,
      "record": record,
      "attention_mask": create_causal_mask(**mask),
      "position_ids": position_ids,
      "position_embeddings": self.rotary_emb(x, position_ids),
      "past_key_values": past_key_values,
      "cache_position": cache_position,
    }

    states, attentions, routings = [], [], []
    for layer in self.layers:
      states += [x] if output_hidden_states else []
      if recompute:
        run = lambda y, layer=layer: layer(y, **shared)  # noqa: E731
        x = self._gradient_checkpointing_func(run, x)
      else:
        x = layer(x, **shared)
      if record:
        x, weights, *routing = x
        attentions.append(weights)
        routings += [tuple(routing)] if routing[0] is not None else []
    x = self.norm(x)
    return MoeModelOutputWithPast(
      last_hidden_state=x,
      past_key_values=past_key_values if use_cache else None,
      hidden_states=(*states, x) if output_hidden_states else None,
      attentions=tuple(attentions) if output_attentions else None,
      router_logits=tuple(routings) if output_router_logits else None,
    )


class MoHLlamaForCausalLM(MoHPreTrainedModel, GenerationMixin):
  """The network with its output layer."""

  _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

  def __init__(self, config: MoHLlamaConfig):
    super().__init__(config)
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
      **kwargs: as for `MoHModel.forward`.
    """
    config = self.config
    if output_router_logits is None:
      output_router_logits = config.output_router_logits
    out = self.model(
      input_ids=input_ids,
      attention_mask=attention_mask,
      output_router_logits=output_router_logits,
      return_dict=True,
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
    return MoeCausalLMOutputWithPast(
      loss=loss,
      aux_loss=aux_loss,
      logits=logits,
      past_key_values=out.past_key_values,
      hidden_states=out.hidden_states,
      attentions=out.attentions,
      router_logits=scores,
    )


__all__ = ["MoHLlamaForCausalLM", "MoHModel", "MoHPreTrainedModel"]
