"""A small model that answers questions about Python's standard library.

  python train.py --config=configs/chat_docstrings.py --workdir=DIR
  python -m moh_jax generate --checkpoint DIR --chat \
    --prompt "What does os.path.join do?"

The questions and answers are made of docstrings on first use, and only the
answers are trained. The network is that of llm_stdlib.py: with
`--config.train.init_from=DIR`, a run of that file, it has read Python before.
"""

import ml_collections

from moh_jax import config as lib

_DEPTH = 4


def get_config() -> ml_collections.ConfigDict:
  config = lib.Config(
    lib.LLMConfig(
      max_length=1024,
      width=256,
      mlp_dim=704,
      num_heads=(8,) * _DEPTH,
      num_kv_heads=8,
      head_dim=32,
      shared_heads=(3,) * _DEPTH,
      top_k=(3,) * _DEPTH,
      tie_embeddings=True,
      loss_chunk=0,
    ),
    data=lib.TextDataConfig(
      source="docstrings",
      path="data/docstrings",
      sequence_length=256,
      num_threads=1,
    ),
    optim=lib.OptimConfig(
      lr=2e-3, final_lr=1e-4, warmup_steps=40, b2=0.95, weight_decay=0.1
    ),
    train=lib.TrainConfig(steps=600),
    checkpoint=lib.CheckpointConfig(every=200),
    eval=lib.EvalConfig(every=0, batch_size=16),
  )
  return lib.to_config_dict(config)
