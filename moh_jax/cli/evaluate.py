"""`python -m moh_jax evaluate`."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moh_jax.cli import command
from moh_jax.config import Config, apply_overrides, check_command
from moh_jax.config.base import Count, Natural
from moh_jax.runtime.alive import alive

if TYPE_CHECKING:
  from jax.sharding import Mesh

  from moh_jax.inference.restore import Restored

_BATCH = "eval.batch_size"
_TEXTS = 8  # scored at a time, where `_BATCH` is not given

_Score = Callable[["Restored"], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(
  command.Checkpoint, command.Distributed, command.Texts, command.Output
):
  """Score a checkpoint on what its run held out, on other data, or on tasks.

  --config.eval.batch_size=N are examples at a time (text and tasks: 8 without
  it), --config.eval.examples=N takes some examples in place of all.

  Attributes:
    top_k: routed heads per token, one number for each layer (ViT: stage) or one
      for all, instead of the trained ones; given several times, a column for
      each.
    data: directory of images, shards, latents or tokens, instead of the run's;
      its val/, or all images of a folder without. Of language models also
      several of what `prepare tokenize` reads: files, addresses or quoted
      patterns of text.
    tasks: tasks, groups or tags of lm-eval (the extra moh_jax[llm]), as
      "T,T,...", or a preset: paper-small, paper-llama3.
    num_fewshot: examples before each question, instead of the preset's or the
      task's; tasks whose prompt has none keep it so.
    limit: documents of each task at most.
    include_path: folder of more tasks.
    no_bos: contexts of tasks do not begin with the begin of text, for models
      that were trained without.
  """

  top_k: tuple[tuple[int, ...], ...] = command.option("repeated", default=())
  data: tuple[command.Place, ...] = command.option("listed", default=())
  tasks: str | None = None
  num_fewshot: Natural | None = None
  limit: Count | None = None
  include_path: command.InPath | None = None
  no_bos: bool = False

  def check(self) -> None:
    """Options of one kind of score are not given with another."""
    super().check()
    for name in ("num_fewshot", "limit", "include_path", "no_bos"):
      self.need(name, self.tasks is not None, "needs --tasks")
    self.need("field", self.data, "needs --data")
    if len(set(self.top_k)) < len(self.top_k):
      self.fail("top_k", "must differ")

  def is_text(self, config: Config) -> bool:
    """Whether text or tasks are scored, not examples of a data set.

    Raises:
      ValueError: an option does not fit the model.
    """
    from moh_jax.config.registry import SPLITS
    from moh_jax.data.shards import METADATA

    is_text = self.tasks is not None
    if is_text:
      check_command(config.model, "generate", f"--tasks: {self.checkpoint}")
    elif self.data and config.model.READS_TEXT:
      parts = [pathlib.Path(self.data[0], n, METADATA) for n in SPLITS]
      is_text = not any(part.is_file() for part in parts)
    if len(self.data) > 1 and not is_text:
      self.fail("data", "must be one directory")
    return is_text


@alive("evaluating")
def run(options: Options) -> int:
  """Prints the metrics, a column for each --top-k."""
  options.join()
  from moh_jax.inference.restore import with_top_k
  from moh_jax.runtime.mesh import make_mesh, use_mesh
  from moh_jax.runtime.parameters import check_finite

  config = options.stored()[0].config
  for top_k in options.top_k:  # before anything large is read
    with_top_k(config.served(), top_k)
  mesh, is_text = make_mesh(config.mesh), options.is_text(config)
  with use_mesh(mesh):
    score = (_text if is_text else _held_out)(options, config, mesh)
    restored = options.restore(mesh=mesh, top_k=None)
    choices = [restored.at_top_k(k) for k in options.top_k] or [restored]
    rows = [score(choice) for choice in choices]
  for row in rows:
    check_finite(row.get("loss", 0.0), "the model's losses")
  if not is_text and len(rows) == 1:
    values = rows[0] | {"step": restored.step}
    options.give(values, command.metric_lines(values))
    return 0
  runs = [
    {"top_k": list(choice.config.model.top_k), **row}
    for choice, row in zip(choices, rows)
  ]
  values = {"checkpoint": options.checkpoint, "step": restored.step}
  values |= {"dtype": config.model.dtype, "runs": runs}
  options.give(values, [_columns(runs)])
  return 0


def _held_out(options: Options, config: Config, mesh: Mesh) -> _Score:
  """Scores on the held-out split of a data set, with the run's own metrics."""
  from moh_jax.data.infer import data_at
  from moh_jax.runtime.mesh import check_batch
  from moh_jax.training.task import task_builder

  check_batch(_BATCH, config.eval.batch_size, mesh)

  def score(restored: Restored) -> dict[str, Any]:
    config = restored.config
    if options.data:
      data = data_at(config, options.data[0])
      config = apply_overrides(config, "data", **data)
    tasks = task_builder(config)
    evaluate = tasks.make_evaluate(restored.model, config, restored)
    return evaluate(restored.params, mesh)

  return score


def _text(options: Options, config: Config, mesh: Mesh) -> _Score:
  """Scores on lm-eval's tasks, on text, or on both."""
  from moh_jax.evaluation import harness
  from moh_jax.inference.restore import load_checkpoint_tokenizer
  from moh_jax.inference.score import Scorer
  from moh_jax.runtime.mesh import check_batch

  tokenizer = load_checkpoint_tokenizer(options.checkpoint, options.step_number)
  if options.data:
    options.texts()  # finds the files
  tasks = None
  if options.tasks is not None:
    choices = harness.choose_tasks(options.tasks, options.num_fewshot)
    tasks = harness.open_tasks(choices, options.include_path)
  is_given = any(text.startswith(_BATCH) for text in options.changes)
  size = config.eval.batch_size if is_given else _TEXTS
  check_batch(_BATCH, size, mesh)
  batches = {"batch_size": size, "mesh": mesh}
  progress = sys.stderr.isatty()

  def score(restored: Restored) -> dict[str, Any]:
    model = restored.config.model
    scorer = Scorer(restored.model, restored.params, model, **batches)
    row: dict[str, Any] = {"activated_share": model.activated_share}
    if tasks is not None:
      from moh_jax.evaluation.harness_model import HarnessModel  # has lm-eval

      adapter = HarnessModel(
        *(tokenizer, scorer, _answers(restored, tokenizer, batches)),
        add_bos=not options.no_bos,
        progress=progress,
      )
      row |= harness.run_tasks(tasks, adapter, limit=options.limit)
    if options.data:
      row["text"] = harness.score_documents(
        scorer, tokenizer, options.texts(), progress=progress
      )
    return row

  return score


def _answers(restored: Restored, tokenizer: Any, batches: dict) -> Callable:
  """Makes the function (prompts, **sampling) -> texts after the prompts."""
  from moh_jax.config.llm import Sampling
  from moh_jax.inference.generate import Generator

  # It copies parameters, so that it is made where a task needs it.
  make = functools.cache(lambda: Generator(restored, tokenizer, **batches))

  def answer(prompts: Sequence[list[int]], **sampling: Any) -> list[str]:
    # As the harness's own adapters do it, without the text before
    # (SentencePiece leaves out a space at the begin), nor the token that ends.
    last = {"end": -1}
    return [
      tokenizer.decode(made.tokens[: last.get(made.finish_reason)])
      for made in make().generate(prompts, Sampling(**sampling))
    ]

  return answer


def _columns(runs: Sequence[dict[str, Any]]) -> str:
  """A table with a column for each run."""
  header, columns = ["metric"], [_cells(run) for run in runs]
  for run in runs:
    top_k = run["top_k"] if len({*run["top_k"]}) > 1 else run["top_k"][:1]
    share = f" ({run['activated_share']:.1%})"
    header.append(f"top_k={','.join(map(str, top_k))}{share}")
  rows = [(name, *(c[name] for c in columns)) for name in columns[0]]
  return command.table(rows, header)


def _cells(run: dict[str, Any]) -> dict[str, str]:
  """What is printed of a run, by name; a star marks what the mean is of."""
  cells = {}
  for task, row in run.get("tasks", {}).items():
    shots = "" if row["shots"] is None else f", {row['shots']} shots"
    for metric, found in row["metrics"].items():
      text = _number(found["value"])
      if found["stderr"] is not None:
        text += f" +- {_number(found['stderr'])}"
      star = " *" * (metric == row["main"])
      cells[f"{task}{shots}: {metric}"] = text + star
  others = {**run, **run.get("text", {}), "mean of *": run.get("mean")}
  for name, value in others.items():
    if isinstance(value, int | float) and name not in _TOLD:
      cells[name] = _number(value)
  return cells


_TOLD = {"activated_share", "mean"}  # in other places of the table


def _number(value: float | None) -> str:
  """Four places; perplexities may have too many digits before them."""
  if value is None or isinstance(value, int):
    return "n/a" if value is None else f"{value:,}"
  return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"
