"""Benchmark of a language model's inference: reading prompts, decoding."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from moh_jax.config import Config, LLMConfig
from moh_jax.inference import decoding, generate
from moh_jax.inference.options import Sampling
from moh_jax.models.llm import LLM
from moh_jax.ops.attention import choose_cached_form
from moh_jax.ops.target import target
from moh_jax.speed import compare
from moh_jax.speed.model_programs import random_params
from moh_jax.speed.programs import Program
from moh_jax.speed.report import Row

_SPAN = 32  # tokens that one call of the decoding program generates
_BATCHES = (1, 8)


def measure(
  run: Config, models: Mapping[str, LLMConfig], rounds: int
) -> list[Row]:
  """Times variants of a model in turns, the multi-head baseline among them.

  Args:
    run: run whose sequence length is the length of the prompts; the cache holds
      `_SPAN` tokens more.
    models: model sections by name of the form; "mha" is the baseline.
    rounds: measured turns.

  Returns:
    Rows of the modes "prefill_B" (reads B prompts) and "decode_B" (generates
    one token for each of B texts).
  """
  rows, length = [], run.data.sequence_length
  for batch in _BATCHES:
    writers = {
      name: _Writer(dataclasses.replace(run, model=model), batch, length)
      for name, model in models.items()
    }
    for mode in ("prefill", "decode"):
      evaluations, tokens = (1, length) if mode == "prefill" else (_SPAN, 1)
      forms = {name: _form(model, tokens) for name, model in models.items()}
      programs = {
        name: Program(getattr(writer, mode), evaluations)
        for name, writer in writers.items()
      }
      rows += compare.measure_models(
        models,
        programs,
        forms,
        mode=f"{mode}_{batch}",
        length=length,
        units=batch * tokens,
        rounds=rounds,
      )
  return rows


class _Writer:
  """A batch of texts in generation, `_SPAN` tokens a call."""

  def __init__(self, run: Config, batch: int, length: int):
    config = run.model
    model = LLM(config, unrolled=True)
    self._params = generate.serving_params(random_params(run), config)
    cache_dtype = generate.default_cache_dtype(config)
    self._read = decoding.make_prefill(model, cache_dtype)
    self._write = decoding.make_decode(model, (), _SPAN)
    self._slots = generate.length_bucket(length + _SPAN)
    rows = generate.batch_bucket(batch, config)
    self._prompts = (
      np.ones((rows, length), np.int32),
      np.zeros(rows, np.int32),
      np.arange(rows, dtype=np.int32),
      np.zeros(rows, bool),
    )
    self._state = jax.block_until_ready(self.prefill())
    self._start = int(self._state.slot)

  def prefill(self) -> Any:
    """Reads the prompts into a new cache, and returns the decoding state."""
    return self._read(self._params, *self._prompts, self._slots)

  def decode(self) -> jax.Array:
    """Generates `_SPAN` tokens after the prompts.

    Every call writes them over those of the one before, so that none of them
    reads the prompts again.
    """
    state = dataclasses.replace(self._state, slot=np.int32(self._start))
    numbers = decoding.span_numbers(Sampling(), 0, _SPAN)
    self._state, tokens, _ = self._write(
      self._params, state, numbers, True, False
    )
    return tokens


def _form(model: LLMConfig, new: int) -> tuple[str, float]:
  """The form in which new tokens attend, and the heads that it computes."""
  form = choose_cached_form(
    model.attention_impl, target(), new=new, head_dim=model.head_dim
  )
  return form, model.activated_share if form == "kernel" else 1.0
