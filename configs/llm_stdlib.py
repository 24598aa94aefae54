"""MoH-LLM on the Python standard library's own sources: minutes on a laptop.

  python train.py --config=configs/llm_stdlib.py --workdir=DIR
  python -m moh_jax generate --checkpoint DIR --prompt "def main(" \
    --max-new-tokens 64

Arguments: moh (default; 75 % of the heads), moh50 (50 %), mha (the multi-head
baseline), bytes (75 %, bytes in place of a trained vocabulary).
"""

import ml_collections

from moh_jax import config as config_lib

ARGUMENTS = ("moh", "moh50", "mha", "bytes")


def get_config(arg: str = "moh") -> ml_collections.ConfigDict:
  depth, heads = 4, 2 if arg == "moh50" else 3
  model = config_lib.LLMConfig(
    max_length=1024,
    width=256,
    mlp_dim=704,
    num_heads=(8,) * depth,
    num_kv_heads=8,
    head_dim=32,
    shared_heads=(heads,) * depth,
    top_k=(heads,) * depth,
    tie_embeddings=True,
    loss_chunk=0,
  )
  if arg == "mha":
    model = config_lib.without_router(model)
  return config_lib.to_config_dict(
    config_lib.Config(
      model=model,
      data=config_lib.TextDataConfig(
        source="stdlib",
        path="data/stdlib",
        tokenizer="bytes" if arg == "bytes" else "bpe",
        sequence_length=256,
        batch_size=8,
        num_threads=1,
      ),
      optim=config_lib.OptimConfig(
        lr=2e-3,
        schedule="cosine",
        final_lr=1e-4,
        warmup_steps=40,
        b2=0.95,
        weight_decay=0.1,
        clip_norm=1.0,
      ),
      train=config_lib.TrainConfig(steps=400),
      checkpoint=config_lib.CheckpointConfig(every=100),
      eval=config_lib.EvalConfig(every=0, batch_size=16),
      log=config_lib.LogConfig(every=50),
    )
  )
