"""MoH-LLM on the Python standard library's own sources: minutes on a laptop.

  python train.py --config=configs/llm_stdlib.py --workdir=DIR
  python -m moh_jax generate --checkpoint DIR --prompt "def main(" \
    --max-new-tokens 64

Arguments: moh (default; 75 % of the heads), moh50 (50 %), mha (the multi-head
baseline), bytes (75 %, bytes in place of a trained vocabulary), grouped (75 %
of 16 heads, which read 4 heads of keys and values: every
`--config.model.router.structure` fits), chat (75 %, questions about the
library, answered by its docstrings; only the answers are trained, and with
`--config.train.init_from=DIR`, a run of moh, the model has read Python before):

  python -m docs.examples.docstrings data/docstrings
  python train.py --config=configs/llm_stdlib.py:chat --workdir=CHAT
  python -m moh_jax generate --checkpoint CHAT --chat \
    --prompt "What does os.path.join do?"

Four more continue-tune the multi-head model into MoH, as `llama3_moh.py:stage2`
does with LLaMA3, in a minute or two: query-norm router, half of the heads
shared, a quarter chosen by each token.

  python train.py --config=configs/llm_stdlib.py:mha --workdir=MHA
  python train.py --config=configs/llm_stdlib.py:tune --workdir=DIR \
    --config.train.init_from=MHA

They are tune (the first heads are shared), importance:FILE (those that
`python -m moh_jax heads --json FILE` found most important), schedule (all heads
on at first, then fewer step by step), tune_mha (nothing but more steps).
"""

import dataclasses
import json
import pathlib

import ml_collections

from moh_jax import config as lib

_TUNING = ("tune", "importance", "schedule", "tune_mha")
ARGUMENTS = ("moh", "moh50", "mha", "bytes", "grouped", "chat", *_TUNING)
_DEPTH = 4
# Query heads, key/value heads, shared heads, and those that a token chooses.
_HEADS = {"moh50": (8, 8, 2, 2), "grouped": (16, 4, 4, 8)}


def get_config(arg: str = "moh") -> ml_collections.ConfigDict:
  kind, _, order = arg.partition(":")
  if (kind == "importance") != bool(order):
    raise ValueError(f"{arg}: importance:FILE, and it alone, names a file")
  heads, groups, shared, chosen = _HEADS.get(kind, (8, 8, 3, 3))
  model = lib.LLMConfig(
    max_length=1024,
    width=256,
    mlp_dim=704,
    num_heads=(heads,) * _DEPTH,
    num_kv_heads=groups,
    head_dim=256 // heads,
    shared_heads=(shared,) * _DEPTH,
    top_k=(chosen,) * _DEPTH,
    attention_out_multiplier=0.125,  # the best in docs/results.md
    tie_embeddings=True,
    loss_chunk=0,
  )
  config = lib.Config(
    lib.without_router(model) if kind in ("mha", *_TUNING) else model,
    data=lib.TextDataConfig(
      source="stdlib",
      path="data/stdlib",
      tokenizer="bytes" if kind == "bytes" else "bpe",
      sequence_length=256,
      num_threads=1,
    ),
    optim=lib.OptimConfig(
      lr=2e-3, final_lr=1e-4, warmup_share=0.1, b2=0.95, weight_decay=0.1
    ),
    train=lib.TrainConfig(steps=400),
    eval=lib.EvalConfig(every=0, batch_size=16),
  )
  if kind == "chat":
    folder = "data/docstrings"
    config = dataclasses.replace(
      config,
      data=lib.TextDataConfig(
        source="chat",
        template="chatml",
        path=folder,
        tokenizer_path=folder,
        sequence_length=256,
        num_threads=1,
      ),
      train=lib.TrainConfig(steps=600),
    )
  if kind in _TUNING:
    config = _tuned(config, kind, order)
  return lib.to_config_dict(config)


def _tuned(config: lib.Config, kind: str, order: str) -> lib.Config:
  """A short run that makes the multi-head model an MoH."""
  model, tune = config.model, lib.TuneConfig()
  if kind != "tune_mha":
    model = dataclasses.replace(
      model,
      router=lib.RouterConfig("query_norm"),
      shared_heads=(4,) * _DEPTH,
      top_k=(2,) * _DEPTH,
    )
  if order:
    orders = json.loads(pathlib.Path(order).read_text())["head_order"]
    model = dataclasses.replace(model, head_order=orders)
  if kind == "schedule":
    tune = lib.TuneConfig(top_k_values=(4, 3, 2))
  rates = {"lr": 5e-4, "final_lr": 5e-5, "warmup_share": 0.0625}
  optim = dataclasses.replace(config.optim, **rates)
  train = dataclasses.replace(config.train, steps=80, seed=1)
  return dataclasses.replace(
    config, model=model, tune=tune, optim=optim, train=train
  )
