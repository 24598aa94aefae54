"""`python -m moh_jax heads`."""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from moh_jax.cli import common, distributed
from moh_jax.cli.csv_file import write_csv
from moh_jax.cli.labelled_data import LabelledData, open_data
from moh_jax.data.identity import differences
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation.head_stats import (
  HEADER,
  HeadStats,
  head_stats,
  table_rows,
  to_npz,
)
from moh_jax.evaluation.probe import (
  Probe,
  make_probe,
  order_by_importance,
  top_k_by_importance,
)
from moh_jax.evaluation.report import (
  NO_ROUTER,
  Findings,
  read_run_metrics,
  run_preview,
  samples,
  similarity_rows,
  write_report,
)
from moh_jax.evaluation.similarity import head_similarity
from moh_jax.inference.restore import Restored, load_checkpoint_tokenizer
from moh_jax.inference.sample import Sampler
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from moh_jax.runtime.files import write_whole

_EMPTY = 5  # groups without examples that are named


@dataclasses.dataclass(frozen=True)
class _Opened:
  """A checkpoint, ready to be measured.

  Attributes:
    name: its directory and step.
    restored: the model.
    probe: of its family.
    tokenizer: of a language model that has one, or None.
    data: that its heads are measured on.
  """

  name: str
  restored: Restored
  probe: Probe
  tokenizer: Tokenizer | None
  data: LabelledData


def run(args: argparse.Namespace) -> int:
  """Prints which heads the tokens use, and what each head is worth.

  The JSON's "head_order" is what `model.head_order` takes to share the most
  important heads in place of the first.
  """
  is_first = distributed.join(args)
  if args.out and pathlib.Path(args.out).is_file():
    raise ValueError(f"--out {args.out} is a file, must be a folder")
  mesh = sharding.make_mesh(args.mesh)
  sharding.check_batch("--batch-size", args.batch_size, mesh)
  with sharding.use_mesh(mesh):
    ours = _open(args, mesh)
    opened = [ours]
    if args.against:
      opened.append(_open_other(args, ours, mesh))
    restored, probe, data = ours.restored, ours.probe, ours.data
    config, params = restored.config, restored.params
    stats = head_stats(
      probe, config, params, data.batches(), data.names, mesh, maps=args.maps
    )
    importance = None
    if probe.importance:
      importance = probe.importance(params, data.batches())
    shown, similarity = "", {}
    if args.out or args.against:
      similarity = {
        one.name: head_similarity(
          *(one.probe, one.restored.config, one.restored.params),
          *(one.data.batches(), mesh),
        )
        for one in opened
      }
    if args.out:
      shown = samples(
        *(config, params, probe, stats, data.names, ours.tokenizer, mesh),
        preview=run_preview(args.checkpoint, restored.step),
        generate=lambda count: Sampler(restored, mesh=mesh).batch(0, count),
      )
  if not is_first:
    return 0
  found = Findings(
    config=config,
    similarity=similarity,
    checkpoint=ours.name,
    where=data.where,
    stats=stats,
    importance=importance,
    metrics=read_run_metrics(args.checkpoint, restored.step),
    samples=shown,
    tokenizer=ours.tokenizer,
  )
  collapsed = stats.collapsed(config.log.collapse_entropy)
  for line in [*collapsed, *_missing(stats)]:
    print(f"warning: {line}", file=sys.stderr)
  if args.json != "-":
    _print(stats, importance)
    if rows := similarity_rows(similarity):
      print(f"\nsimilarity of heads\n{common.table(rows[1:], rows[0])}")
  if args.out:
    folder = pathlib.Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(str(folder / "heads.csv"), HEADER, table_rows(stats))
    write_whole(folder / "heads.npz", to_npz(stats))
    write_report(found, folder)
    if args.json != "-":
      print(f"report: {folder / 'report.html'}")
  common.write_json(args.json, _json(stats, importance, collapsed, restored))
  return 0


def _open(args: argparse.Namespace, mesh: Mesh) -> _Opened:
  """Opens --checkpoint and the data that its heads are measured on."""
  metadata, step = common.read_metadata(args)
  # A family without a probe says so before its parameters are read.
  make_probe(make_model(metadata.config)[0], metadata.config)
  tokenizer = None
  if metadata.tokenizer_sha256:
    tokenizer = load_checkpoint_tokenizer(
      args.checkpoint, step, verify=args.verify
    )
  restored = common.restore(args, mesh=mesh, step=step)
  return _Opened(
    f"{args.checkpoint}, step {step}",
    restored,
    make_probe(restored.model, restored.config),
    tokenizer,
    open_data(args, restored, tokenizer, mesh),
  )


def _open_other(args: argparse.Namespace, ours: _Opened, mesh: Mesh) -> _Opened:
  """Opens --against, with the same data.

  Raises:
    ValueError: it is the same checkpoint, or was trained on other data and
      there is no --data.
  """
  other = argparse.Namespace(
    **{**vars(args), "checkpoint": args.against, "step": None, "top_k": None}
  )
  theirs = _open(other, mesh)
  if theirs.name == ours.name:
    raise ValueError(
      f"--against {args.against}: must be another checkpoint than {ours.name}"
    )
  if args.data:
    return theirs
  if lines := differences(theirs.data.identity(), ours.data.identity()):
    raise ValueError(
      f"--against {args.against}: its own data are not those of "
      f"{args.checkpoint}, give --data for both ({'; '.join(lines)})"
    )
  return theirs


def _missing(stats: HeadStats) -> Sequence[str]:
  """A line for each grouping that has groups without examples."""
  lines = []
  for kind, groups in stats.groups.items():
    empty = [
      n for n, count in zip(groups.names, groups.tokens.T) if not any(count)
    ]
    if empty and stats.layers:
      more = ", ..." if len(empty) > _EMPTY else ""
      lines.append(
        f"{len(empty)} of {len(groups.names)} groups by {kind} have no example "
        f"({', '.join(empty[:_EMPTY])}{more}): their statistics are empty"
      )
  return lines


def _print(stats: HeadStats, importance: np.ndarray | None) -> None:
  """A row for each layer, and the importance of its heads."""
  if not stats.layers:
    print(NO_ROUTER)
  rows = []
  entropies = stats.entropy()[:, 0]
  for place, (layer, entropy) in enumerate(zip(stats.layers, entropies)):
    budget, groups = layer.budget, stats.groups["all"]
    loads = groups.load[place][0, budget.shared :]
    numbers = layer.order[budget.shared :]
    by_load = loads.argsort(kind="stable") if budget.top_k else []
    least, most = (
      f"{numbers[head]}: {loads[head]:.1%}" if len(by_load) else "none routed"
      for head in [*by_load[:1], *by_load[-1:]] or (0, 0)
    )
    weight = f"{groups.weights[place, 0, 0]:.2f}"
    cells = (budget.num_heads, budget.shared, budget.top_k, weight)
    rows.append((layer.name, *cells, f"{entropy:.2f}", least, most))
  if rows:
    header = ("heads", "shared", "top_k", "weight of shared")
    print(
      common.table(
        rows, ("layer", *header, "entropy", "least used", "most used")
      )
    )
  if importance is not None:
    rows = [
      (layer, *(f"{value:.3f}" for value in values))
      for layer, values in enumerate(importance)
    ]
    heads = (f"head {head}" for head in range(importance.shape[1]))
    print(f"\nimportance\n{common.table(rows, ('layer', *heads))}")
    if top_k := _top_k(stats, importance):
      values = ",".join(map(str, top_k))
      print(f"as many routed heads in all, by importance: --top-k {values}")


def _top_k(stats: HeadStats, importance: np.ndarray) -> tuple[int, ...]:
  """A top_k for each layer by importance; () without a router."""
  budgets = [layer.budget for layer in stats.layers]
  orders = np.array([layer.order for layer in stats.layers])
  return top_k_by_importance(importance, budgets, orders)


def _json(
  stats: HeadStats,
  importance: np.ndarray | None,
  collapsed: Sequence[str],
  restored: Any,
) -> dict[str, Any]:
  report: dict[str, Any] = {
    "step": restored.step,
    "layers": [
      {
        "layer": layer.name,
        "heads": list(layer.order),
        "shared": layer.budget.shared,
        "top_k": layer.budget.top_k,
        "load": stats.groups["all"].load[place][0].tolist(),
        "entropy": entropy if np.isfinite(entropy) else None,
      }
      for place, (layer, entropy) in enumerate(
        zip(stats.layers, stats.entropy()[:, 0].tolist())
      )
    ],
    "collapsed": list(collapsed),
  }
  if importance is not None:
    report["importance"] = importance.tolist()
    report["head_order"] = order_by_importance(importance)
    report["top_k"] = _top_k(stats, importance)
  return report
