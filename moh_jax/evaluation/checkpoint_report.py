"""The report of a checkpoint: its pictures and one HTML page with all of it."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from moh_jax import config as config_lib
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation import pictures, report
from moh_jax.evaluation.head_stats import VALUES, HeadStats
from moh_jax.evaluation.run_metrics import RunMetrics
from moh_jax.evaluation.samples import pixels, token_texts
from moh_jax.evaluation.similarity import HeadSimilarity, mean_similarity
from moh_jax.inference.restore import Restored
from moh_jax.runtime.files import write_whole

# Metrics whose curves the page has, those that the run recorded of them.
_CURVES = (
  *("loss", "task_loss", "accuracy", "bits_per_byte", "mse"),
  *("balance_loss", "activated_share", "load_entropy", "lr"),
)
_NO_ROUTER = (
  "This model is multi-head attention: it has no router, and every token uses "
  "every head. There is no load to show."
)


@dataclasses.dataclass(frozen=True)
class Findings:
  """What was found out about a checkpoint.

  Attributes:
    checkpoint: its directory and step, as text.
    where: the data that heads were measured on.
    stats: of its heads.
    importance: [layers, H], or None where nothing measures it.
    metrics: of its run.
    samples: HTML of examples.
    tokenizer: of a language model, or None.
    similarity: of the heads of this checkpoint, and of others to compare with,
      by directory and step.
  """

  checkpoint: str
  where: str
  stats: HeadStats
  importance: np.ndarray | None
  metrics: RunMetrics
  samples: str
  tokenizer: Tokenizer | None
  similarity: Mapping[str, HeadSimilarity]


def write_report(
  restored: Restored, found: Findings, folder: pathlib.Path
) -> None:
  """Writes every picture as PNG and SVG, and report.html.

  Args:
    restored: the model.
    found: what the report is of.
    folder: that exists.
  """
  pngs = {}
  for name, figure in _figures(restored, found):
    for form in pictures.FORMATS:
      write_whole(folder / f"{name}.{form}", pictures.encode(figure, form))
    pngs[name] = pictures.encode_small(figure)
  images = {name: report.image(png, name) for name, png in pngs.items()}
  # Names of classes and files may hold bytes that are not UTF-8.
  page = _page(restored, found, images).encode(errors="replace")
  write_whole(folder / "report.html", page)


def _figures(restored: Restored, found: Findings) -> Iterator[tuple[str, Any]]:
  stats = found.stats
  if ours := found.similarity.get(found.checkpoint):
    yield "similarity", pictures.similarity(ours.features)
  curves = found.metrics.curves
  if shown := {name: curves[name] for name in _CURVES if name in curves}:
    yield "curves", pictures.curves(shown)
  if found.metrics.loads:
    yield "load_over_steps", pictures.load_over_steps(found.metrics.loads)
  if not any(layer.budget.top_k for layer in stats.layers):
    return
  for kind in list(stats.groups)[1:]:
    yield f"load_by_{kind}", pictures.load_by_group(stats, kind)
  label = list(stats.groups)[1]
  names = stats.groups[label].names
  titles = [names[i] for i in stats.maps.label.tolist()]
  if stats.layers[0].grid is None:
    texts = token_texts(found.tokenizer, stats)
    titles = [f"{t}: {''.join(x)[:60]!r}" for t, x in zip(titles, texts)]
  shown = pixels(restored, stats.maps.inputs)
  yield "routing_maps", pictures.routing_maps(stats, titles, shown)


def _page(restored: Restored, found: Findings, images: dict[str, str]) -> str:
  config, stats = restored.config, found.stats
  warnings = stats.collapsed(config.log.collapse_entropy)
  if not stats.layers:
    warnings = [_NO_ROUTER]
  family = config.model.family
  loads = [images[n] for n in images if n.startswith("load_by_")]
  written = json.dumps(config_lib.to_dict(config), indent=1)
  return report.page(
    found.checkpoint,
    [
      ("Warnings", "".join(map(report.warning, warnings))),
      ("Head budget", _budget(restored)),
      ("Curves", images.get("curves", "")),
      (f"Load of heads on {found.where}", "".join(loads)),
      ("Load over the training", images.get("load_over_steps", "")),
      ("Every head", _heads(found)),
      ("Similarity of heads", _similarity(found, images)),
      ("Which head each token chose", images.get("routing_maps", "")),
      ("Samples", found.samples),
      (f"Config ({family})", report.preformatted(written)),
    ],
  )


def similarity_rows(similarity: Mapping[str, HeadSimilarity]) -> list[tuple]:
  """A header, and a row for each layer: means over pairs of heads."""
  layers = dict.fromkeys(n for one in similarity.values() for n in one.features)
  if not layers:
    return []
  kinds = ("patterns", "features")
  header = [f"{kind}, {name}" for name in similarity for kind in kinds]
  rows: list[tuple] = [("layer", *header)]
  for layer in layers:
    found = [
      getattr(one, kind).get(layer)
      for one in similarity.values()
      for kind in kinds
    ]
    cells = ["" if x is None else f"{mean_similarity(x):.3f}" for x in found]
    rows.append((layer, *cells))
  return rows


def _similarity(found: Findings, images: Mapping[str, str]) -> str:
  rows = similarity_rows(found.similarity)
  if not rows:
    return ""
  text = (
    "<p>Mean cosine between different heads of a layer, of their attention "
    "weights and of what they add to the tokens.</p>"
  )
  return text + report.table(rows[0], rows[1:], True) + images["similarity"]


def _budget(restored: Restored) -> str:
  model = restored.config.model
  rows = [
    (
      *(name, budget.num_heads, budget.shared, budget.routed, budget.top_k),
      f"{budget.share:.1%}",
    )
    for name, budget in model.layer_budgets().items()
  ]
  header = ("layer", "heads", "shared", "routed", "top_k", "active")
  share = f"<p>Activated share of all heads: {model.activated_share:.1%}</p>"
  return share + report.table(header, rows)


def _heads(found: Findings) -> str:
  """A sortable table with a row for each head."""
  stats, importance = found.stats, found.importance
  rows: list[tuple[Any, ...]] = []
  groups = stats.groups["all"]
  for place, layer in enumerate(stats.layers):
    for head, number in enumerate(layer.order):
      kind = "shared" if head < layer.budget.shared else "routed"
      values = [float(getattr(groups, v)[place][0, head]) for v in VALUES]
      worth = [] if importance is None else [float(importance[place, number])]
      rows.append((layer.name, number, kind, *values, *worth))
  if not stats.layers and importance is not None:
    names = [f"layer {place}" for place in range(len(importance))]
    rows = [
      (name, number, "always on", float(value))
      for name, values in zip(names, importance)
      for number, value in enumerate(values)
    ]
  if not rows:
    return ""
  measured = VALUES if stats.layers else ()
  worth = () if importance is None else ("importance",)
  header = ("layer", "head", "kind", *measured, *worth)
  return report.table(header, rows, sortable=True)
