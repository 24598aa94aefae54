"""Which tasks of the evaluation harness, with how many examples each.

The presets are the tasks and shots of the MoH paper (arXiv:2410.11842). It does
not say which of a task's metrics it reports; here that is the one that the
harness normalizes by the length of the answers (`acc_norm`) where there is one,
else accuracy or exact match. TruthfulQA is `truthfulqa_mc2`, LAMBADA is
`lambada_openai`, CEVAL the validation split, as its test answers are not
public. GSM8K counts answers in the form that its examples have
(`strict-match`).

Of the 16 tasks of "paper-llama3" each of the paper's two tables has 14.
"""

import dataclasses
from collections.abc import Mapping, Sequence


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

  Raises:
    ValueError: no name, one twice, or a negative number of shots.
  """
  if shots is not None and shots < 0:
    raise ValueError(f"num_fewshot={shots} must be at least 0")
  names = [name.strip() for name in text.split(",")]
  if not all(names):
    raise ValueError(
      f"tasks={text!r} must be names separated by commas: of the harness's "
      f"tasks, and {tuple(PRESETS)}"
    )
  chosen = [c for name in names for c in PRESETS.get(name, [TaskChoice(name)])]
  counts = [choice.name for choice in chosen]
  twice = sorted({name for name in counts if counts.count(name) > 1})
  if twice:
    raise ValueError(f"tasks={text!r} must name a task once, not {twice} twice")
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
  if wanted in metrics:
    return wanted
  for name in MAIN_METRICS:
    for metric in metrics:
      if metric.partition(",")[0] == name:
        return metric
  return ""
