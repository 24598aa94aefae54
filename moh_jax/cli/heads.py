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
    data: folder of images in a folder per class, of shards, of latents or of
      token sets, whose train/ is read; without it the images that the run held
      out, or the text that it was trained on.
    out: folder for report.html and its pictures, made if needed; the similarity
      of heads is measured for it.
    batches: batches to measure on, images evenly spread; without it all images,
      or 8 batches of text.
    batch_size: examples per batch.
  """

  data: command.Place | None = None
  out: command.OutFolder | None = None
  batches: Count | None = None
  batch_size: Count = 8


@alive("looking at the heads")
def run(options: Options) -> int:
  """Prints which heads the tokens use, and what each head is worth.

  The JSON's "head_order" is what `model.head_order` takes to share the most
  important heads in place of the first.
  """
  options.join()
  from moh_jax.cli.heads_data import open_examples
  from moh_jax.evaluation import report
  from moh_jax.evaluation.head_stats import head_stats
  from moh_jax.evaluation.similarity import head_similarity
  from moh_jax.runtime.mesh import check_batch, make_mesh, use_mesh

  mesh = make_mesh(options.stored()[0].config.mesh)
  check_batch("--batch-size", options.batch_size, mesh)
  with use_mesh(mesh):
    opened = open_examples(options, mesh)
    restored, probe = opened.restored, opened.probe
    config, params = restored.config, restored.params
    stats = head_stats(
      probe, config, params, opened.batches(), opened.labels, mesh
    )
    importance = similarity = None
    if probe.importance:
      importance = probe.importance(params, opened.batches())
    if options.out:
      similarity = head_similarity(
        probe, config, params, opened.batches(), mesh
      )
  if not options.is_first():
    return 0
  verdict = report.verdict(config, stats, similarity)
  lines = [*verdict, "", *_lines(stats, importance)]
  if options.out:
    folder = pathlib.Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{options.checkpoint}, step {restored.step}, on {opened.where}"
    report.write_report(
      folder, title, config, stats, similarity, opened.tokenizer
    )
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


def _values(stats: HeadStats, importance: np.ndarray | None) -> dict[str, Any]:
  """The same for --json."""
  from moh_jax.evaluation.probe import order_by_importance

  values: dict[str, Any] = {
    "layers": [
      {
        "layer": layer.name,
        "heads": list(layer.order),
        "shared": layer.budget.shared,
        "top_k": layer.budget.top_k,
        "load": load[0].tolist(),
        "entropy": entropy,  # null where it is NaN
      }
      for layer, load, entropy in zip(
        stats.layers, stats.groups["all"].load, stats.entropy().tolist()
      )
    ],
    "load_by_group": {
      kind: dict(zip(groups.names, zip(*(x.tolist() for x in groups.load))))
      for kind, groups in stats.groups.items()
    },
  }
  if importance is not None:
    values["importance"] = importance.tolist()
    units = [layer.units for layer in stats.layers]
    values["head_order"] = order_by_importance(importance, units)
  return values
