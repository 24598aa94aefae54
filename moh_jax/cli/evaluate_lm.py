"""`python -m moh_jax evaluate-lm`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from moh_jax.cli import common, distributed, text_files
from moh_jax.config.llm import Sampling
from moh_jax.data.text_files import list_pieces
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation import harness
from moh_jax.inference.generate import Generator
from moh_jax.inference.restore import (
  Restored,
  load_checkpoint_tokenizer,
  with_top_k,
)
from moh_jax.inference.score import Scorer
from moh_jax.runtime import sharding

_PIECE_BYTES = 64 << 20
_COUNTS = ("documents", "bytes", "words", "tokens")


def run(args: argparse.Namespace) -> int:
  """Prints the metrics, a column for each activated share."""
  if not args.tasks and not args.data:
    raise ValueError("nothing to do: give --tasks, --data or both")
  is_first = distributed.join(args)
  _check_model(args)
  tokenizer = load_checkpoint_tokenizer(
    args.checkpoint, args.step, verify=args.verify
  )
  groups = list_pieces(args.data, _PIECE_BYTES) if args.data else []
  tasks = None
  if args.tasks:
    choices = harness.choose_tasks(args.tasks, args.num_fewshot)
    tasks = harness.load_tasks(choices, args.include_path)

  mesh = sharding.make_mesh(args.mesh)
  sharding.check_batch("batch-size", args.batch_size, mesh)
  with sharding.use_mesh(mesh):
    restored = common.restore(args, mesh=mesh, top_k=None)
    runs = []
    for one in [restored.at_top_k(k) for k in args.top_k or ()] or [restored]:
      model = one.config.model
      scorer = Scorer(
        one.model, one.params, model, batch_size=args.batch_size, mesh=mesh
      )
      row = {
        "top_k": list(model.top_k),
        "activated_share": model.activated_share,
      }
      if tasks is not None:
        row |= _run_tasks(tasks, one, tokenizer, scorer, mesh, args)
      if groups:
        texts = text_files.read_texts(groups, args.field)
        row["text"] = harness.score_documents(
          scorer, tokenizer, texts, progress=sys.stderr.isatty()
        )
      runs.append(row)
  if not is_first:
    return 0
  if args.json != "-":
    _print(runs)
  common.write_json(
    args.json,
    {
      "checkpoint": args.checkpoint,
      "step": restored.step,
      "dtype": restored.config.model.dtype,
      "gate_form": restored.config.model.router.gate_form,
      "runs": runs,
    },
  )
  return 0


def _check_model(args: argparse.Namespace) -> None:
  """Refuses what does not fit the model, before anything large is read."""
  metadata, _ = common.read_metadata(args, "evaluate-lm")
  config = metadata.config.served()
  for top_k in args.top_k or ():
    with_top_k(config, top_k)


def _run_tasks(
  tasks: harness.HarnessTasks,
  restored: Restored,
  tokenizer: Tokenizer,
  scorer: Scorer,
  mesh: Mesh,
  args: argparse.Namespace,
) -> dict[str, Any]:
  from moh_jax.evaluation.harness_model import HarnessModel  # needs lm-eval

  generator = None
  if tasks.need_generation:
    generator = Generator(
      restored, tokenizer, mesh=mesh, batch_size=args.batch_size
    )

  def generate(prompts: Sequence[list[int]], **options: Any) -> list[str]:
    made = generator.generate(prompts, Sampling(**options))
    # As the harness's own adapters do it, without the text before:
    # SentencePiece leaves out a space at the begin.
    stop = {"end": -1}  # without the token that ended it
    return [
      tokenizer.decode(c.tokens[: stop.get(c.finish_reason)]) for c in made
    ]

  model = HarnessModel(
    tokenizer,
    scorer,
    generate,
    add_bos=not args.no_bos,
    progress=sys.stderr.isatty(),
  )
  return harness.run_tasks(tasks, model, limit=args.limit)


def _print(runs: Sequence[dict[str, Any]]) -> None:
  heads = [
    f"top_k={_short(run['top_k'])} ({run['activated_share']:.1%})"
    for run in runs
  ]
  first, tables = runs[0], []
  if "tasks" in first:
    rows = [
      (name, row["shots"], metric, *(_value(run, name, metric) for run in runs))
      for name, row in first["tasks"].items()
      for metric in row["metrics"]
    ]
    if first["mean"] is not None:
      means = (f"{run['mean']:.4f}" for run in runs)
      rows.append(("mean of *", "", "", *means))
    tables.append(common.table(rows, ("task", "shots", "metric", *heads)))
  if "text" in first:
    rows = [
      (name, *(_number(run["text"][name]) for run in runs))
      for name in first["text"]
      if name not in _COUNTS
    ]
    rest = [""] * (len(runs) - 1)  # counts are the same for all
    rows += [(name, f"{first['text'][name]:,}", *rest) for name in _COUNTS]
    tables.append(common.table(rows, ("text", *heads)))
  print("\n\n".join(tables))


def _value(run: dict[str, Any], name: str, metric: str) -> str:
  """A metric with its standard error; a star marks what the mean is of."""
  row = run["tasks"][name]
  found = row["metrics"][metric]
  if found["value"] is None:
    return "n/a"
  text = _number(found["value"])
  if found["stderr"] is not None:
    text += f" +- {_number(found['stderr'])}"
  return f"{text} *" if metric == row["main"] else text


def _number(value: float) -> str:
  """Four places; perplexities may have too many digits before them."""
  return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def _short(top_k: Sequence[int]) -> str:
  """One number where all layers have the same."""
  values = top_k if len(set(top_k)) > 1 else top_k[:1]
  return ",".join(map(str, values))
