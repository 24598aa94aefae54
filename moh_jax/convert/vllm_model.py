"""Mixture-of-Head language models of vLLM's own layers.

A LLaMA of vLLM, so with its adapters, quantization and pipelines, in which a
router weighs the heads. With tensor parallelism a device has some of a layer's
heads, and routes over the scores of all: they are small.

Where a token uses as many heads of each key/value group
(`router.structure="per_group"`), j of G, their queries become the only ones of
vLLM's attention, on j / G of its work; else it computes every head.

Shapes: N tokens, C width, H heads and K key/value heads of a device, G = H / K,
D head dim.
"""

import functools
from typing import Any

import torch
from torch import nn
from vllm import distributed
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
  QKVParallelLinear,
  RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models import llama
from vllm.model_executor.models.utils import extract_layer_index

from moh_jax.convert.transformers_code.modeling_moh import MoHRouter


class MoHAttention(nn.Module):
  """Causal attention whose heads are weighed by a router.

  Made by `LlamaDecoderLayer`, whose other arguments the config has as well.
  Raises ValueError where the devices do not divide the heads.
  """

  def __init__(
    self,
    config: Any,
    max_position_embeddings: int,
    quant_config: Any,
    cache_config: Any,
    prefix: str,
    **_,
  ):
    super().__init__()
    layer, width = extract_layer_index(prefix), config.hidden_size
    heads, shared, selected = config.heads(layer)
    groups, self.head_dim = config.num_key_value_heads, config.head_dim
    devices = distributed.get_tensor_model_parallel_world_size()
    if heads % devices:
      raise ValueError(
        f"tensor_parallel_size={devices} must divide the {heads} heads of "
        f"layer {layer}"
      )
    self.num_heads = heads // devices
    self.num_groups = max(1, groups // devices)
    self.first = distributed.get_tensor_model_parallel_rank() * self.num_heads
    self.gathers = devices > 1
    self.qkv_proj = QKVParallelLinear(
      width,
      self.head_dim,
      heads,
      groups,
      bias=config.qkv_bias,
      quant_config=quant_config,
      prefix=f"{prefix}.qkv_proj",
    )
    self.o_proj = RowParallelLinear(
      heads * self.head_dim,
      width,
      bias=config.out_bias,
      quant_config=quant_config,
      prefix=f"{prefix}.o_proj",
    )
    self.rotary_emb = get_rope(
      self.head_dim,
      max_position_embeddings,
      rope_parameters=config.rope_parameters,
    )
    self.q_norm = self.k_norm = self.router = None
    if config.qk_norm:
      self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
      self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
    if config.router["kind"] != "none":
      self.router = MoHRouter(config, layer)
    self.num_picked, router = self.num_heads, config.router
    if router["structure"] == "per_group":
      if groups % devices == 0:  # else devices share groups
        self.num_picked = (shared + selected) // devices
    self.attn = Attention(
      self.num_picked,
      self.head_dim,
      self.head_dim**-0.5,
      num_kv_heads=self.num_groups,
      cache_config=cache_config,
      quant_config=quant_config,
      prefix=f"{prefix}.attn",
    )

  def forward(
    self, positions: torch.Tensor, hidden_states: torch.Tensor
  ) -> torch.Tensor:
    """Maps positions [N] and [N, C] to [N, C]."""
    qkv, _ = self.qkv_proj(hidden_states)
    dim, groups = self.head_dim, self.num_groups
    qkv = qkv.view(-1, self.num_heads + 2 * groups, dim)
    q, k, v = qkv.split([self.num_heads, groups, groups], dim=1)
    if self.router is not None:
      gates = self._gates(hidden_states, q)
    picks = self.num_picked < self.num_heads
    if picks:
      gates, heads = self._pick(gates)
      tokens = torch.arange(len(heads), device=heads.device)[:, None]
      rows = (tokens * qkv.shape[1] + heads).flatten()
      q = qkv.flatten(0, 1).index_select(0, rows).unflatten(0, heads.shape)
    if self.q_norm is not None:
      q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
    q, k = self.rotary_emb(positions, q.flatten(1), k.flatten(1))
    out = self.attn(q, k, v.flatten(1)).view(-1, self.num_picked, dim)
    if self.router is not None:
      out = out * gates[..., None].to(out.dtype)
    if picks:
      rows = (tokens * self.num_heads + heads).flatten()
      every = out.new_zeros(len(heads) * self.num_heads, dim)
      out = every.index_copy_(0, rows, out.flatten(0, 1))
    out, _ = self.o_proj(out.view(-1, self.num_heads * dim))
    return out

  def _gates(self, x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Maps x [N, C] and q [N, H, D] to the heads' weights [N, H] float32."""
    if self.router.by_norm and self.gathers:
      norms = q.float().norm(dim=-1, keepdim=True)  # all that is asked of them
      q = distributed.tensor_model_parallel_all_gather(norms, -2)
    gates, _ = self.router(x, q)
    return gates.narrow(-1, self.first, self.num_heads)

  def _pick(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Picks as many heads of each group that no token uses more.

    Args:
      gates: [N, H], 0 for heads that a token does not use, which the largest
        therefore have.

    Returns:
      Gates and indices of the picked heads, [N, P] both.
    """
    gates = gates.unflatten(-1, (self.num_groups, -1))
    found, heads = gates.topk(self.num_picked // self.num_groups)  # [N, K, j]
    first = torch.arange(self.num_groups, device=heads.device)[:, None]
    heads = heads + first * gates.shape[-1]
    return found.flatten(1), heads.flatten(1)


class MoHLlamaForCausalLM(llama.LlamaForCausalLM):
  """A LLaMA of such attention.

  Raises ValueError where texts may become longer than vLLM's RoPE.
  """

  def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
    config = vllm_config.model_config.hf_config
    rope = config.rope_parameters
    length = vllm_config.model_config.max_model_len
    if rope["rope_type"] == "yarn":
      most = int(rope["original_max_position_embeddings"] * rope["factor"])
      if length > most:  # vLLM would read beyond its table of angles
        raise ValueError(
          f"max_model_len={length} must be at most {most} (yarn)"
        )
    layer = functools.partial(
      llama.LlamaDecoderLayer, attn_layer_type=MoHAttention
    )
    super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=layer)
