"""A language model as the evaluation harness (lm-eval) asks it.

This module imports `lm_eval`, of the extra `moh_jax[llm]`; `harness.py` checks
that it is there.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tqdm
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation.harness import first_token, generation_options

_CALL = 128  # prompts of a call of `generate`, so that the bar moves


@dataclasses.dataclass(eq=False)
class HarnessModel(LM):
  """Answers the harness's requests, in one process on any number of devices.

  Text becomes tokens as in the harness's own adapter of Hugging Face models:
  a context's trailing spaces belong to its continuation; both are encoded
  together and the continuation is what the context alone does not account for;
  an empty context is the begin of text; contexts are cut from the left. Where
  the context accounts for all tokens, the continuation is the last of them.

  Attributes:
    tokenizer: of the model; it has a begin or an end of text.
    scorer: an `inference.score.Scorer`.
    generate: (prompts as token ids; options of `generation_options`, and
      `seed`) -> the texts that follow them. A stop string, and what comes after
      it, may be there.
    add_bos: contexts begin with the begin of text where the tokenizer says so,
      as documents in training do. False leaves it to empty contexts.
    progress: show bars on stderr.
  """

  tokenizer: Tokenizer
  scorer: Any
  generate: Callable[..., Sequence[str]]
  add_bos: bool = True
  progress: bool = False

  def __post_init__(self):
    super().__init__()
    self._prefix = first_token(self.tokenizer, "text")
    begins = self.add_bos and self.tokenizer.add_bos
    self._before = [self._prefix] if begins else []

  def loglikelihood(
    self, requests: Sequence[Instance]
  ) -> list[tuple[float, bool]]:
    """Nats of continuations after contexts, and whether each is greedy."""
    texts = [_split(*request.args) for request in requests]
    encoded = self._encode_all(
      text for pair in texts for text in (pair[0], "".join(pair))
    )
    pairs = []
    for request, (context, continuation) in zip(requests, texts):
      whole, before = encoded[context + continuation], encoded[context]
      if continuation and not whole:
        raise ValueError(
          f"task {request.task_name!r}, document {request.doc_id}: no token "
          f"stands for the answer {continuation!r}"
        )
      if continuation and len(whole) <= len(before):
        before = whole[:-1]  # the answer is a part of the last token
      start = self._before + before if context else []
      pairs.append((start or [self._prefix], whole[len(before) :]))
    scores = self.scorer.log_likelihoods(pairs, progress=self.progress)
    return [(score.log_likelihood, score.greedy) for score in scores]

  def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
    """Nats of whole texts."""
    encoded = self._encode_all(request.args[0] for request in requests)
    windows = [
      self.scorer.rolling(encoded[request.args[0]], self._prefix)
      for request in requests
    ]
    pairs = [pair for of_text in windows for pair in of_text]
    scores = iter(self.scorer.log_likelihoods(pairs, progress=self.progress))
    return [
      sum(next(scores).log_likelihood for _ in of_text) for of_text in windows
    ]

  def generate_until(self, requests: Sequence[Instance]) -> list[str]:
    """Continuations up to the first of the task's stop strings.

    Raises:
      ValueError: an option that is not known, or no space for a context.
    """
    encoded = self._encode_all(request.args[0] for request in requests)
    # Prompts that have the same options, by their place.
    groups: dict[str, tuple[dict[str, Any], dict[int, list[int]]]] = {}
    for index, request in enumerate(requests):
      options = generation_options(request.args[1])
      space = self.scorer.max_length - options["max_new_tokens"]
      if space < 1:
        raise ValueError(
          f"max_gen_toks={options['max_new_tokens']} of task "
          f"{request.task_name!r} must be less than model.max_length="
          f"{self.scorer.max_length}"
        )
      ids = self._before + encoded[request.args[0]] or [self._prefix]
      _, prompts = groups.setdefault(repr(options), (options, {}))
      prompts[index] = ids[-space:]
    texts = [""] * len(requests)
    seed, hidden = 0, not self.progress
    with tqdm.tqdm(total=len(requests), unit="text", disable=hidden) as bar:
      for options, prompts in groups.values():
        order = sorted(prompts, key=lambda i: -len(prompts[i]))
        for start in range(0, len(order), _CALL):
          part = order[start : start + _CALL]
          ids = [prompts[index] for index in part]
          made = self.generate(ids, **options, seed=seed)
          for index, text in zip(part, made):
            for stop in options["stop"]:
              text = text.partition(stop)[0]
            texts[index] = text
          bar.update(len(part))
          seed += 1  # or repeats of a question in two calls would be the same
    return texts

  def _encode_all(self, texts: Iterable[str]) -> dict[str, list[int]]:
    """Token ids of each distinct text."""
    distinct = list(dict.fromkeys(texts))
    return dict(zip(distinct, self.tokenizer.encode_batch(distinct)))


def _split(context: str, continuation: str) -> tuple[str, str]:
  """Moves the context's trailing spaces to its continuation."""
  bare = context.rstrip()
  if not bare:  # nothing but spaces: they cannot be a context of their own
    return "", context + continuation
  return bare, context[len(bare) :] + continuation
