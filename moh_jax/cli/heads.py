"""`python -m moh_jax heads`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moh_jax.cli import command
from moh_jax.config.base import Count
from moh_jax.runtime.alive import alive

if TYPE_CHECKING:
  import numpy as np

  from moh_jax.evaluation.head_stats import HeadStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.Checkpoint, command.Distributed, command.Output):
  """Show which heads a model uses for what, and what each is worth.

  Attributes:
    data: of models of images a folder of images in a folder per class, of
      shards or of latents; without it what the run held out.
    out: folder for the statistics (CSV, npz), the pictures (PNG, SVG) and
      report.html, made if needed.
    batches: batches to measure on, evenly spread; without it all images, or 8
      batches of text.
    batch_size: examples per batch.
    against: another checkpoint, such as one without a router; the similarity of
      its heads is shown beside.
    maps: examples with a map of their heads.
  """

  data: tuple[command.Place, ...] = command.option("listed", default=())
  out: command.OutFolder | None = None
  batches: Count | None = None
  batch_size: Count = 8
  against: command.InPath | None = None
  maps: Count = 8


@alive("looking at the heads")
def run(options: Options) -> int:
  """Prints which heads the tokens use, and what each head is worth.

  The JSON's "head_order" is what `model.head_order` takes to share the most
  important heads in place of the first.
  """
  options.join()
  from moh_jax.cli.heads_data import open_both
  from moh_jax.evaluation import head_stats, report
  from moh_jax.evaluation.similarity import head_similarity
  from moh_jax.inference.sample import Sampler
  from moh_jax.runtime import sharding
  from moh_jax.runtime.files import write_csv, write_whole

  mesh = sharding.make_mesh(options.stored()[0].config.mesh)
  sharding.check_batch("--batch-size", options.batch_size, mesh)
  with sharding.use_mesh(mesh):
    ours, *_ = opened = open_both(options, mesh)
    restored, probe, labels = ours.restored, ours.probe, ours.labels
    config, params = restored.config, restored.params
    stats = head_stats.head_stats(
      *(probe, config, params, ours.batches(), labels, mesh),
      maps=options.maps,
    )
    importance = None
    if probe.importance:
      importance = probe.importance(params, ours.batches())
    shown, similarity = "", {}
    if options.out or options.against:
      similarity = {
        one.name: head_similarity(
          *(one.probe, one.restored.config, one.restored.params),
          *(one.batches(), mesh),
        )
        for one in opened
      }
    if options.out:
      shown = report.samples(
        *(config, params, probe, stats, ours.tokenizer, mesh),
        preview=report.run_preview(options.checkpoint, restored.step),
        generate=lambda count: Sampler(restored, mesh=mesh).batch(0, count),
      )
  if not options.is_first():
    return 0
  features = similarity[ours.name].features if similarity else {}
  verdict = report.verdict(config, stats, features)
  lines = [*verdict, "", *_lines(stats, importance)]
  if rows := report.similarity_rows(similarity):
    others = "".join(f", other: {name}" for name in [*similarity][1:])
    table = command.table(rows[1:], rows[0])
    lines.append(f"\nsimilarity of heads{others}\n{table}")
  if options.out:
    found = report.Findings(
      config=config,
      similarity=similarity,
      checkpoint=ours.name,
      where=ours.where,
      stats=stats,
      importance=importance,
      metrics=report.read_run_metrics(options.checkpoint, restored.step),
      samples=shown,
      tokenizer=ours.tokenizer,
    )
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    rows = head_stats.table_rows(stats)
    write_csv(str(folder / "heads.csv"), head_stats.HEADER, rows)
    write_whole(folder / "heads.npz", head_stats.to_npz(stats))
    report.write_report(found, folder)
    lines.append(f"report: {folder / 'report.html'}")
  values = {"step": restored.step, **_values(stats, importance)}
  options.give(values | {"verdict": verdict}, lines)
  return 0


def _lines(stats: HeadStats, importance: np.ndarray | None) -> Iterator[str]:
  """A row for each layer, and the importance of its heads."""
  from moh_jax.evaluation.report import layer_table

  header, rows = layer_table(stats)
  if rows:
    yield command.table(rows, header)
  if importance is not None:
    rows = [
      (layer, *(f"{value:.3f}" for value in values))
      for layer, values in enumerate(importance)
    ]
    heads = (f"head {head}" for head in range(importance.shape[1]))
    yield f"\nimportance\n{command.table(rows, ('layer', *heads))}"
    if top_k := _top_k(stats, importance):
      values = ",".join(map(str, top_k))
      yield (
        "as many routed heads in all, but more in layers whose heads are worth "
        f"more: evaluate --top-k {values}"
      )


def _top_k(stats: HeadStats, importance: np.ndarray) -> tuple[int, ...]:
  """A top_k for each layer by importance; () without a router."""
  import numpy as np

  from moh_jax.evaluation.probe import top_k_by_importance

  units = [layer.units for layer in stats.layers]
  orders = np.array([layer.order for layer in stats.layers])
  return top_k_by_importance(importance, units, orders)


def _values(stats: HeadStats, importance: np.ndarray | None) -> dict[str, Any]:
  """The same for --json."""
  from moh_jax.evaluation.probe import order_by_importance

  entropies = stats.entropy()[:, 0].tolist()
  values: dict[str, Any] = {
    "layers": [
      {
        "layer": layer.name,
        "heads": list(layer.order),
        "shared": layer.budget.shared,
        "top_k": layer.budget.top_k,
        "load": stats.groups["all"].load[place][0].tolist(),
        "entropy": entropy,  # null where it is NaN
      }
      for place, (layer, entropy) in enumerate(zip(stats.layers, entropies))
    ],
  }
  if importance is not None:
    values["importance"] = importance.tolist()
    units = [layer.units for layer in stats.layers]
    values["head_order"] = order_by_importance(importance, units)
    values["top_k"] = _top_k(stats, importance)
  return values
