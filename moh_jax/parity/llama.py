"""Recorded cases of MoH-LLaMA3 and LLaMA."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import LLMConfig, RouterConfig
from moh_jax.convert import hf_config, llama
from moh_jax.inference.decoding import (
  make_decode,
  make_prefill,
  span_numbers,
)
from moh_jax.inference.options import Sampling
from moh_jax.models.llm import LLM
from moh_jax.models.llm_params import unroll
from moh_jax.ops.cache import Slots
from moh_jax.parity.case import Arrays, Case, load_weights


def network(case: Case, *, moh: bool) -> dict[str, Any]:
  """Results of a whole network: logits, routing, loss, greedy generation.

  Args:
    case: the recorded case.
    moh: whether the network has routers.
  """
  arrays = case.arrays
  config = model_config(case.hyper, moh=moh)
  params = _load(config, case.weights)
  model = LLM(config)

  @jax.jit
  def run(params, tokens, positions, mask):
    (logits, _), recorded = model.apply(
      {"params": params},
      tokens,
      positions=positions,
      token_mask=mask,
      mutable=["intermediates"],
    )
    return logits, recorded.get("intermediates", {})

  tokens = jnp.asarray(arrays["input_ids"])
  logits, recorded = run(params, tokens, None, None)
  outputs = {"logits": logits, "labels_loss": _loss(logits, tokens)}
  if moh:
    outputs["head_mask"] = _head_mask(config, recorded)
    outputs["router_probs"] = _router_probs(config, recorded)

  mask = np.asarray(arrays["attention_mask"], bool)
  padded = jnp.asarray(arrays["padded_input_ids"])
  positions = jnp.asarray(arrays["padded_position_ids"])
  logits, recorded = run(params, padded, positions, mask)
  # Outputs at padded tokens are meaningless; the case records them as 0.
  outputs["padded_logits"] = logits * mask[..., None]
  if moh:
    outputs["padded_head_mask"] = (
      _head_mask(config, recorded) * mask[None, ..., None]
    )
  logits, _ = run(params, padded, None, mask)
  outputs["padded_logits_default_positions"] = logits * mask[..., None]

  steps = case.hyper["max_new_tokens"]
  prompts = np.asarray(arrays["prompt_ids"])
  whole = np.ones(prompts.shape, bool)
  generated = _generate(config, params, prompts, whole, steps)
  outputs["generated_ids"] = generated.tokens
  outputs["generated_step_logits"] = generated.logits
  if moh:
    outputs["generated_head_mask"] = generated.head_mask
  prompts = np.asarray(arrays["padded_prompt_ids"])
  mask = np.asarray(arrays["padded_prompt_mask"], bool)
  outputs["padded_generated_ids"] = _write(config, params, prompts, mask, steps)
  return outputs


def model_config(hyper: Mapping[str, Any], *, moh: bool) -> LLMConfig:
  """The config of a recorded network, with routers if `moh`.

  Args:
    hyper: the fields of transformers' config.json.
    moh: whether the release's own fields, shared_head and routed_head, apply.
  """
  config = hf_config.from_hf({"architectures": ["LlamaForCausalLM"], **hyper})
  if not moh:
    return config
  layers = config.depth
  counts = {"shared_heads": "shared_head", "top_k": "routed_head"}
  split = {
    ours: tuple(value) if isinstance(value, list) else (value,) * layers
    for ours, value in ((o, hyper[name]) for o, name in counts.items())
  }
  return dataclasses.replace(config, router=RouterConfig("query_norm"), **split)


def _load(config: LLMConfig, weights: Arrays) -> Any:
  inputs = (jax.ShapeDtypeStruct((1, 1), jnp.int32),)
  kept = {n: x for n, x in weights.items() if not llama.is_ignored(config, n)}
  return load_weights(LLM(config), inputs, llama.model_rules(config), kept)


def _loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
  """Mean cross-entropy of the next tokens."""
  log_probs = jax.nn.log_softmax(logits[:, :-1])
  chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
  return -chosen.mean()


def _routings(config: LLMConfig, recorded: Mapping[str, Any]) -> list:
  """The `Routing` of every layer, in scanned and in unrolled networks."""
  routings = []
  for index, group in enumerate(config.layer_groups()):
    name = f"blocks{index}"
    for layer in range(group.depth):
      if name in recorded:
        (stacked,) = recorded[name]["attn"]["router"]["routing"]
        routings.append(jax.tree.map(lambda x: x[layer], stacked))  # noqa: B023
      else:
        own = recorded[f"{name}_{layer}"]["attn"]["router"]["routing"]
        routings.append(own[0])
  return routings


def _head_mask(config: LLMConfig, recorded: Mapping[str, Any]) -> np.ndarray:
  """Active heads of every layer, [layers, B, N, H] int32 of 0 and 1."""
  gates = [routing.gates for routing in _routings(config, recorded)]
  return np.stack([np.asarray(g) for g in gates]).astype(np.int32)


def _router_probs(config: LLMConfig, recorded: Mapping[str, Any]) -> np.ndarray:
  """Probabilities of the routed heads of every layer, [layers, B, N, R]."""
  routings = _routings(config, recorded)
  return np.stack([np.asarray(routing.probs) for routing in routings])


def _write(
  config: LLMConfig,
  params: Any,
  prompts: np.ndarray,
  mask: np.ndarray,
  steps: int,
) -> np.ndarray:
  """Greedy tokens [B, P + steps], by the programs of the `generate` command."""
  batch, length = prompts.shape
  model, params = LLM(config, unrolled=True), unroll(params, config)
  state = make_prefill(model, "float32")(
    params,
    prompts.astype(np.int32),
    (length - mask.sum(1)).astype(np.int32),
    np.arange(batch, dtype=np.int32),
    np.zeros(batch, bool),
    length + steps,
  )
  numbers = span_numbers(Sampling(), 0, steps)
  _, tokens, _ = make_decode(model, None, steps)(
    params, state, numbers, True, False
  )
  tokens = np.asarray(tokens).astype(prompts.dtype)
  return np.concatenate([prompts, tokens], axis=1)


@dataclasses.dataclass(frozen=True)
class _Generated:
  """What `_generate` returns.

  Attributes:
    tokens: [B, P + steps], the prompt and what follows it.
    logits: [steps, B, V].
    head_mask: [layers, B, P + steps - 1, H] of the tokens that were read, or
      None without routers.
  """

  tokens: np.ndarray
  logits: np.ndarray
  head_mask: np.ndarray | None


def _generate(
  config: LLMConfig,
  params: Any,
  prompts: np.ndarray,
  mask: np.ndarray,
  steps: int,
) -> _Generated:
  """Greedy generation with a cache, one call of the network per token.

  Args:
    config: the model.
    params: its parameters.
    prompts: [B, P] int, padded on the left.
    mask: [B, P] bool, False at padding.
    steps: tokens to generate.
  """
  batch, length = prompts.shape
  slots = length + steps
  model = LLM(config, unrolled=True)
  params = unroll(params, config)
  cache = model.new_cache(batch, slots)
  # Cache slots that do not hold padding; a token sees those up to its own.
  filled = np.concatenate([mask, np.ones((batch, steps), bool)], axis=1)
  positions = np.maximum(np.cumsum(filled, axis=1) - 1, 0)

  @jax.jit
  def step(params, cache, tokens, positions, mask, slot, visible):
    (logits, _, cache), recorded = model.apply(
      {"params": params},
      tokens,
      cache,
      Slots(slot, visible),
      positions=positions,
      token_mask=mask,
      method="extend",
      mutable=["intermediates"],
    )
    return logits[:, -1], cache, recorded.get("intermediates", {})

  tokens, logits, masks, first = prompts, [], [], 0
  for _ in range(steps):
    fed = slice(first, tokens.shape[1])
    seen = np.arange(slots) <= np.arange(fed.start, fed.stop)[:, None]
    last, cache, recorded = step(
      params,
      cache,
      tokens[:, fed],
      positions[:, fed],
      filled[:, fed],
      jnp.int32(first),
      seen[None] & filled[:, None],
    )
    first = tokens.shape[1]
    logits.append(np.asarray(last))
    if config.router.kind != "none":
      masks.append(_head_mask(config, recorded))
    chosen = logits[-1].argmax(-1).astype(tokens.dtype)
    tokens = np.concatenate([tokens, chosen[:, None]], axis=1)
  joined = np.concatenate(masks, axis=2) if masks else None
  return _Generated(tokens, np.stack(logits), joined)
