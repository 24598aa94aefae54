"""Runs tasks of the evaluation harness (lm-eval) and gathers their metrics."""

import contextlib
import dataclasses
import difflib
import importlib.metadata
import os
import pathlib
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from moh_jax.data.input_files import import_extra
from moh_jax.evaluation.harness_tasks import TaskChoice, main_metric

# Of the harness's own command, so that the examples before a question are the
# same; the first is that of Python's random numbers.
_SEED, _SHOTS_SEED = 0, 1234
# Resamples for the standard error of metrics that are no means. The harness's
# 100,000 take minutes in one process, and a forked JAX may hang.
_RESAMPLES = 1000
_STDERR = "_stderr"


@dataclasses.dataclass(frozen=True)
class HarnessTasks:
  """Tasks with their data.

  Attributes:
    choices: what was asked for.
    tasks: single tasks, by name.
    groups: groups of them, by name.
    rows: per choice, the names that get a row of metrics: the group itself, or
      single tasks.
  """

  choices: tuple[TaskChoice, ...]
  tasks: dict[str, Any]
  groups: dict[str, Any]
  rows: tuple[tuple[str, ...], ...]

  @property
  def need_generation(self) -> bool:
    """Whether the model has to write text."""
    kinds = {task.OUTPUT_TYPE for task in self.tasks.values()}
    return "generate_until" in kinds


def load_tasks(
  choices: Sequence[TaskChoice], include_path: str = ""
) -> HarnessTasks:
  """Opens tasks and their data, which comes from the Hugging Face Hub.

  Args:
    choices: what to run.
    include_path: a folder of further tasks (YAML files).

  Raises:
    FileNotFoundError: there is no such folder.
    ValueError: the library is missing, a task is unknown or asked for twice,
      its data cannot be loaded, or it asks for something that we do not have.
  """
  import_extra("lm_eval", "the evaluation harness")
  from moh_jax.evaluation.harness_model import generation_options

  if include_path and not pathlib.Path(include_path).is_dir():
    raise FileNotFoundError(f"include-path {include_path}: no such folder")
  manager = _open_manager([choice.name for choice in choices], include_path)
  random.seed(_SEED)  # tasks may shuffle their data
  np.random.seed(_SHOTS_SEED)
  tasks: dict[str, Any] = {}
  groups: dict[str, Any] = {}
  rows = []
  for choice in choices:
    found = _load(manager, choice.name)
    if twice := sorted(set(found["tasks"]) & set(tasks)):
      raise ValueError(f"task {twice[0]!r} is asked for twice")
    for name, task in found["tasks"].items():
      if task.OUTPUT_TYPE == "generate_until":
        try:
          generation_options(task.config.generation_kwargs or {})
        except ValueError as error:
          raise ValueError(f"task {name!r}: {error}") from error
      _set_shots(task, choice.shots)
    tasks.update(found["tasks"])
    groups.update(found["groups"])
    group = found["groups"].get(choice.name)
    summed = group is not None and group.has_aggregation
    rows.append((choice.name,) if summed else tuple(found["tasks"]))
  return HarnessTasks(tuple(choices), tasks, groups, tuple(rows))


def run_tasks(
  loaded: HarnessTasks, model: Any, *, limit: int | None = None
) -> dict[str, Any]:
  """Runs the tasks.

  Args:
    loaded: the tasks; they can be run again.
    model: a `HarnessModel`.
    limit: documents of each task at most.

  Returns:
    "tasks": a row of metrics by name, see `_row`; "mean" of their main metrics,
    None where there is none; "lm_eval", the library's version.

  Raises:
    ValueError: the limit is not positive.
  """
  from lm_eval.evaluator import evaluate

  if limit is not None and limit < 1:
    raise ValueError(f"limit={limit} must be at least 1")
  for task in loaded.tasks.values():
    task.set_fewshot_seed(_SHOTS_SEED)
  os.environ.setdefault("DISABLE_MULTIPROC", "1")  # resamples in this process
  with contextlib.redirect_stdout(sys.stderr):
    results = evaluate(
      lm=model,
      task_dict={"tasks": loaded.tasks, "groups": loaded.groups},
      limit=limit,
      bootstrap_iters=_RESAMPLES,
      log_samples=False,
    )
  rows = {
    name: _row(results, loaded, name, choice.metric)
    for choice, names in zip(loaded.choices, loaded.rows)
    for name in names
  }
  main = [r["metrics"][r["main"]]["value"] for r in rows.values() if r["main"]]
  return {
    "tasks": rows,
    "mean": float(np.mean(main)) if main else None,
    "lm_eval": importlib.metadata.version("lm_eval"),
  }


def _row(
  results: dict[str, Any], loaded: HarnessTasks, name: str, metric: str
) -> dict[str, Any]:
  """Metrics of a task or group.

  Returns:
    "shots"; "documents"; "version"; "metrics": name -> "value" and "stderr"
    (None where there is none); "main", the metric that counts in the mean ("":
    it does not); for a group "parts", the rows of its tasks.
  """
  found = results["results"][name]
  metrics = {}
  for key, value in found.items():
    label, comma, kind = key.partition(",")
    if not comma or label.endswith(_STDERR):
      continue
    stderr = found.get(f"{label}{_STDERR},{kind}")
    shown = label if kind == "none" else key
    metrics[shown] = {
      "value": _number(value),
      "stderr": _number(stderr),
      "higher_is_better": results["higher_is_better"]
      .get(name, {})
      .get(label, True),
    }
  group = loaded.groups.get(name)
  members = [task.task_name for task in group.get_all_tasks()] if group else []
  task = loaded.tasks[members[0] if group else name]
  row = {
    "shots": task.get_config("num_fewshot"),
    "documents": found["sample_len"],
    "version": results["versions"].get(name),
    "metrics": metrics,
    "main": main_metric(metric, list(metrics)),
  }
  if members:
    row["parts"] = {
      part: _row(results, loaded, part, metric) for part in members
    }
  return row


def _number(value: Any) -> float | None:
  """A metric; the harness writes "N/A" where there is none."""
  is_number = isinstance(value, int | float | np.number)
  return float(value) if is_number else None


def _open_manager(names: Sequence[str], include_path: str) -> Any:
  """The index of tasks; reading the harness's own takes seconds.

  Raises:
    ValueError: a task is in none.
  """
  from lm_eval.tasks import TaskManager

  if include_path:
    local = TaskManager(include_path=include_path, include_defaults=False)
    if set(names) <= set(local.all_subtasks):
      return local
  manager = TaskManager(include_path=include_path or None)
  for name in names:
    if name not in manager.all_tasks:
      near = difflib.get_close_matches(name, manager.all_tasks)
      raise ValueError(
        f"task {name!r} is none of the harness's"
        + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")
      )
  return manager


def _load(manager: Any, name: str) -> dict[str, Any]:
  try:
    return manager.load([name])
  except Exception as error:  # whatever its data set's reader raises
    text = f"task {name!r} cannot be loaded: {type(error).__name__}: {error}"
    if "scripts are no longer supported" in str(error):
      text += (
        "; pip install 'datasets<4' and set HF_DATASETS_TRUST_REMOTE_CODE=1 to "
        "run its reader, or give a copy of the task with other data in "
        "--include-path"
      )
    raise ValueError(text) from error


def _set_shots(task: Any, shots: int | None) -> None:
  """Sets the number of examples, but for tasks whose prompt has none."""
  own = task.get_config("num_fewshot")
  if task.OUTPUT_TYPE == "loglikelihood_rolling" or own == 0:
    shots = 0  # text without a question; the harness's own rule
  elif shots is None:
    shots = own or 0
  task.set_config(key="num_fewshot", value=shots)
