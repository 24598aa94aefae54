"""How well a language model predicts whole documents."""

from collections.abc import Iterable
from typing import Any

from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation.text_metrics import bits_per_byte, perplexity

_WINDOWS = 4096  # scored at one time: sorted by length, and in memory


def score_documents(
  scorer: Any, tokenizer: Tokenizer, texts: Iterable[str], *, progress=False
) -> dict[str, float]:
  """Scores every token of every document once.

  Documents are independent. One that is longer than the model's range is read
  in windows with one token of context; the end of a document is not predicted.

  Args:
    scorer: an `inference.score.Scorer`.
    tokenizer: of the model.
    texts: the documents.
    progress: show bars on stderr.

  Returns:
    "bits_per_byte", "perplexity" (per token), "word_perplexity" (words are what
    stands between white space), "nats", and the numbers of "tokens", "words",
    "bytes" (UTF-8) and "documents".

  Raises:
    ValueError: the tokenizer has neither begin nor end of text, or there is no
      text.
  """
  prefix = first_token(tokenizer, "document")
  counts = dict.fromkeys(("tokens", "words", "bytes", "documents"), 0)
  nats = 0.0
  windows: list[tuple[list[int], list[int]]] = []

  def score() -> float:
    scores = scorer.log_likelihoods(windows, progress=progress)
    windows.clear()
    return -sum(score.log_likelihood for score in scores)

  for text in texts:
    tokens = tokenizer.encode(text)
    windows += scorer.rolling(tokens, prefix)
    counts["tokens"] += len(tokens)
    counts["words"] += len(text.split())
    counts["bytes"] += len(text.encode())
    counts["documents"] += 1
    if len(windows) >= _WINDOWS:
      nats += score()
  nats += score()
  if not counts["tokens"] or not counts["words"]:
    raise ValueError(f"the text to score is empty: {counts}")
  return {
    "bits_per_byte": bits_per_byte(nats, counts["bytes"]),
    "perplexity": perplexity(nats, counts["tokens"]),
    "word_perplexity": perplexity(nats, counts["words"]),
    "nats": nats,
    **counts,
  }


def first_token(tokenizer: Tokenizer, what: str) -> int:
  """The id that stands before the first token of a text: begin, else end.

  Args:
    tokenizer: of the model.
    what: what is scored, for the message.

  Raises:
    ValueError: the tokenizer has neither.
  """
  for token in (tokenizer.bos_id, tokenizer.eos_id):
    if token is not None:
      return token
  raise ValueError(
    f"the tokenizer ({tokenizer.kind}) has neither begin nor end of text; "
    f"one of them must stand before a {what}'s first token"
  )
