"""`python -m moh_jax heads`."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from moh_jax.cli import command
from moh_jax.config import Config, apply_overrides
from moh_jax.config.base import Count
from moh_jax.runtime.alive import alive

if TYPE_CHECKING:
  import numpy as np
  from jax.sharding import Mesh

  from moh_jax.evaluation.head_stats import HeadStats
  from moh_jax.inference.restore import Restored

_TEXT_BATCHES = 8


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
  from moh_jax.data.infer import data_at
  from moh_jax.evaluation import report
  from moh_jax.evaluation.head_stats import head_stats
  from moh_jax.evaluation.probe import make_probe
  from moh_jax.evaluation.similarity import head_similarity
  from moh_jax.inference.restore import load_checkpoint_tokenizer
  from moh_jax.runtime.mesh import check_batch, make_mesh, use_mesh

  metadata, step = options.stored()
  config = metadata.config
  mesh = make_mesh(config.mesh)
  check_batch("--batch-size", options.batch_size, mesh)
  importance = similarity = None
  with use_mesh(mesh):
    restored = options.restore(mesh=mesh)
    config, params = restored.config, restored.params
    probe = make_probe(restored.model, config)
    if options.data:
      seen = apply_overrides(config, "data", **data_at(config, options.data))
      restored = dataclasses.replace(restored, config=seen)
    open_data = _training_text if config.model.READS_TEXT else _images
    labels, batches, where = open_data(options, restored, mesh)
    stats = head_stats(probe, config, params, batches(), labels, mesh)
    if probe.importance:
      importance = probe.importance(params, batches())
    if options.out:
      similarity = head_similarity(probe, config, params, batches(), mesh)
  if not options.is_first():
    return 0
  verdict = report.verdict(config, stats, similarity)
  lines = [*verdict, "", *_lines(config, stats, importance)]
  if options.out:
    tokenizer = None
    if metadata.tokenizer_sha256:
      tokenizer = load_checkpoint_tokenizer(options.checkpoint, step)
    folder = pathlib.Path(options.out)
    title = f"{options.checkpoint}, step {step}, on {where}"
    report.write_report(folder, title, config, stats, similarity, tokenizer)
    lines.append(f"report: {folder / 'report.html'}")
  values = {"step": step, "verdict": verdict, **_values(stats, importance)}
  options.give(values, lines)
  return 0


# Names of the examples' labels; makes the global batches, on the devices, from
# the first on; what the data are, for people.
_Data = tuple[tuple[str, ...], Callable[[], Iterable[Any]], str]


def _images(options: Options, restored: Restored, mesh: Mesh) -> _Data:
  """Held-out images, or those of --data, by class."""
  from moh_jax.data.pipeline import held_out_images
  from moh_jax.data.sources import make_source
  from moh_jax.training.task import held_out_batches

  size = options.batch_size
  examples = (options.batches or 0) * size
  config = apply_overrides(
    restored.config, "eval", batch_size=size, examples=examples
  )
  where = options.data or config.data.path or config.data.source
  source = make_source(config, "val", restored.class_names)
  ready = held_out_images(config, source)
  batches = lambda: held_out_batches(config, ready, mesh)  # noqa: E731
  return source.class_names, batches, where


def _training_text(options: Options, restored: Restored, mesh: Mesh) -> _Data:
  """The first sequences of the training text, or of --data, under one label."""
  import numpy as np

  from moh_jax.data import sequences
  from moh_jax.runtime.batches import batch_rows, shard_batch
  from moh_jax.training.task import stream

  size = options.batch_size
  config = apply_overrides(restored.config, "data", batch_size=size)
  # The seed of the run's order does not matter here: with a fixed one, runs of
  # different seeds are compared on the same sequences.
  text = sequences.Text(config.data, config.model.vocab_size, "train")

  def batches() -> Iterable[Any]:
    count = options.batches or _TEXT_BATCHES
    taken = itertools.islice(stream(config, text.stream(0), mesh), count)
    rows = batch_rows(mesh, size).astype(np.int32)
    for number, batch in enumerate(taken):
      labels = {
        "label": np.zeros_like(rows),
        "index": rows + number * size,
        "mask": np.ones(len(rows), np.float32),
      }
      yield shard_batch({**batch, **labels}, mesh)

  return ("training text",), batches, options.data or "the run's training text"


def _lines(
  config: Config, stats: HeadStats, importance: np.ndarray | None
) -> Iterator[str]:
  """A row for each layer, and the importance of its heads."""
  from moh_jax.evaluation import report

  header, rows = report.layer_table(stats)
  if rows:
    yield report.WORDS
    yield ""
    yield command.table(rows, header)
  if importance is not None:
    rows = [
      (layer, *(f"{value:.3f}" for value in values))
      for layer, values in zip(config.model.layer_budgets(), importance)
    ]
    heads = (f"head {head}" for head in range(importance.shape[1]))
    yield (
      "\nImportance: how much the loss would change without a head, to first "
      "order and relative to its layer\n"
      f"{command.table(rows, ('layer', *heads))}"
    )


def _values(stats: HeadStats, importance: np.ndarray | None) -> dict[str, Any]:
  """The same for --json."""
  from moh_jax.evaluation.probe import order_by_importance

  every = zip(stats.layers, stats.groups["all"].load, stats.entropy().tolist())
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
      for layer, load, entropy in every
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
