"""A small MoH-LLM on token sets of your own: copy it and change what differs.

  python -m moh_jax train --config=docs/examples/my_text.py --workdir=DIR \
    --config.data.path=TOKENS/mine

TOKENS/mine holds train/ and val/, as `prepare tokenize` writes them.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Describes the run; what is not named here has its default."""
  depth = 4
  return ml_collections.ConfigDict(
    {
      "model": {
        "family": "llm",
        "max_length": 1024,  # tokens of a prompt with what is written after it
        "width": 256,
        "mlp_dim": 704,
        "num_heads": (8,) * depth,
        "num_kv_heads": 8,
        "head_dim": 32,
        "shared_heads": (3,) * depth,
        "top_k": (3,) * depth,  # 75 % of the heads are active
        "tie_embeddings": True,
      },
      "data": {
        "source": "tokens",
        "path": "TOKENS/mine",  # its tokenizer says how many ids there are
        "sequence_length": 256,
        "batch_size": 8,
      },
      "optim": {"lr": 2e-3, "weight_decay": 0.1, "clip_norm": 1.0},
      "train": {"steps": 2000},
    }
  )
