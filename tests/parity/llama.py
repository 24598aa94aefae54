"""Recorded cases of MoH-LLaMA3 and LLaMA."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moh_jax.config import LLMConfig, RouterConfig
from moh_jax.convert import llama, llama_config
from moh_jax.models.llm import LLM
from moh_jax.ops.cache import Slots
from tests.convert import tiny_llm
from tests.parity.case import Case, apply


def network(case: Case) -> dict[str, Any]:
  """Results of a whole network: logits, routing, loss, greedy generation."""
  arrays = case.arrays
  config = _model_config(case.hyper)
  kept = llama.kept(config, case.weights)
  params = dataclasses.replace(case, weights=kept).load(
    LLM(config),
    llama.model_rules(config),
    jax.ShapeDtypeStruct((1, 1), jnp.int32),
  )
  run = jax.jit(functools.partial(apply, LLM(config)))

  tokens = jnp.asarray(arrays["input_ids"])
  (logits, _), recorded = run(params, tokens)
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits[:, :-1], tokens[:, 1:]
  )
  outputs = {
    "logits": logits,
    "labels_loss": losses.mean(),
    "head_mask": _head_mask(config, recorded),
    "router_probs": _routing(config, recorded, "probs"),
  }
  mask = np.asarray(arrays["attention_mask"], bool)
  padded = jnp.asarray(arrays["padded_input_ids"])
  positions = jnp.asarray(arrays["padded_position_ids"])
  (logits, _), recorded = run(
    params, padded, positions=positions, token_mask=mask
  )
  # Outputs at padded tokens are meaningless; the case records them as 0.
  outputs["padded_logits"] = logits * mask[..., None]
  if recorded:
    outputs["padded_head_mask"] = (
      _head_mask(config, recorded) * mask[None, ..., None]
    )
  (logits, _), _ = run(params, padded, token_mask=mask)
  outputs["padded_logits_default_positions"] = logits * mask[..., None]

  prompts, mask = (arrays[f"padded_prompt_{n}"] for n in ("ids", "mask"))
  padding = prompts.shape[1] - mask.astype(bool).sum(1)
  steps = case.hyper["max_new_tokens"]
  written = tiny_llm.greedy(config, params, prompts, steps, padding)
  outputs["padded_generated_ids"] = np.concatenate([prompts, written], axis=1)
  return outputs | _generate(config, params, case)


def _model_config(hyper: Mapping[str, Any]) -> LLMConfig:
  """The config of a recorded network.

  Args:
    hyper: the fields of transformers' config.json, and for MoH the release's
      own, shared_head and routed_head, of each layer or of all.
  """
  names = {"shared_heads": "shared_head", "top_k": "routed_head"}
  plain = {k: v for k, v in hyper.items() if k not in names.values()}
  config = llama_config.from_hf({"model_type": "llama", **plain})
  if plain == hyper:
    return config
  counts = {
    ours: tuple(np.broadcast_to(hyper[theirs], config.depth).tolist())
    for ours, theirs in names.items()
  }
  return dataclasses.replace(
    config, router=RouterConfig("query_norm"), **counts
  )


def _routing(
  config: LLMConfig, recorded: Mapping[str, Any], field: str
) -> np.ndarray | None:
  """A field of every layer's `Routing`, [layers, B, N, heads].

  Args:
    config: the model.
    recorded: intermediates; empty of a network without routers.
    field: name of the field.
  """
  if not recorded:
    return None
  values = []
  for index in range(len(config.layer_groups())):
    (routing,) = recorded[f"blocks{index}"]["attn"]["router"]["routing"]
    values.append(getattr(routing, field))
  return np.concatenate(values)


def _head_mask(
  config: LLMConfig, recorded: Mapping[str, Any]
) -> np.ndarray | None:
  """Active heads of every layer, [layers, B, N, H] int32 of 0 and 1."""
  gates = _routing(config, recorded, "gates")
  return None if gates is None else gates.astype(np.int32)


def _generate(
  config: LLMConfig, params: Any, case: Case
) -> dict[str, np.ndarray]:
  """Greedy generation with a cache, one call of the network per token.

  Args:
    config: the model.
    params: its parameters.
    case: has the prompts [B, P] and the number of steps.

  Returns:
    "generated_ids" [B, P + steps], the prompt and what follows it;
    "generated_step_logits" [steps, B, V]; and with routers
    "generated_head_mask" [layers, B, P + steps - 1, H] of the tokens read.
  """
  model = LLM(config)
  tokens, steps = case.arrays["prompt_ids"], case.hyper["max_new_tokens"]
  batch, length = tokens.shape
  cache = model.new_cache(batch, length + steps)

  @jax.jit
  def step(params, cache, tokens, first):
    slots = Slots(first, jnp.zeros(batch, jnp.int32))
    (logits, _, cache), recorded = apply(
      model, params, tokens, cache, slots, method="extend"
    )
    return logits[:, -1], cache, recorded

  logits, masks, first = [], [], 0
  for _ in range(steps):
    last, cache, recorded = step(
      params, cache, tokens[:, first:], jnp.int32(first)
    )
    first = tokens.shape[1]
    logits.append(np.asarray(last))
    masks.append(_head_mask(config, recorded))
    chosen = logits[-1].argmax(-1).astype(tokens.dtype)
    tokens = np.concatenate([tokens, chosen[:, None]], axis=1)
  outputs = {"generated_ids": tokens, "generated_step_logits": np.stack(logits)}
  if config.router.kind != "none":
    outputs["generated_head_mask"] = np.concatenate(masks, axis=2)
  return outputs
