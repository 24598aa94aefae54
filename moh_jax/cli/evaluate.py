"""`python -m moh_jax evaluate`."""

import argparse
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh

from moh_jax import config as config_lib
from moh_jax.cli import common, distributed, fields
from moh_jax.cli.csv_file import write_csv
from moh_jax.config import EvalConfig, check_command
from moh_jax.data.infer import data_at
from moh_jax.evaluation import pictures, predictions
from moh_jax.inference.restore import Restored
from moh_jax.runtime import sharding
from moh_jax.runtime.files import write_whole
from moh_jax.runtime.json_files import read_json
from moh_jax.training import classification
from moh_jax.training.task import task_builder

_WORST = 5  # classes that are printed
_CLASSES = int | str | list[int | str]
_LABELS = list[_CLASSES] | dict[str, _CLASSES]


def run(args: argparse.Namespace) -> int:
  """Prints the metrics of the checkpoint's task on its held-out split."""
  is_first = distributed.join(args)
  if args.head_top_p and args.top_k:
    raise ValueError(
      f"--head-top-p {args.head_top_p} and --top-k exclude each other: one "
      "number of heads for every token, or as many as their scores ask for"
    )
  if args.per_class or args.labels_file:
    metadata, _ = common.read_metadata(args)
    option = "--per-class" if args.per_class else "--labels"
    where = f"{option}: {args.checkpoint}"
    check_command(metadata.config.model, "classify", where)
    if args.per_class and len(args.top_k or ()) > 1:
      raise ValueError(
        f"--per-class {args.per_class} takes one --top-k, not {args.top_k}"
      )
  if args.plot:
    pictures.check_plot(args.plot)
    if len(args.top_k or ()) < 2 or args.per_class or args.labels_file:
      raise ValueError(
        f"--plot {args.plot} needs several --top-k, without --per-class and "
        "--labels"
      )
  labels = None
  if args.labels_file:
    labels = read_json(args.labels_file, _LABELS)
  mesh = sharding.make_mesh(args.mesh)
  with sharding.use_mesh(mesh):
    restored = common.restore(args, mesh=mesh, top_k=None)
    choices = [restored.at_top_k(k) for k in args.top_k or ()] or [restored]
    config = _held_out(restored, args)
    sharding.check_batch("eval.batch_size", config.eval.batch_size, mesh)
    score = _score if args.per_class or labels is not None else _evaluate
    rows = [
      score(choice, _at(config, choice), mesh, args, labels)
      for choice in choices
    ]
  if is_first:
    _report(args, restored.step, choices, rows)
  return 0


def _held_out(
  restored: Restored, args: argparse.Namespace
) -> config_lib.Config:
  """The run with the held-out data that was asked for."""
  config = restored.config
  if args.data:
    data = data_at(config, args.data)
    config = config_lib.apply_overrides(config, "data", **data)
  given = fields.given_fields(args, EvalConfig, "batch_size", "examples")
  return config_lib.apply_overrides(config, "eval", **{"examples": 0, **given})


def _at(config: config_lib.Config, choice: Restored) -> config_lib.Config:
  top_k = choice.config.model.top_k
  return config_lib.apply_overrides(config, "model", top_k=top_k)


def _evaluate(
  restored: Restored,
  config: config_lib.Config,
  mesh: Mesh,
  args: argparse.Namespace,
  labels: None,
) -> dict[str, Any]:
  """The metrics of any family; with --plot also the time of an evaluation."""
  tasks = task_builder(config)
  evaluate = tasks.make_evaluate(restored.model, config, restored)
  metrics = evaluate(restored.params, mesh)
  if args.plot:  # again, now that the program is compiled
    began = time.perf_counter()
    evaluate(restored.params, mesh)
    metrics["seconds"] = time.perf_counter() - began
  return metrics


def _score(
  restored: Restored,
  config: config_lib.Config,
  mesh: Mesh,
  args: argparse.Namespace,
  labels: Any,
) -> dict[str, Any]:
  """The metrics of a classifier, from its predictions for each image."""
  source, predict = classification.make_predict(
    restored.model, config, restored
  )
  name_of: Callable[[int], str] = getattr(source, "name", str)
  numbers = map(str, range(config.model.num_classes))
  class_names = restored.class_names or tuple(numbers)
  if labels is not None:  # before the predictions, which take longer
    names = [name_of(i) for i in range(len(source))]
    try:
      right = predictions.read_right(labels, names, class_names)
    except ValueError as error:
      raise ValueError(f"--labels {args.labels_file}: {error}") from error
  found = predict(restored.params, mesh)
  if labels is None:
    metrics = predictions.scores(found)
  else:
    metrics = predictions.scores(found, [right[i] for i in found.index])
  if args.per_class:
    metrics["classes"] = predictions.by_class(found, class_names)
  return metrics


def _report(
  args: argparse.Namespace,
  step: int,
  choices: Sequence[Restored],
  rows: Sequence[dict[str, Any]],
) -> None:
  if len(rows) > 1:
    top_k = [list(choice.config.model.top_k) for choice in choices]
    runs = [{"top_k": k, **row} for k, row in zip(top_k, rows)]
    if args.json != "-":
      print(common.table([_cells(run) for run in runs], list(runs[0])))
    common.write_json(args.json, {"step": step, "runs": runs})
    if args.plot:
      form = pathlib.PurePath(args.plot).suffix[1:]
      content = pictures.encode(pictures.dial(rows), form)
      write_whole(pathlib.Path(args.plot), content)
    return
  classes = rows[0].pop("classes", None)
  common.report(args.json, {**rows[0], "step": step})
  if classes is None:
    return
  write_csv(args.per_class, list(classes[0]), [c.values() for c in classes])
  present = [row for row in classes if row["examples"]]
  worst = sorted(present, key=lambda row: row["accuracy"])[:_WORST]
  if args.json != "-":
    print(common.table([_cells(row) for row in worst], list(worst[0])))


def _cells(row: dict[str, Any]) -> list[str]:
  return [
    f"{value:.4f}" if isinstance(value, float) else str(value)
    for value in row.values()
  ]
