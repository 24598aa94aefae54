"""Exported folders and what our models compute, for tests with transformers.

A case is a folder: `ours`, a checkpoint; `hf`, what `export` made of it; and
`io.npz`, our results.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import LLMConfig, RotaryConfig, RouterConfig, TrainConfig
from moh_jax.convert import rules, tensor_files
from moh_jax.convert.checkpoints import export, model_rules
from moh_jax.convert.llama import released_run
from moh_jax.models.llm import LLM
from moh_jax.runtime import checkpoint
from tests.convert import tiny_llm

BALANCE_WEIGHT = 0.5
GREEDY = 64  # tokens
PROMPT = 8
_BASE = {
  "vocab_size": 97,
  "width": 48,
  "mlp_dim": 64,
  "num_heads": (6,) * 3,
  "num_kv_heads": 3,
  "head_dim": 8,
  "max_length": 128,
  "loss_chunk": 0,
  "shared_heads": (2, 2, 2),
  "top_k": (2, 1, 3),
}
_QUERY_NORM = {"shared_heads": (3,) * 3, "top_k": (1,) * 3}
_PER_GROUP = {"num_heads": (12,) * 3, "shared_heads": (3, 0, 12)}
_PER_GROUP |= {"top_k": (3, 6, 0)}
# Of two routed groups the scores by norm would be constant, with gradients that
# are rounding errors.
_WHOLE_GROUP = {"num_heads": (12,) * 3, "num_kv_heads": 4}
_WHOLE_GROUP |= {"shared_heads": (3, 0, 3), "top_k": (3, 6, 3)}
_MIXED = (8, 4, 2, 3, 11, 1, 6, 9, 0, 5, 10, 7)
_ORDER = ((5, 0, 3, 2, 1, 4), (1, 2, 3, 4, 5, 0), (0, 1, 2, 3, 4, 5))
_PLAIN = {"router": RouterConfig("none"), "shared_heads": (6,) * 3}
_PLAIN |= {"top_k": (0,) * 3}
CASES = {
  "released_gates": {},
  "paper_gates": {"router": RouterConfig(gate_form="paper")},
  "one_shared": {
    "shared_heads": (1,) * 3,
    "tie_embeddings": True,
    "router": RouterConfig(two_stage=False),
  },
  "shared_only": {"shared_heads": (6, 2, 0), "top_k": (0, 2, 3)},
  "heads_by_layer": {
    "num_heads": (6, 9, 3),
    "shared_heads": (2, 3, 1),
    "top_k": (2, 2, 1),
  },
  "head_order": {
    **_QUERY_NORM,
    "router": RouterConfig("query_norm", straight_through="all"),
    "head_order": _ORDER,
    "qkv_bias": True,
    "rope": RotaryConfig(scaling="llama3", factor=4.0, original_length=16),
  },
  "qk_norm": {
    **_QUERY_NORM,
    "router": RouterConfig("query_norm"),
    "qk_norm": True,
    "rope": RotaryConfig(scaling="yarn", factor=4.0, original_length=16),
  },
  "per_group": {**_PER_GROUP, "router": RouterConfig(structure="per_group")},
  "per_group_norms": {
    **_PER_GROUP,
    "router": RouterConfig("query_norm", structure="per_group"),
    "head_order": (_MIXED,) * 3,
  },
  "whole_group": {
    **_WHOLE_GROUP,
    "router": RouterConfig(structure="whole_group"),
  },
  "no_router": {**_PLAIN, "out_bias": True},  # no architecture of transformers
  "llama": {**_PLAIN, "tie_embeddings": True},
  "qwen2": {**_PLAIN, "qkv_bias": True},
  "qwen3_tied": {
    **_PLAIN,
    "qk_norm": True,
    "tie_embeddings": True,
    "num_kv_heads": 6,
  },
  "linear": {
    **_PLAIN,
    **{"qkv_bias": True, "out_bias": True, "mlp_bias": True, "head_dim": 10},
    "rope": RotaryConfig(scaling="linear", factor=4.0),
  },
  "dynamic": {
    **_PLAIN,
    "rope": RotaryConfig(scaling="dynamic", factor=8.0, original_length=16),
  },
  "yarn_options": {
    **_PLAIN,
    "rope": RotaryConfig(
      theta=100.0,
      scaling="yarn",
      factor=4.0,
      original_length=16,
      beta_fast=4.0,
      beta_slow=0.5,
      truncate=False,
      attention_factor=1.3,
    ),
  },
}


def model(name: str) -> LLMConfig:
  """The model section of a case."""
  return LLMConfig(**{**_BASE, **CASES[name]})


def params(config: LLMConfig):
  """The parameters of a model; differences of scores are clear ones."""
  return jax.tree.map(lambda x: 2 * x, tiny_llm.random_params(config))


def inputs() -> tuple[np.ndarray, np.ndarray]:
  """Tokens [2, 20], and a mask [2, 20] that is False at the padding."""
  tokens = np.random.default_rng(0).integers(0, 97, (2, 20)).astype(np.int32)
  mask = np.ones(tokens.shape, bool)
  mask[1, 15:] = False
  return tokens, mask


def results(config: LLMConfig) -> dict[str, np.ndarray]:
  """What our model computes of `inputs`.

  Returns:
    "logits" [2, 20, V] and "balance" [], and both with "_padded" where the mask
    counts; "loss" [] of the next tokens with the balance loss, and its
    gradients as "gradients/PUBLIC NAME"; "greedy" [2, 64], the tokens that
    follow the first 8, written with our cache.
  """
  network, ours = LLM(config), params(config)
  tokens, mask = inputs()

  @jax.jit
  def compute(params):
    def loss(params):
      logits, aux = network.apply({"params": params}, tokens)
      scores = jax.nn.log_softmax(logits[:, :-1])
      of_next = jnp.take_along_axis(scores, tokens[:, 1:, None], -1)
      total = BALANCE_WEIGHT * aux.balance_loss - of_next.mean()
      return total, (logits, aux.balance_loss)

    (total, plain), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    padded, aux = network.apply({"params": params}, tokens, token_mask=mask)
    return total, plain, padded, aux.balance_loss, gradients

  with jax.default_matmul_precision("highest"):
    total, (logits, balance), padded, of_padded, gradients = compute(ours)
    written = greedy(config, ours)
  public = rules.dump_params(model_rules(config), gradients)
  return {
    "tokens": tokens,
    "mask": mask,
    "logits": logits,
    "balance": balance,
    "logits_padded": padded,
    "balance_padded": of_padded,
    "loss": total,
    "greedy": written,
    **{f"gradients/{n}": x for n, x in public.items()},
  }


def write_all(folder: pathlib.Path) -> None:
  """Writes every case into a folder of its name."""
  for name in CASES:
    (folder / name).mkdir(parents=True)
    write(folder / name, model(name))


def write(folder: pathlib.Path, config: LLMConfig) -> None:
  """Writes the case of a model."""
  run = released_run(config, {})
  train = TrainConfig(balance_weight=BALANCE_WEIGHT)
  run = dataclasses.replace(run, train=train)
  metadata = checkpoint.Metadata(run)
  checkpoint.save_params(folder / "ours", params(config), metadata)
  with mock.patch.object(tensor_files, "SHARD_SIZE", 20_000):
    export(str(folder / "ours"), str(folder / "hf"))
  np.savez(folder / "io.npz", **results(config))


def greedy(config: LLMConfig, params) -> np.ndarray:
  """The tokens that our cache writes after the first 8 of `inputs`."""
  return tiny_llm.greedy(config, params, inputs()[0][:, :PROMPT], GREEDY)


def run_checks(program: str, variable: str, *arguments: Any) -> Any:
  """Runs a program of this folder by the Python that a variable names.

  Returns:
    The JSON object that it printed last, or the end of its errors as text.
  """
  path = pathlib.Path(__file__).with_name(program)
  with tempfile.TemporaryDirectory() as modules:
    done = subprocess.run(
      [os.environ.get(variable, sys.executable), path, *arguments],
      env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": modules},
      capture_output=True,
      text=True,
      check=False,
    )
  if done.returncode:
    return done.stderr[-4000:]
  return json.loads(done.stdout.splitlines()[-1])


def measure(program: str, folder: pathlib.Path) -> dict[str, Any]:
  """What a program, run with transformers, prints of the cases in a folder."""
  found = run_checks(program, "MOH_JAX_TRANSFORMERS_PYTHON", folder)
  assert isinstance(found, dict), found
  return found
