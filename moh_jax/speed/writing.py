"""How fast a language model reads prompts and writes tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import LLMConfig
from moh_jax.inference.decoding import (
  Sampling,
  make_decode,
  make_prefill,
  span_numbers,
)
from moh_jax.inference.generate import (
  batch_bucket,
  default_cache_dtype,
  length_bucket,
  serving_params,
)
from moh_jax.models.llm import LLM
from moh_jax.runtime.params import init_params, unbox
from moh_jax.speed import compare
from moh_jax.speed.compare import Setting, Variant
from moh_jax.speed.programs import Program, jit_once
from moh_jax.speed.report import Row

_SPAN = 32  # tokens written at one time
_BATCHES = (1, 8)


def measure(
  models: dict[str, LLMConfig],
  shares: dict[str, float],
  length: int,
  rounds: int,
) -> list[Row]:
  """Times models against their multi-head baseline, in turns.

  Args:
    models: implementation -> model; "mha" is the baseline.
    shares: implementation -> share of the heads that are at work.
    length: tokens of a prompt; the cache has room for a span of tokens more.
    rounds: measured turns.

  Returns:
    Rows of "prefill_B" (a batch of prompts) and "decode_B" (a token each).
  """
  rows = []
  for batch in _BATCHES:
    writers = {n: _Writer(m, batch, length) for n, m in models.items()}
    for mode in ("prefill", "decode"):
      variants = [
        Variant(
          name,
          shares[name],
          Program(getattr(writer, mode), 1 if mode == "prefill" else _SPAN),
          name == "mha",
        )
        for name, writer in writers.items()
      ]
      setting = Setting(
        op="model",
        mode=f"{mode}_{batch}",
        length=length,
        units=batch * (length if mode == "prefill" else 1),
        rounds=rounds,
        least=0.0,
      )
      rows += compare.measure(setting, variants)
  return rows


def random_params(config: LLMConfig) -> Any:
  """Parameters as they are drawn."""
  model = LLM(config)
  tokens = [jnp.zeros((1, 1), jnp.int32)]
  return jit_once(
    lambda: unbox(init_params(model, jax.random.key(1), tokens))
  )()


class _Writer:
  """Texts being written, `_SPAN` tokens a call."""

  def __init__(self, config: LLMConfig, batch: int, length: int):
    model = LLM(config, unrolled=True)
    self._params = serving_params(random_params(config), config)
    self._read = make_prefill(model, default_cache_dtype(config))
    self._write = make_decode(model, None, _SPAN)
    self._slots = length_bucket(length + _SPAN)
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
