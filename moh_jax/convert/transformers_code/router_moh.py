"""Routers of Mixture-of-Head models (arXiv:2410.11842): who attends, how much.

Shapes: B texts, N tokens, C width, H heads, D width of a head, S shared heads,
R = H - S routed heads.
"""

import dataclasses

import torch
from torch import nn

from .configuration_moh import MoHLlamaConfig

# Norms count as equal if they deviate from their mean by less than this factor.
_EQUAL_TO = 1e-6
_TINY = 1e-30


@dataclasses.dataclass
class Routing:
  """A router's decisions.

  Attributes:
    gates: [B, N, H] float32 weights of the heads, in their own order.
    probs: [B, N, R] float32 softmax scores of the routed heads.
    selected: [B, N, R] bool, heads that each token selected.
  """

  gates: torch.Tensor
  probs: torch.Tensor
  selected: torch.Tensor


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
    heads, self.num_shared, self.num_selected = config.heads(layer_idx)
    self.num_routed = heads - self.num_shared
    order = (config.head_order or {layer_idx: None})[layer_idx]
    self.order = list(order) if order else None
    # From the order of sharing to the heads' own.
    self.own = order and sorted(range(heads), key=self.order.__getitem__)
    self.indices = {}  # (device, order) -> tensor
    self.by_norm = self.options["kind"] == "query_norm"
    if self.by_norm:
      return
    routed = self.num_selected > 0
    sizes = {
      "routed": self.num_routed if routed else 0,
      "shared": self.num_shared if self.num_shared > 1 else 0,
      "group": 2
      if self.options["two_stage"] and routed and self.num_shared
      else 0,
    }
    for name, size in sizes.items():
      setattr(self, name, MoHScores(config.hidden_size, size) if size else None)

  def forward(self, x: torch.Tensor, query: torch.Tensor) -> Routing:
    """Routes tokens x [B, N, C] with queries [B, N, H, D] before RoPE."""
    routing = self._by_norm(query) if self.by_norm else self._two_stage(x)
    if self.order:
      routing.gates = self._reordered(routing.gates, "own")
    return routing

  def _reordered(self, values: torch.Tensor, order: str) -> torch.Tensor:
    """Heads in the order "order" or "own".

    The indices stay on the device: a copy cannot be part of a CUDA graph.
    """
    key = values.device, order
    if key not in self.indices:
      self.indices[key] = torch.tensor(getattr(self, order), device=key[0])
    return values.index_select(-1, self.indices[key])

  def _two_stage(self, x: torch.Tensor) -> Routing:
    x = x.float()
    shared = x.new_ones(*x.shape[:-1], self.num_shared)
    if self.num_shared > 1:
      shared = self.shared(x).softmax(-1)
    scores = probs = x.new_zeros(*x.shape[:-1], self.num_routed)
    if self.num_selected:
      scores = self.routed(x)
      probs = scores.softmax(-1)
    selected = self._selected(scores, probs)
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
    return Routing(torch.cat((shared, routed), -1), probs, selected)

  def _selected(
    self, scores: torch.Tensor, probs: torch.Tensor
  ) -> torch.Tensor:
    """Marks each token's best heads; of equal ones the first, unlike topk."""
    top_p = self.options["top_p"] if self.num_selected else 0.0
    best, order = (probs if top_p else scores).sort(
      dim=-1, descending=True, stable=True
    )
    kept = torch.arange(self.num_routed, device=order.device)
    kept = (kept < self.num_selected).expand_as(order)
    if top_p:  # the better ones have less than top_p together
      kept = (best.cumsum(-1) - best < top_p) | (top_p == 1)
    return torch.zeros_like(kept).scatter(-1, order, kept)

  def _by_norm(self, query: torch.Tensor) -> Routing:
    squares = query.float().square().sum(-1)
    norms = squares.clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    if self.order:
      norms = self._reordered(norms, "order")
    shared = torch.ones_like(norms[..., : self.num_shared])
    norms = norms[..., self.num_shared :]
    if not self.num_selected:
      none = torch.zeros_like(norms)
      return Routing(torch.cat((shared, none), -1), none, none.bool())
    if self.num_routed > 1:
      mean = norms.mean(-1, keepdim=True)
      variance = (norms - mean).square().sum(-1, keepdim=True)
      variance = variance / (self.num_routed - 1)
      # Equal norms differ by rounding alone, which must not decide.
      differ = variance > (_EQUAL_TO * mean).square() + _TINY
      scale = torch.where(differ, variance, 1.0).rsqrt()
      norms = torch.where(differ, norms * scale, 0.0)
    probs = norms.softmax(-1)
    selected = self._selected(norms, probs)
    passed = probs - probs.detach()  # 0 with the gradient of the scores
    if self.options["straight_through"] == "selected":
      passed = torch.where(selected, passed, 0.0)
    gates = torch.cat((shared, selected + passed), -1)
    return Routing(gates, probs, selected)


def balance_loss(
  layers, router: dict, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
  """Load-balance loss (eq. 7), the mean over the layers that route.

  The sum over routed heads of the share of tokens that select a head times its
  mean score; the "released" form multiplies by the number of routed heads.

  Args:
    layers: for every layer that routes its `probs` and `selected`, see
      `Routing`.
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


__all__ = ["MoHRouter", "MoHScores", "Routing", "balance_loss"]
