"""`python -m moh_jax heads`."""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from moh_jax.analysis import pictures, tables
from moh_jax.analysis.checkpoint_report import (
  Findings,
  similarity_rows,
  write_report,
)
from moh_jax.analysis.head_stats import HeadStats, head_stats
from moh_jax.analysis.importance import (
  order_by_importance,
  top_k_by_importance,
)
from moh_jax.analysis.run_metrics import read_run_metrics
from moh_jax.analysis.samples import samples
from moh_jax.analysis.similarity import HeadSimilarity, head_similarity
from moh_jax.cli import common, distributed
from moh_jax.cli.csv_file import write_csv
from moh_jax.cli.labelled_data import open_data
from moh_jax.config import get_family
from moh_jax.files import write_whole
from moh_jax.inference.text_checkpoint import load_checkpoint_tokenizer
from moh_jax.runtime import sharding

_EMPTY = 5  # groups without examples that are named


def run(args: argparse.Namespace) -> int:
  """Prints which heads the tokens use, and what each head is worth.

  The JSON's "head_order" is what `model.head_order` takes to share the most
  important heads in place of the first.
  """
  is_first = distributed.join(args)
  if args.out:
    pictures.check()
    if pathlib.Path(args.out).is_file():
      raise ValueError(f"--out {args.out} is a file, must be a folder")
  metadata, _ = common.read_metadata(args)
  mesh = sharding.make_mesh(args.mesh)
  sharding.check_batch("--batch-size", args.batch_size, mesh)
  tokenizer = None
  if metadata.tokenizer_sha256:
    tokenizer = load_checkpoint_tokenizer(
      args.checkpoint, args.step, verify=args.verify
    )
  with sharding.use_mesh(mesh):
    restored = common.restore(args, mesh=mesh)
    config, params = restored.config, restored.params
    data = open_data(args, restored, tokenizer, mesh)
    family = get_family(config.model.family)
    probe = family.probe(restored.model, config)
    stats = head_stats(
      probe, config, params, data.batches(), data.names, mesh, maps=args.maps
    )
    importance = family.head_importance(
      restored.model, config, params, data.batches()
    )
    shown, similarity = "", {}
    if args.out or args.against:
      similarity[args.checkpoint] = head_similarity(
        probe, config, params, data.batches(), mesh
      )
    if args.against:
      similarity[args.against] = _against(args, mesh)
    if args.out:
      shown = samples(
        *(restored, args.checkpoint, probe, stats, data.names, tokenizer, mesh)
      )
  if not is_first:
    return 0
  found = Findings(
    similarity=similarity,
    checkpoint=args.checkpoint,
    where=data.where,
    stats=stats,
    importance=importance,
    metrics=read_run_metrics(args.checkpoint, restored.step),
    samples=shown,
    tokenizer=tokenizer,
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
    write_csv(str(folder / "heads.csv"), tables.HEADER, tables.rows(stats))
    write_whole(folder / "heads.npz", tables.to_npz(stats))
    write_report(restored, found, folder)
    if args.json != "-":
      print(f"report: {folder / 'report.html'}")
  common.write_json(args.json, _json(stats, importance, collapsed, restored))
  return 0


def _against(args: argparse.Namespace, mesh: Mesh) -> HeadSimilarity:
  """The similarity of the heads of --against, on the same data."""
  other = argparse.Namespace(
    **{**vars(args), "checkpoint": args.against, "step": None, "top_k": None}
  )
  metadata, _ = common.read_metadata(other)
  tokenizer = None
  if metadata.tokenizer_sha256:
    tokenizer = load_checkpoint_tokenizer(args.against, verify=args.verify)
  restored = common.restore(other, mesh=mesh)
  data = open_data(other, restored, tokenizer, mesh)
  probe = get_family(restored.config.model.family).probe(
    restored.model, restored.config
  )
  return head_similarity(
    probe, restored.config, restored.params, data.batches(), mesh
  )


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
    print(
      "the model is multi-head attention: it has no router, and every token "
      "uses every head"
    )
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
