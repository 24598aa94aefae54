"""A decoder small enough for tests of scores, for text as bytes."""

import jax

from moh_jax.data.tokenizers import BytesTokenizer
from moh_jax.runtime import checkpoint
from tests.training import tiny

CONFIG = tiny.llm_config(
  model={
    "vocab_size": 264,  # a few more than bytes need, as real models have
    "max_length": 48,
    "width": 16,
    "head_dim": 4,
    "loss_chunk": 20,
  }
)


def params(config=CONFIG):
  """Random parameters, far from a uniform prediction."""
  return jax.tree.map(lambda x: 2.5 * x, tiny.random_params(config))


def save(directory, config=CONFIG):
  """Writes `params` as the checkpoint of step 0, with the bytes tokenizer."""
  metadata = checkpoint.Metadata(config, tokenizer_sha256=BytesTokenizer.sha256)
  checkpoint.save_params(directory, params(config), metadata)
