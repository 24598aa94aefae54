"""The model section of MoH-LLM."""

import dataclasses

from moh_jax.config.checks import (
  MOST_HEADS,
  MOST_TOKENS,
  MOST_WIDTH,
  at_least,
  at_most,
  in_range,
)
from moh_jax.config.layers import LayerStack
from moh_jax.config.rotary import RotaryConfig
from moh_jax.config.run import Config
from moh_jax.config.text import TextDataConfig, TuneConfig

CACHE_DTYPES = ("float32", "bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class LLMConfig(LayerStack):
  """Decoder of the LLaMA kind (arXiv:2302.13971) with or without MoH.

  `num_heads`, `shared_heads` and `top_k` hold one value per layer.

  Attributes:
    family: "llm".
    vocab_size: V, tokens of the vocabulary; None is those of the data's
      tokenizer.
    max_length: longest sequence in tokens, the range of RoPE.
    width: C.
    mlp_dim: F, width of the MLP.
    num_heads: query heads of each layer; the length of the tuple is the depth.
    num_kv_heads: key/value heads K; query head h reads h // (H / K).
    head_dim: width of a head, even.
    shared_heads: heads of each layer that are on for every token, the first of
      `head_order`.
    top_k: heads of each layer that a token chooses among the others.
    head_order: for each layer its heads in the order in which the first are
      shared; () is their own order. It moves no weights.
    norm_eps: added to the mean square of RMSNorm.
    rope: section of the rotary position embedding.
    tie_embeddings: whether the output layer uses the weights of the embedding.
    qkv_bias: whether the query, key and value projections have biases.
    out_bias: whether the attention's output projection has a bias.
    mlp_bias: whether the MLP has biases.
    qk_norm: whether the queries and keys of every head are normed before RoPE,
      by an RMSNorm over `head_dim` whose weights all heads share (Qwen3).
    dtype: compute dtype, "float32" or "bfloat16"; router, softmax, norms and
      loss are float32.
    loss_chunk: tokens of a sequence whose logits exist at one time in training
      and scoring; 0 makes all at once.
  """

  family: str = "llm"
  vocab_size: int | None = None
  max_length: int = 2048
  width: int = 768
  mlp_dim: int = 2048
  num_heads: tuple[int, ...] = (12,) * 12
  num_kv_heads: int = 12
  head_dim: int = 64
  shared_heads: tuple[int, ...] = (4,) * 12
  top_k: tuple[int, ...] = (5,) * 12
  head_order: tuple[tuple[int, ...], ...] = ()
  norm_eps: float = 1e-5
  rope: RotaryConfig = RotaryConfig()
  tie_embeddings: bool = False
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  loss_chunk: int = 512

  DATA = TextDataConfig
  SECTIONS = {"tune": TuneConfig}
  RUNTIME_FIELDS = (*LayerStack.RUNTIME_FIELDS, "loss_chunk")
  READS_TEXT = True
  SERVED_IN_DTYPE = True
  sees = "before"

  def __post_init__(self):
    self.check_common("llm", rope=RotaryConfig)
    at_least("model", 1, self, "width", "mlp_dim", most=MOST_WIDTH)
    at_most("model", MOST_WIDTH, self, "head_dim")
    at_least("model", 1, self, "vocab_size", "max_length", most=MOST_TOKENS)
    at_least("model", 1, self, "num_kv_heads", most=MOST_HEADS)
    at_least("model", 0, self, "loss_chunk", most=MOST_TOKENS)
    in_range("model", 1e-12, 1.0, self, "norm_eps")
    if self.head_dim < 2 or self.head_dim % 2:
      raise ValueError(
        f"model.head_dim={self.head_dim} must be even: RoPE turns pairs"
      )
    self.check_layers()
    for layer, heads in enumerate(self.num_heads):
      if heads % self.num_kv_heads:
        raise ValueError(
          f"model.num_kv_heads={self.num_kv_heads} must divide "
          f"model.num_heads[{layer}]={heads}"
        )
    self._check_order()

  def _check_order(self):
    if self.head_order and len(self.head_order) != self.depth:
      raise ValueError(
        f"model.head_order has {len(self.head_order)} rows, must have one per "
        f"layer ({self.depth}) or none"
      )
    if self.head_order and len(set(self.num_heads)) > 1:
      raise ValueError(
        f"model.head_order must be () where layers differ in their heads, "
        f"model.num_heads={self.num_heads}"
      )
    for layer, order in enumerate(self.head_order):
      if sorted(order) != list(range(self.num_heads[layer])):
        raise ValueError(
          f"model.head_order[{layer}]={order} must hold each of the "
          f"{self.num_heads[layer]} heads once"
        )

  @property
  def num_tokens(self) -> int:
    """N of the longest sequence."""
    return self.max_length

  @property
  def example_inputs(self) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Tokens [1, 1] int32."""
    return (((1, 1), "int32"),)

  def check_run(self, run: Config) -> None:
    """Sequences fit the positions; a schedule of top_k ends as the model is."""
    if run.data.sequence_length > self.max_length:
      raise ValueError(
        f"data.sequence_length={run.data.sequence_length} must be at most "
        f"model.max_length={self.max_length}, the range of its positions"
      )
    self._check_schedule(run)

  def _check_schedule(self, run: Config) -> None:
    tune = run.tune
    if not tune.top_k_values:
      return
    routing = [k for k in self.top_k if k] if self.router.kind != "none" else []
    if not routing or set(routing) != {tune.top_k_values[-1]}:
      raise ValueError(
        f"tune.top_k_values={tune.top_k_values} must end with the model.top_k "
        f"of the layers that route, {tuple(sorted(set(routing)))}"
      )
    if tune.top_k_steps[-1] >= run.train.steps:
      raise ValueError(
        f"tune.top_k_steps={tune.top_k_steps} must end before train.steps="
        f"{run.train.steps}"
      )
    least = min(b.routed for b in self.budgets() if b.top_k)
    if max(tune.top_k_values) > least:
      raise ValueError(
        f"tune.top_k_values={tune.top_k_values} must be at most the {least} "
        "routed heads of a layer"
      )

  def in_run(self, run: Config) -> Config:
    """A schedule of top_k keeps its steps and ends as this model is."""
    tune, values = run.tune, run.tune.top_k_values
    if self.router.kind == "none":
      tune = TuneConfig()
    elif values:
      # They lie between the last one and all routed heads as before.
      last, new_last = values[-1], max(self.top_k)
      most, new_most = (
        min(b.routed for b in one.budgets() if b.top_k)
        for one in (run.model, self)
      )
      scale = (new_most - new_last) / max(1, most - last)
      moved = (new_last + round((value - last) * scale) for value in values)
      tune = dataclasses.replace(
        tune, top_k_values=tuple(max(1, value) for value in moved)
      )
    return dataclasses.replace(run, model=self, tune=tune)
