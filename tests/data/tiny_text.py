"""Small token sets of known tokens, without text behind them."""

import itertools

import numpy as np

from moh_jax.data.tokenizers import BytesTokenizer
from moh_jax.data.tokens import TokenSet, token_writer


def tokenizer(vocab_size=257, bos_id=256, eos_id=256):
  """A tokenizer of bytes that claims other numbers."""
  result = BytesTokenizer()
  result.vocab_size, result.bos_id, result.eos_id = vocab_size, bos_id, eos_id
  result.add_bos = bos_id is not None
  return result


def random_documents(shards, documents, longest, vocab_size=256, seed=0):
  """Ids of documents by shard."""
  rng = np.random.default_rng(seed)
  return [
    [
      rng.integers(0, vocab_size, rng.integers(1, longest + 1)).tolist()
      for _ in range(documents)
    ]
    for _ in range(shards)
  ]


def write(folder, documents, used=None):
  """Writes documents by shard; a document's text has 2 bytes a token."""
  used = used or tokenizer()
  writer = token_writer(folder, used, len(documents), {})
  for shard in writer.todo():
    with writer.open(shard) as target:
      for ids in documents[shard]:
        target.add(ids, 2 * len(ids))
  return writer.finish()


def row(documents):
  """All tokens of a set, [T] int32, and where its documents end, from 0."""
  pieces = [[256, *ids, 256] for shard in documents for ids in shard]
  ends = np.cumsum([0, *map(len, pieces)])
  return np.array([i for piece in pieces for i in piece], np.int32), ends


def texts(folder):
  """The documents of a set as its tokenizer decodes them."""
  token_set = TokenSet(folder)
  return [
    token_set.tokenizer.decode(token_set.tokens(start, stop))
    for start, stop in itertools.pairwise(token_set.ends)
  ]
