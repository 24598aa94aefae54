"""A tokenizer.json of 26 words of two letters, "aA" to "zZ"."""

import functools
import io
import string

import tokenizers as hf

from moh_jax.data.tokenizers import BEGIN, END, JsonTokenizer

WORDS = tuple(c + c.upper() for c in string.ascii_lowercase)  # ids 1 to 26


def tokenizer(extra=(), spaced=False):
  """The tokenizer; further words make it another one.

  Ids: 0 is an unknown pair of letters, 27 begin and 28 end of text. If
  `spaced`, a word has the space before it, as with SentencePiece.
  """
  words = [f"\u2581{word}" if spaced else word for word in WORDS]
  vocab = {word: i for i, word in enumerate(("[?]", *words))}
  made = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token="[?]"))
  made.pre_tokenizer = hf.pre_tokenizers.Split(hf.Regex(".."), "isolated")
  made.decoder = hf.decoders.Fuse()
  if spaced:
    made.pre_tokenizer = hf.pre_tokenizers.Metaspace()
    made.decoder = hf.decoders.Metaspace()
  made.add_special_tokens([BEGIN, END, *extra])
  return JsonTokenizer(made.to_str().encode())


@functools.cache
def sentencepiece_model() -> bytes:
  """A SentencePiece model of English and Python."""
  import sentencepiece

  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["def head(x): return x", "the heads of a layer"]),
    model_writer=model,
    vocab_size=300,
    model_type="bpe",
    byte_fallback=True,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  return model.getvalue()
