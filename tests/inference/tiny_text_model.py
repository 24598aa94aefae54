"""A decoder small enough for tests of scores, for text as bytes."""

import jax
import numpy as np

from moh_jax import config as config_lib
from moh_jax.data.tokenizers import BytesTokenizer
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint
from moh_jax.runtime.sharding import abstract_params, unbox

CONFIG = config_lib.Config(
  model=config_lib.LLMConfig(
    vocab_size=264,  # a few more than bytes need, as real models have
    max_length=48,
    width=16,
    mlp_dim=24,
    num_heads=(4, 4),
    num_kv_heads=2,
    head_dim=4,
    shared_heads=(1, 1),
    top_k=(2, 2),
    loss_chunk=20,
  ),
  data=config_lib.TextDataConfig(sequence_length=16, batch_size=2),
  checkpoint=config_lib.CheckpointConfig(async_save=False),
  tune=config_lib.TuneConfig(),
)


def params(config=CONFIG, seed=0):
  """Random parameters, far from a uniform prediction."""
  rng = np.random.RandomState(seed)
  return jax.tree.map(
    lambda leaf: np.float32(rng.normal(0, 0.5, leaf.shape)),
    unbox(abstract_params(*make_model(config))),
  )


def save(directory, config=CONFIG):
  """Writes `params` as the checkpoint of step 0, with the bytes tokenizer."""
  metadata = checkpoint.Metadata(config, tokenizer_sha256=BytesTokenizer.sha256)
  checkpoint.save_params(directory, params(config), metadata)
