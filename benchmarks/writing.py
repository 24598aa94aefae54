"""How fast a language model reads prompts and writes tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from moh_jax.config import LLMConfig, without_router
from moh_jax.inference.decoding import (
  Sampling,
  make_decode,
  make_prefill,
  span_numbers,
)
from moh_jax.inference.generate import (
  batch_bucket,
  default_cache_dtype,
  serving_params,
)
from moh_jax.models.llm import LLM
from moh_jax.training.state import init_params, unbox

_SPAN = 32  # tokens written at one time
_BATCHES = (1, 8)


def rows(moh: LLMConfig, length: int, rounds: int) -> list[dict]:
  """Times a model against its multi-head baseline, in turns.

  Args:
    moh: the model.
    length: tokens of a prompt; the cache has twice as many slots.
    rounds: measured calls.

  Returns:
    Rows of "prefill_B" (a batch of prompts) and "decode_B" (a token each).
  """
  result = []
  for batch in _BATCHES:
    models = {"moh": moh, "mha": without_router(moh)}
    writers = {n: _Writer(m, batch, length) for n, m in models.items()}
    for mode in ("prefill", "decode"):
      calls = {name: getattr(w, mode) for name, w in writers.items()}
      times = timing.interleaved(calls, rounds)
      tokens = length if mode == "prefill" else _SPAN
      result += [
        {
          "variant": name,
          "mode": f"{mode}_{batch}",
          "ms": time.median * 1e3 / (1 if mode == "prefill" else _SPAN),
          "spread": time.spread,
          "units_per_second": batch * tokens / time.median,
          "ratio_to_mha": time.median / times["mha"].median,
        }
        for name, time in times.items()
      ]
  return result


def random_params(config: LLMConfig) -> Any:
  """Parameters as they are drawn."""
  model = LLM(config)
  tokens = [jnp.zeros((1, 1), jnp.int32)]
  on_cpu = jax.devices()[0].platform == "cpu"
  options = {"xla_backend_optimization_level": 0} if on_cpu else None
  init = jax.jit(
    lambda: unbox(init_params(model, jax.random.key(1), tokens)),
    compiler_options=options,
  )
  return init()


class _Writer:
  """Texts being written, `_SPAN` tokens a call."""

  def __init__(self, config: LLMConfig, batch: int, length: int):
    model = LLM(config, unrolled=True)
    self._params = serving_params(random_params(config), config)
    self._read = make_prefill(model, default_cache_dtype(config))
    self._write = make_decode(model, None, _SPAN)
    self._slots = 2 * length
    rows = batch_bucket(batch, config)
    self._prompts = (
      np.ones((rows, length), np.int32),
      np.zeros(rows, np.int32),
      np.arange(rows, dtype=np.int32),
      np.zeros(rows, bool),
    )
    self._state = self.prefill()

  def prefill(self) -> Any:
    """Reads prompts into a new cache."""
    return self._read(self._params, *self._prompts, self._slots)

  def decode(self) -> jax.Array:
    """Writes; starts anew where the cache is full."""
    if int(self._state.slot) + _SPAN > self._slots:
      self._state = jax.block_until_ready(self.prefill())
    numbers = span_numbers(Sampling(), 0, _SPAN)
    self._state, tokens, _ = self._write(
      self._params, self._state, numbers, True, False
    )
    return tokens
