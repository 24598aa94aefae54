"""Scores of language models: documents, and tasks of the harness (lm-eval).

The presets are the tasks and shots of the MoH paper (arXiv:2410.11842). It does
not say which of a task's metrics it reports; here that is the one that the
harness normalizes by the length of the answers (`acc_norm`) where there is one,
else accuracy or exact match. TruthfulQA is `truthfulqa_mc2`, LAMBADA is
`lambada_openai`, CEVAL the validation split, as its test answers are not
public. GSM8K counts answers in the form that its examples have
(`strict-match`). Of the 16 tasks of "paper-llama3" each of the paper's two
tables has 14.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moh_jax.config.base import near
from moh_jax.data.files import import_extra
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation.metrics import bits_per_byte, perplexity

_WINDOWS = 4096  # of documents, scored at one time: sorted by length
# Resamples for the standard error of metrics that are no means. The harness's
# 100,000 take minutes in one process, and a forked JAX may hang.
_RESAMPLES = 1000
_STDERR = "_stderr"
_MAX_NEW_TOKENS = 256  # where a task does not say, as in the harness
# Names of the same option, the first that is given counts.
_LENGTH_OPTIONS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_OPTIONS = ("until", "do_sample", "temperature", "top_k", "top_p")


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


@dataclasses.dataclass(frozen=True)
class TaskChoice:
  """A task to run.

  Attributes:
    name: of a task, group or tag of the harness.
    shots: examples before each question; None is the task's own number.
    metric: the one that counts, "METRIC" or "METRIC,FILTER"; "" is the first of
      `MAIN_METRICS` that the task has.
  """

  name: str
  shots: int | None = None
  metric: str = ""


# Shares of right answers, so that their mean over tasks says something.
MAIN_METRICS = ("acc_norm", "acc", "exact_match", "em", "f1")

PRESETS: Mapping[str, tuple[TaskChoice, ...]] = {
  "paper-small": (
    TaskChoice("sciq", 0, "acc_norm"),
    TaskChoice("piqa", 0, "acc_norm"),
    TaskChoice("winogrande", 0, "acc"),
    TaskChoice("openbookqa", 0, "acc_norm"),
    TaskChoice("logiqa", 0, "acc_norm"),
    TaskChoice("truthfulqa_mc2", 0, "acc"),
  ),
  "paper-llama3": (
    TaskChoice("mmlu", 5, "acc"),
    TaskChoice("ceval-valid", 5, "acc"),
    TaskChoice("cmmlu", 5, "acc"),
    TaskChoice("gsm8k", 8, "exact_match,strict-match"),
    TaskChoice("truthfulqa_mc2", 0, "acc"),
    TaskChoice("hellaswag", 10, "acc_norm"),
    TaskChoice("logiqa", 0, "acc_norm"),
    TaskChoice("boolq", 32, "acc"),
    TaskChoice("lambada_openai", 0, "acc"),
    TaskChoice("sciq", 0, "acc_norm"),
    TaskChoice("piqa", 0, "acc_norm"),
    TaskChoice("winogrande", 0, "acc"),
    TaskChoice("nq_open", 32, "exact_match,remove_whitespace"),
    TaskChoice("arc_easy", 0, "acc_norm"),
    TaskChoice("arc_challenge", 25, "acc_norm"),
    TaskChoice("openbookqa", 0, "acc_norm"),
  ),
}


def choose_tasks(text: str, shots: int | None = None) -> tuple[TaskChoice, ...]:
  """Reads a choice of tasks.

  Args:
    text: names of tasks and presets, separated by commas.
    shots: examples before each question; None is as many as the preset or the
      task says.

  """
  chosen: list[TaskChoice] = []
  for name in map(str.strip, text.split(",")):
    chosen += PRESETS.get(name, [TaskChoice(name)])
  if shots is not None:
    chosen = [dataclasses.replace(choice, shots=shots) for choice in chosen]
  return tuple(chosen)


def main_metric(wanted: str, metrics: Sequence[str]) -> str:
  """The metric of a task that counts.

  Args:
    wanted: a choice's `metric`.
    metrics: of the task, "METRIC" or "METRIC,FILTER".

  Returns:
    `wanted` where the task has it, else the first of `MAIN_METRICS`, or "" if
    it has none of them.
  """
  found = [wanted] if wanted in metrics else []
  for name in MAIN_METRICS:
    found += [m for m in metrics if m.partition(",")[0] == name]
  return next(iter(found), "")


# A choice, and what the harness's `simple_evaluate` takes to run it.
OpenTask = tuple[TaskChoice, dict[str, Any]]


def open_tasks(
  choices: Sequence[TaskChoice], include_path: str | None = None
) -> list[OpenTask]:
  """Opens tasks and their data, which comes from the Hugging Face Hub.

  Args:
    choices: what to run.
    include_path: a folder of further tasks (YAML files).

  Raises:
    ValueError: the library is missing, a task is unknown or its data cannot be
      loaded.
  """
  import_extra("lm_eval", "the evaluation harness")
  from lm_eval.tasks import TaskManager

  manager = TaskManager(include_path=include_path)
  for choice in choices:
    if choice.name not in manager.all_tasks:
      hint = near(choice.name, manager.all_tasks)
      raise ValueError(f"task {choice.name!r} is none of the harness's{hint}")
  opened = []
  for choice in choices:
    name = choice.name
    try:
      found = manager.load([name])
    except Exception as error:  # whatever its data set's reader raises
      text = f"task {name!r} cannot be loaded: {type(error).__name__}: {error}"
      if "scripts are no longer supported" in str(error):
        text += "; pip install 'datasets<4', or give a copy in --include-path"
      raise ValueError(text) from error
    # A tag has tasks alone; a group is summed where its own rules say so.
    group = found["groups"].get(name)
    tasks = [group] if group else list(found["tasks"].values())
    opened.append((choice, {"tasks": tasks, "task_manager": manager}))
  return opened


def generation_options(given: Mapping[str, Any]) -> dict[str, Any]:
  """A task's options of generation under our names.

  Args:
    given: "until", "max_gen_toks" (or "max_new_tokens", "max_tokens"),
      "do_sample", "temperature", "top_k", "top_p".

  Returns:
    "stop", "max_new_tokens", "temperature" (0 is greedy), "top_k", "top_p".

  Raises:
    ValueError: an option that is not known; it would change the metrics.
  """
  known = *_OPTIONS, *_LENGTH_OPTIONS
  given = {n: v for n, v in given.items() if v is not None}
  for name, value in given.items():
    if name not in known and (name, value) != ("num_beams", 1):
      raise ValueError(
        f"generation option {name}={value!r} must be one of {known}"
      )
  until = given.get("until", ())
  stop = (until,) if isinstance(until, str) else until
  lengths = [given[n] for n in _LENGTH_OPTIONS if n in given]
  temperature = float(given.get("temperature", 1.0))
  sampled = given.get("do_sample", bool(given.get("temperature")))
  return {
    "stop": tuple(filter(None, stop)),
    "max_new_tokens": int((lengths or [_MAX_NEW_TOKENS])[0]),
    "temperature": temperature if sampled else 0.0,
    "top_k": int(given.get("top_k", 0)),
    "top_p": float(given.get("top_p", 1.0)),
  }


def run_tasks(
  opened: Iterable[OpenTask], model: Any, *, limit: int | None = None
) -> dict[str, Any]:
  """Runs the tasks.

  Args:
    opened: the tasks; they can be run again.
    model: a `HarnessModel`.
    limit: documents of each task at most.

  Returns:
    "tasks": a row of metrics by name, see `_row`; "mean" of their main metrics,
    None where there is none; "lm_eval", the library's version.
  """
  from lm_eval import simple_evaluate

  os.environ.setdefault("DISABLE_MULTIPROC", "1")  # resamples in this process
  rows = {}
  for choice, arguments in opened:
    with contextlib.redirect_stdout(sys.stderr):
      results = simple_evaluate(
        model=model,
        **arguments,
        num_fewshot=choice.shots,
        limit=limit,
        bootstrap_iters=_RESAMPLES,
        log_samples=False,
        torch_random_seed=None,
      )
    is_summed = choice.name in results.get("groups", {})
    names = [choice.name] if is_summed else results["configs"]
    rows |= {name: _row(results, name, choice.metric) for name in names}
  main = [r["metrics"][r["main"]]["value"] for r in rows.values() if r["main"]]
  return {
    "tasks": rows,
    "mean": float(np.mean(main)) if main else None,
    "lm_eval": importlib.metadata.version("lm_eval"),
  }


def _row(results: dict[str, Any], name: str, metric: str) -> dict[str, Any]:
  """Metrics of a task or group.

  Returns:
    "shots", None of a group; "documents"; "version"; "metrics": name -> "value"
    and "stderr" (None where there is none); "main", the metric that counts in
    the mean ("": it does not).
  """
  found, metrics = results["results"][name], {}
  higher = results["higher_is_better"].get(name, {})
  for key, value in found.items():
    label, comma, kind = key.partition(",")
    if not comma or label.endswith(_STDERR):
      continue
    stderr = found.get(f"{label}{_STDERR},{kind}")
    metrics[label if kind == "none" else key] = {
      "value": _number(value),
      "stderr": _number(stderr),
      "higher_is_better": higher.get(label, True),
    }
  return {
    "shots": results["n-shot"].get(name),
    "documents": found["sample_len"],
    "version": results["versions"].get(name),
    "metrics": metrics,
    "main": main_metric(metric, list(metrics)),
  }


def _number(value: Any) -> float | None:
  """A metric; the harness writes "N/A" where there is none."""
  is_number = isinstance(value, int | float | np.number)
  return float(value) if is_number else None
