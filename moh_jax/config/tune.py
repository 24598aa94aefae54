"""Section `tune`: how a trained model is tuned, with adapters or in steps."""

import dataclasses
from typing import Literal

from moh_jax.config import base


@dataclasses.dataclass(frozen=True)
class LoraConfig(base.Section):
  """Adapters: low-rank additions to frozen matrices (LoRA, arXiv:2106.09685).

  Attributes:
    rank: columns r of an adapter's two factors; 0 has no adapters and trains
      all parameters.
    alpha: an adapter adds alpha / rank times the product of its factors.
    dropout: share of an input's elements that adapters do not see in training;
      which ones of the output projection depends on the devices of
      `mesh.tensor`.
    targets: patterns (fnmatch) of the paths of the matrices that get adapters.
      The queries, keys and values of one kernel are matrices of their own,
      "blocks0/attn/q" and so on.
    whole: patterns of the paths of parameters that are trained themselves,
      beside adapters.
    base_dtype: how the frozen matrices are held: "float32", "bfloat16", which
      changes nothing where the network computes in it, or "int8", all that can
      have adapters with a scale for every output channel (the others in
      bfloat16).
  """

  NAME = "lora"

  rank: base.Natural = 0
  alpha: base.Positive = 16.0
  dropout: base.Decay = 0.0
  targets: tuple[str, ...] = ("*/attn/*", "*/mlp/*")
  whole: tuple[str, ...] = ("*/router/*",)
  base_dtype: Literal["float32", "bfloat16", "int8"] = "float32"

  def check(self) -> None:
    """There is something that gets an adapter."""
    if self.rank and not self.targets:
      self.fail("targets", "must name matrices where rank is above 0")


@dataclasses.dataclass(frozen=True)
class DistillConfig(base.Section):
  """A teacher: the model that adapters are trained on, with all its heads.

  Beside adapters only routers may be trained, which it does without.

  Attributes:
    weight: of the teacher's part in the loss, the divergence of the
      distributions of the next token (arXiv:1503.02531); 0 is no teacher.
    temperature: T, which divides both models' logits; the divergence is
      multiplied by its square.
    every: steps from one with the teacher, which costs a forward pass, to the
      next.
  """

  NAME = "distill"

  weight: base.Amount = 0.0
  temperature: base.Positive = 1.0
  every: base.Count = 1


@dataclasses.dataclass(frozen=True)
class DpoConfig(base.Section):
  """Pairs of answers, `data.source="preference"` (DPO, arXiv:2305.18290).

  Attributes:
    beta: how much it costs to leave the model without adapters.
  """

  NAME = "dpo"

  beta: base.Positive = 0.1


@dataclasses.dataclass(frozen=True)
class TuneConfig(base.Section):
  """How a trained model is tuned.

  Attributes:
    top_k_steps: optimizer steps at which the routed heads per token change, the
      first 0; () spreads the values evenly over the first third of the run. Of
      language models.
    top_k_values: routed heads per token from each of these steps on, in every
      layer that routes; the last is model.top_k. () keeps it throughout.
    lora: adapters, which are trained in place of the parameters that
      `train.init_from` holds.
    distill: a teacher for adapters of language models.
    dpo: adapters learn which of two answers is better.
  """

  NAME = "tune"

  top_k_steps: tuple[base.Natural, ...] = ()
  top_k_values: tuple[base.Count, ...] = ()
  lora: LoraConfig = LoraConfig()
  distill: DistillConfig = DistillConfig()
  dpo: DpoConfig = DpoConfig()

  def check(self) -> None:
    """The steps rise from 0, each with a value; a teacher has adapters."""
    if self.distill.weight and not self.lora.rank:
      raise ValueError(
        f"tune.distill.weight={self.distill.weight} must be 0 where "
        "tune.lora.rank=0: the teacher is the model without its adapters"
      )
    steps = self.top_k_steps
    if steps and len(steps) != len(self.top_k_values):
      self.fail("top_k_values", f"must have one value for each of {steps}")
    if steps and list(steps) != sorted({0, *steps}):
      self.fail("top_k_steps", "must rise from 0")
