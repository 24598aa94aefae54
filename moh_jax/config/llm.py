"""The sections of MoH-LLM: its network and rotary position embedding."""

import dataclasses
import math
from typing import Annotated, Literal

from moh_jax.config import base
from moh_jax.config.data import TextDataConfig
from moh_jax.config.layers import LayerStack
from moh_jax.config.run import Config


@dataclasses.dataclass(frozen=True)
class RotaryConfig(base.Section):
  """Rotary position embedding (RoPE, arXiv:2104.09864) and its extensions.

  Attributes:
    theta: base of the frequencies, above 1; pair i of a head of width D
      turns by theta ** (-2 i / D) a token.
    scaling: how texts longer than those of the training are read: "none";
      "linear" divides positions by `factor` (arXiv:2306.15595); "dynamic"
      raises the base where a text is longer than `original_length` (NTK);
      "llama3" divides the slow frequencies alone by `factor` (LLaMA 3.1);
      "yarn" does so with other borders, and makes attention sharper
      (arXiv:2309.00071).
    factor: how many times longer than `original_length` a text may be, at
      least 1; not used by "none".
    low_freq_factor: "llama3" divides wavelengths above original_length / this,
      in tokens.
    high_freq_factor: "llama3" keeps wavelengths below original_length / this
      as they are, and interpolates between the two.
    original_length: tokens of a text in the training before the scaling; used
      by "dynamic", "llama3" and "yarn".
    beta_fast: "yarn" keeps the pairs that turn at least so many times in
      `original_length` tokens as they are.
    beta_slow: "yarn" divides the pairs that turn at most so many times, and
      interpolates between the two.
    truncate: whether "yarn" rounds both borders to whole pairs, outwards.
    attention_factor: number that "yarn" multiplies rotated queries and keys
      by; None is 0.1 ln(factor) + 1.
  """

  NAME = "rope"

  theta: Annotated[float, base.Range(1, ends="(]")] = 10000.0
  scaling: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
  factor: Annotated[float, base.Range(1)] = 1.0
  low_freq_factor: base.Amount = 1.0
  high_freq_factor: base.Amount = 4.0
  original_length: base.Count = 8192
  beta_fast: base.Amount = 32.0
  beta_slow: base.Amount = 1.0
  truncate: bool = True
  attention_factor: base.Positive | None = None

  def check(self) -> None:
    """Borders are in order, and bases are."""
    if not 0 < self.low_freq_factor < self.high_freq_factor:
      most = f"rope.high_freq_factor={self.high_freq_factor}"
      self.fail("low_freq_factor", f"must be above 0 and below {most}")
    if not 0 < self.beta_slow <= self.beta_fast:
      most = f"rope.beta_fast={self.beta_fast}"
      self.fail("beta_slow", f"must be above 0 and at most {most}")


ROPE_SCALINGS = base.choices(RotaryConfig, "scaling")


@dataclasses.dataclass(frozen=True)
class Sampling(base.Section):
  """How tokens are sampled.

  Attributes:
    max_new_tokens: tokens written at most.
    temperature: of the distribution; 0 always takes the best token.
    top_k: sample from so many best tokens; 0: from all.
    top_p: sample from the fewest best tokens that have this probability.
    stop: texts that end what is written; they are left out of it.
    seed: of the samples; those of prompt i do not depend on the other prompts.
  """

  NAME = ""

  max_new_tokens: base.Count = 64
  temperature: base.Amount = 0.0
  top_k: base.Natural = 0
  top_p: Annotated[float, base.Range(0, 1, "(]")] = 1.0
  stop: tuple[str, ...] = ()
  seed: Annotated[int, base.Range(0, 2**32 - 1)] = 0

  @property
  def greedy(self) -> bool:
    """Whether the best token is always taken."""
    return self.temperature == 0

  @property
  def cut(self) -> bool:
    """Whether only some tokens may be sampled."""
    return bool(self.top_k) or self.top_p < 1


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
      shared, where `model.router.structure` says so the first of each key/value
      group or the first groups, by the mean place of their heads; () is their
      own order. It moves no weights.
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

  family: Literal["llm"] = "llm"
  vocab_size: base.Count | None = None
  max_length: base.Count = 2048
  width: base.Count = 768
  mlp_dim: base.Count = 2048
  num_heads: tuple[base.Natural, ...] = (12,) * 12
  num_kv_heads: base.Count = 12
  head_dim: base.Count = 64
  shared_heads: tuple[base.Natural, ...] = (4,) * 12
  top_k: tuple[base.Natural, ...] = (5,) * 12
  head_order: tuple[tuple[int, ...], ...] = ()
  norm_eps: Annotated[float, base.Range(1e-12, 1.0)] = 1e-5
  rope: RotaryConfig = RotaryConfig()
  tie_embeddings: bool = False
  qkv_bias: bool = False
  out_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  loss_chunk: base.Natural = 512

  DATA = TextDataConfig
  RUNTIME_FIELDS = (*LayerStack.RUNTIME_FIELDS, "loss_chunk")
  READS_TEXT = True
  SERVED_IN_DTYPE = True
  sees = "before"
  MLP_MATRICES = 3  # between the width and that of the MLP

  def check(self) -> None:
    """Heads come in pairs, in groups and in an order."""
    if self.head_dim % 2:
      self.fail("head_dim", "must be even: RoPE turns pairs")
    super().check()
    if self.head_order:
      self.fill_parts("head_order")
    for layer, (order, heads) in enumerate(
      zip(self.head_order, self.num_heads)
    ):
      if heads != self.num_heads[0]:
        self.fail("head_order", "must be () where layers differ in num_heads")
      if sorted(order) != list(range(heads)):
        raise ValueError(
          f"model.head_order[{layer}]={order} must hold each of the {heads} "
          "heads once"
        )

  @property
  def num_tokens(self) -> int:
    """N of the longest sequence."""
    return self.max_length

  @property
  def example_inputs(self) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Tokens [1, 1] int32."""
    return (((1, 1), "int32"),)

  def with_mlp_dim(self, dim: int) -> "LLMConfig":
    """The section with another width of the MLP."""
    return dataclasses.replace(self, mlp_dim=dim)

  def check_run(self, run: Config) -> None:
    """Sequences fit `max_length`; a schedule ends at the model's top_k.

    Without a router the schedule, like `top_k`, has no effect.
    """
    if run.data.sequence_length > self.max_length:
      most = f"model.max_length={self.max_length}"
      run.data.fail("sequence_length", f"must be at most {most}")
    tune, values = run.tune, "top_k_values"
    if not tune.top_k_values or not self.router.selects:
      return
    routed = [group for group in self.layer_groups() if group.budget.top_k]
    ends = tuple(sorted({group.budget.top_k for group in routed}))
    if ends != tune.top_k_values[-1:]:
      tune.fail(values, f"must end with the routing layers' top_k {ends}")
    # The steps of a run of `epochs` are known once its examples are counted.
    steps = math.inf if run.train.epochs else run.train.steps
    if tune.top_k_steps and tune.top_k_steps[-1] >= steps:
      tune.fail("top_k_steps", f"must end before train.steps={steps}")
    least = min(group.budget.routed for group in routed)
    if max(tune.top_k_values) > least:
      tune.fail(values, f"must be at most {least}, a layer's routed heads")
    step = math.lcm(*(group.units(self.router).step for group in routed))
    if any(value % step for value in tune.top_k_values):
      structure = f"model.router.structure={self.router.structure!r}"
      tune.fail(values, f"must be multiples of {step} for {structure}")
