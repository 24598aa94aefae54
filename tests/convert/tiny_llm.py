"""Tiny language models as public checkpoints, for several tests."""

import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np

from moh_jax.config import LLMConfig, without_router
from moh_jax.config.llm import Sampling
from moh_jax.convert import llama_config, rules
from moh_jax.convert.llama import model_rules, released_run
from moh_jax.inference.decoding import make_decode, make_prefill, span_numbers
from moh_jax.models.llm import LLM, unroll
from moh_jax.models.registry import make_model
from moh_jax.runtime.parameters import abstract_params, unbox
from tests.convert.stored import save_tensors

MOH = LLMConfig(
  vocab_size=37,
  max_length=64,
  width=24,
  mlp_dim=20,
  num_heads=(6, 6, 6),
  num_kv_heads=3,
  head_dim=4,
  shared_heads=(2, 2, 3),
  top_k=(2, 2, 1),
  remat="dots",
)
MHA = without_router(MOH, shared_heads=(6,) * 3, top_k=(0,) * 3)
# What the release makes of 6 heads: 3 shared, 1 routed.
QUERY_NORM = llama_config.moh_llama3(MHA)


@functools.cache
def abstract(model: LLMConfig) -> Any:
  """Our parameter tree as ShapeDtypeStructs."""
  return unbox(abstract_params(*make_model(released_run(model, {}))))


def random_params(model: LLMConfig, dtype: str = "float32") -> Any:
  """Our parameters, of values that the dtype holds exactly."""
  rng = np.random.default_rng(0)

  def draw(leaf):
    values = rng.normal(size=leaf.shape, scale=0.2).astype(np.float32)
    return values.astype(dtype).astype(leaf.dtype)

  return jax.tree.map(draw, abstract(model))


def tensors(model: LLMConfig, dtype: str = "float32") -> dict[str, np.ndarray]:
  """The same under their public names."""
  dumped = rules.dump_params(model_rules(model), random_params(model, dtype))
  return {name: x.astype(dtype) for name, x in dumped.items()}


def greedy(
  model: LLMConfig,
  params: Any,
  prompts: np.ndarray,
  count: int,
  padding: Any = 0,
) -> np.ndarray:
  """Greedy tokens after prompts, by the programs of the `generate` command.

  Args:
    model: the model section.
    params: its parameters.
    prompts: [B, P].
    count: tokens to write.
    padding: [B] empty places before each prompt.

  Returns:
    [B, count] int32.
  """
  batch, length = prompts.shape
  network, params = LLM(model, unrolled=True), unroll(params, model)
  state = make_prefill(network, "float32")(
    params,
    prompts.astype(np.int32),
    np.broadcast_to(np.int32(padding), batch),
    np.arange(batch, dtype=np.int32),
    np.zeros(batch, bool),
    length + count,
  )
  numbers = span_numbers(Sampling(), count)
  decode = make_decode(network, (), count)
  return np.asarray(decode(params, state, numbers, True, False)[1])


def write_folder(
  folder: pathlib.Path,
  model: LLMConfig,
  dtype: str = "float32",
  shards: int = 1,
) -> dict[str, np.ndarray]:
  """Writes what transformers would; returns the tensors."""
  folder.mkdir(parents=True, exist_ok=True)
  stored = tensors(model, dtype)
  names = sorted(stored)  # so that a layer's tensors lie in several shards
  files = {
    f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards]
    for i in range(shards)
  }
  for file, held in files.items():
    content = {name: stored[name] for name in held}
    save_tensors(folder / file, content, {"format": "pt"})
  if shards > 1:
    weight_map = {name: file for file, held in files.items() for name in held}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
  (folder / "config.json").write_text(json.dumps(llama_config.to_hf(model)))
  return stored
