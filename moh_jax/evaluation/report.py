"""The report of a checkpoint: its pictures, and one HTML page with all of it.

The page needs no network and no server.
"""

import base64
import collections
import dataclasses
import html
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from moh_jax import config as config_lib
from moh_jax.config import Config, get_family
from moh_jax.data.decode import tiles
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation import pictures
from moh_jax.evaluation.head_stats import VALUES, HeadStats
from moh_jax.evaluation.probe import Probe
from moh_jax.evaluation.similarity import HeadSimilarity, mean_similarity
from moh_jax.models.generation import image_grid
from moh_jax.ops.routing import LOAD_SPLIT
from moh_jax.runtime import sharding, steps
from moh_jax.runtime.files import read_bytes, write_whole

# Metrics whose curves the page has, those that the run recorded of them.
_CURVES = (
  *("loss", "task_loss", "accuracy", "bits_per_byte", "mse"),
  *("balance_loss", "activated_share", "load_entropy", "lr"),
)
NO_ROUTER = (
  "the model is multi-head attention: it has no router, and every token uses "
  "every head"
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; color: #222; background: #fff; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { border: 1px solid #ccc; padding: .15rem .5rem; text-align: right; }
.scroll { max-height: 28rem; overflow: auto; }
.warning { background: #fff3cd; padding: .4rem .8rem; }
img { max-width: 100%; } pre { font-size: .8rem; overflow: auto; }
p.text { white-space: pre-wrap; }
figure { display: inline-block; margin: .4rem; font-size: .8rem; }
figure img { width: 96px; image-rendering: pixelated; }
"""
_MOST_METRICS, _MOST_PNG = 1 << 30, 1 << 26  # bytes that are read of a file
_POINTS = 500  # of a curve; more are thinned out
_SAMPLES, _COLUMNS = 8, 4
_TOKENS = 200  # of a text that are coloured

Points = list[tuple[int, Any]]


class RunMetrics(NamedTuple):
  """The rows of metrics.jsonl; empty where there is no such file.

  Attributes:
    curves: for each metric its splits, each with pairs of step and value.
    loads: for each layer pairs of the step and the loads of its routed heads.
  """

  curves: dict[str, dict[str, Points]]
  loads: dict[str, Points]


@dataclasses.dataclass(frozen=True)
class Findings:
  """What was found out about a checkpoint.

  Attributes:
    config: of the model.
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

  config: Config
  checkpoint: str
  where: str
  stats: HeadStats
  importance: np.ndarray | None
  metrics: RunMetrics
  samples: str
  tokenizer: Tokenizer | None
  similarity: Mapping[str, HeadSimilarity]


def read_run_metrics(directory: str, last: int) -> RunMetrics:
  """Reads the metrics beside a checkpoint.

  Rows that are damaged, as a killed run may leave them, are left out.

  Args:
    directory: the working directory of the run.
    last: step of the checkpoint; later rows are left out.

  Raises:
    ValueError: the file is too large.
  """
  curves: dict[str, dict[str, Points]] = collections.defaultdict(dict)
  loads: dict[str, Points] = {}
  path = steps.workdir(directory) / "metrics.jsonl"
  lines = read_bytes(path, _MOST_METRICS).splitlines() if path.exists() else ()
  for line in lines:
    try:
      row = json.loads(line)
      step, split = row.pop("step"), row.pop("split")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
      continue
    if not isinstance(step, int) or step > last:
      continue
    for name, value in row.items():
      if split != LOAD_SPLIT:
        if _is_number(value):
          points = curves[name].setdefault(str(split), [])
          points.append((step, float(value)))
      elif isinstance(value, list) and value and all(map(_is_number, value)):
        points = loads.setdefault(name, [])
        if not points or len(value) == len(points[0][1]):
          points.append((step, value))
  for parts in (loads, *curves.values()):
    for name, points in parts.items():
      stride = max(-(-len(points) // _POINTS), 1)
      parts[name] = points[::-1][::stride][::-1]  # the last one is kept
  return RunMetrics(curves, loads)


def _is_number(value: object) -> bool:
  """Whether a value is a number that a float can hold, so not NaN."""
  return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def write_report(found: Findings, folder: pathlib.Path) -> None:
  """Writes every picture as PNG and SVG, and report.html, to a folder."""
  images = {}
  for name, figure in _figures(found):
    for form in ("svg", "png"):
      content = pictures.encode(figure, form)
      write_whole(folder / f"{name}.{form}", content)
    images[name] = _image(pictures.shrunk(content), name)
  # Names of classes and files may hold bytes that are not UTF-8.
  page = _page(found, images).encode(errors="replace")
  write_whole(folder / "report.html", page)


def _figures(found: Findings) -> Iterator[tuple[str, Any]]:
  stats = found.stats
  if ours := found.similarity.get(found.checkpoint):
    yield "similarity", pictures.similarity(ours.features)
  curves = found.metrics.curves
  if shown := {name: curves[name] for name in _CURVES if name in curves}:
    yield "curves", pictures.curves(shown)
  if loads := found.metrics.loads:
    yield "load_over_steps", pictures.load_over_steps(loads, stats.layers)
  if not any(layer.budget.top_k for layer in stats.layers):
    return
  for kind in list(stats.groups)[1:]:
    yield f"load_by_{kind}", pictures.load_by_group(stats, kind)
  titles = stats.labels
  if stats.layers[0].grid is None:
    texts = token_texts(found.tokenizer, stats)
    titles = [f"{t}: {''.join(x)[:60]!r}" for t, x in zip(titles, texts)]
  shown = _pixels(found.config, stats.maps.inputs)
  yield "routing_maps", pictures.routing_maps(stats, titles, shown)


def _page(found: Findings, images: Mapping[str, str]) -> str:
  config, stats = found.config, found.stats
  warnings = stats.collapsed(config.log.collapse_entropy)
  warnings += [] if stats.layers else [NO_ROUTER]
  budgets = [
    (n, b.num_heads, b.shared, b.routed, b.top_k, f"{b.share:.1%}")
    for n, b in config.model.layer_budgets().items()
  ]
  header = ("layer", "heads", "shared", "routed", "top_k", "active")
  similarity = similarity_rows(found.similarity)
  sections = {
    "Warnings": "".join(
      f'<p class="warning">{html.escape(text)}</p>' for text in warnings
    ),
    "Head budget": f"<p>Activated share of all heads: "
    f"{config.model.activated_share:.1%}</p>{_table(header, budgets)}",
    "Curves": images.get("curves", ""),
    f"Load of heads on {found.where}": "".join(
      image for name, image in images.items() if name.startswith("load_by_")
    ),
    "Load over the training": images.get("load_over_steps", ""),
    "Every head": _heads(found),
    "Similarity of heads": similarity
    and "<p>Mean cosine between different heads of a layer, of their attention "
    "weights and of what they add to the tokens.</p>"
    + _table(similarity[0], similarity[1:])
    + images["similarity"],
    "Which head each token chose": images.get("routing_maps", ""),
    "Samples": found.samples,
    f"Config ({config.model.family})": _preformatted(
      json.dumps(config_lib.to_dict(config), indent=1)
    ),
  }
  title = html.escape(found.checkpoint)
  parts = "\n".join(
    f"<section><h2>{html.escape(heading)}</h2>\n{body}</section>"
    for heading, body in sections.items()
    if body
  )
  return (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
    f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n"
    f"<body><h1>{title}</h1>\n{parts}\n</body></html>\n"
  )


def similarity_rows(similarity: Mapping[str, HeadSimilarity]) -> list[tuple]:
  """A header, and a row for each layer: means over pairs of heads."""
  columns = {
    f"{kind}, {name}": getattr(one, kind)
    for name, one in similarity.items()
    for kind in ("patterns", "features")
  }
  layers = dict.fromkeys(itertools.chain(*columns.values()))
  rows: list[tuple] = [("layer", *columns)] if layers else []
  for layer in layers:
    found = [values.get(layer) for values in columns.values()]
    cells = ["" if x is None else f"{mean_similarity(x):.3f}" for x in found]
    rows.append((layer, *cells))
  return rows


def _heads(found: Findings) -> str:
  """A table with a row for each head."""
  stats, importance = found.stats, found.importance
  has_worth = importance is not None
  rows: list[tuple[Any, ...]] = []
  groups = stats.groups["all"]
  for place, layer in enumerate(stats.layers):
    for head, number in enumerate(layer.order):
      kind = "shared" if head < layer.budget.shared else "routed"
      values = [float(getattr(groups, v)[place][0, head]) for v in VALUES]
      worth = [float(importance[place, number])] if has_worth else []
      rows.append((layer.name, number, kind, *values, *worth))
  if not stats.layers and has_worth:
    rows = [
      (f"layer {place}", head, "always on", float(worth))
      for (place, head), worth in np.ndenumerate(importance)
    ]
  measured = (*(VALUES if stats.layers else ()), *["importance"] * has_worth)
  return rows and _table(("layer", "head", "kind", *measured), rows)


def _pixels(config: Config, inputs: np.ndarray) -> np.ndarray | None:
  """Images [M, X, Y, channels] uint8 from what the network read.

  None for texts, and for latents, which only their autoencoder can show.
  """
  data = config.data
  if getattr(data, "mean", None) is None:
    return None
  values = (inputs * np.float32(data.std) + np.float32(data.mean)) * 255
  return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def token_texts(
  tokenizer: Tokenizer | None, stats: HeadStats
) -> list[list[str]]:
  """The text of every token of the kept examples; its number without tokenizer.

  Padding is left out.
  """
  inputs = stats.maps.inputs
  is_real = np.broadcast_to(stats.maps.counted, inputs.shape)
  return [
    [tokenizer.decode([t]) if tokenizer else f"{t} " for t in tokens.tolist()]
    for tokens in (row[real] for row, real in zip(inputs, is_real))
  ]


def samples(
  config: Config,
  params: Any,
  probe: Probe,
  stats: HeadStats,
  tokenizer: Tokenizer | None,
  mesh: Mesh,
  *,
  preview: bytes | None = None,
  generate: Callable[[int], tuple[np.ndarray, list[str]]] | None = None,
) -> str:
  """HTML of images with their classes, a generated grid, or coloured text.

  Args:
    config: of the model.
    params: its parameters.
    probe: of the family.
    stats: with the examples that are shown.
    tokenizer: of a language model, or None.
    mesh: the devices.
    preview: PNG file of samples that the run drew, see `run_preview`.
    generate: of a diffusion model, number -> images uint8 and their
      names.
  """
  family = get_family(config.model.family)
  if config.model.READS_TEXT:
    return _texts(stats, tokenizer)
  if "sample" in family.commands:
    return _generated(config, preview, generate)
  shown = _pixels(config, stats.maps.inputs)
  if shown is None or "classify" not in family.commands:
    return ""

  @jax.jit
  def probabilities(params: Any, batch: Any) -> jax.Array:
    return jax.nn.softmax(probe.apply(params, batch)[0])

  images = sharding.pad_to_shards(stats.maps.inputs, mesh)
  batch = {probe.shown: sharding.put_batch(images, mesh)}
  found = sharding.gather(probabilities(params, batch))
  names, figures = stats.groups[probe.label].names, []
  for image, row, label in zip(shown, found, stats.labels):
    best = int(row.argmax())
    text = f"{label}: taken for {names[best]}, {row[best]:.0%}"
    picture = _image(pictures.png_of_pixels(image), text)
    caption = f"<figcaption>{html.escape(text)}</figcaption>"
    figures.append(f"<figure>{picture}{caption}</figure>")
  return "".join(figures)


def run_preview(directory: str, last: int) -> bytes | None:
  """The newest picture that a run drew up to a step; None without any."""
  folder = steps.workdir(directory) / "samples"
  found = [file for file in folder.glob("*.png") if file.stem.isdecimal()]
  until = [file for file in sorted(found) if int(file.stem) <= last]
  return read_bytes(until[-1], _MOST_PNG) if until else None


def _generated(
  config: Config,
  preview: bytes | None,
  generate: Callable[[int], tuple[np.ndarray, list[str]]] | None,
) -> str:
  if preview is not None:
    return _image(pictures.shrunk(preview), "samples of the run")
  if config.diffusion.space != "pixel":
    return "<p>Latents need their autoencoder to be shown: see `sample`.</p>"
  grid = image_grid(tiles(*generate(_SAMPLES)), columns=_COLUMNS)
  png = pictures.shrunk(pictures.png_of_pixels(grid))
  return _image(png, "generated samples")


def _texts(stats: HeadStats, tokenizer: Tokenizer | None) -> str:
  """The beginnings of texts, for each layer coloured by the tokens' heads."""
  texts = [text[:_TOKENS] for text in token_texts(tokenizer, stats)]
  if not stats.layers:
    return "".join(_preformatted("".join(text)) for text in texts)
  is_real = np.broadcast_to(stats.maps.counted, stats.maps.inputs.shape)
  parts = [_preformatted(", ".join(dict.fromkeys(stats.labels)))]
  for layer, best in zip(stats.layers, stats.maps.best):
    colors = pictures.head_colors(layer.budget.num_heads)
    parts.append(f"<details><summary>{html.escape(layer.name)}</summary>")
    for tokens, heads, real in zip(texts, best, is_real):
      spans = [
        f'<span title="head {head}" style="background:{colors[head]}99">'
        f"{html.escape(token)}</span>"
        if head >= 0
        else html.escape(token)
        for token, head in zip(tokens, heads[real].tolist())
      ]
      parts.append(f'<p class="text">{"".join(spans)}</p>')
    parts.append("</details>")
  return "\n".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """A table of plain text and numbers."""

  def line(cells: Sequence[Any], tag: str) -> str:
    texts = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells)
    inner = "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)
    return f"<tr>{inner}</tr>"

  body = "\n".join(line(row, "td") for row in rows)
  return f'<div class="scroll"><table>{line(header, "th")}{body}</table></div>'


def _image(png: bytes, alt: str) -> str:
  data = base64.b64encode(png).decode()
  return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'


def _preformatted(text: str) -> str:
  return f"<pre>{html.escape(text)}</pre>"
