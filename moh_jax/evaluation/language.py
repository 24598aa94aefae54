"""How well a language model predicts held-out text."""

from typing import Any

import flax.linen as nn
import jax

from moh_jax.config import LLMConfig
from moh_jax.evaluation.means import EvalStep, batch_sums
from moh_jax.models.llm import token_nats


def make_eval_step(model: nn.Module, config: LLMConfig) -> EvalStep:
  """Jitted sums over one batch of packed sequences.

  Args:
    model: the network.
    config: its section.

  Returns:
    (params, batch) -> sums over the batch: "nats" and "tokens" of the targets
    that count, those the model gets right ("correct"), and per sequence
    "examples" and "activated_share".
  """

  @jax.jit
  def eval_step(params: Any, batch: Any) -> dict[str, jax.Array]:
    x, aux = model.apply(
      {"params": params},
      batch["inputs"],
      positions=batch["positions"],
      segments=batch["segments"],
      token_mask=batch["segments"] > 0,
      with_logits=False,
    )
    nats, correct = token_nats(x, params, config, batch["targets"])
    weights = batch["weights"]
    return {
      **batch_sums(batch["mask"], activated_share=aux.activated_share),
      "nats": (nats * weights).sum(),
      "tokens": weights.sum(),
      "correct": (correct * weights).sum(),
    }

  return eval_step
