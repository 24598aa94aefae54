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
from moh_jax.data.decode import decode_image
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation import pictures
from moh_jax.evaluation.head_stats import VALUES, HeadStats
from moh_jax.evaluation.probe import Probe
from moh_jax.evaluation.similarity import HeadSimilarity, mean_similarity
from moh_jax.models.generation import image_grid
from moh_jax.ops.routing import COLLAPSED, LOAD_SPLIT
from moh_jax.runtime import sharding, steps
from moh_jax.runtime.files import printable, read_bytes, write_whole

# Metrics whose curves the page has, and words of its tables.
_CURVES = {
  "loss": "task_loss + train.balance_weight * balance_loss; of val the task's",
  "task_loss": "the task's loss on the training batch",
  "accuracy": "share of images whose class is found",
  "bits_per_byte": "bits that the model needs for a byte of text",
  "mse": "mean squared error of what the denoiser predicts",
  "balance_loss": "lowers the scores of heads that are selected often; how "
  "even the load is, tells its entropy",
  "activated_share": "heads that tokens use over heads present",
  "load_entropy": "the smallest entropy of the load of any layer",
  "lr": "learning rate",
}
_OF_TEXTS = {"accuracy": "share of next tokens that are predicted right"}
_WORDS = {
  "load": "share of tokens that use a head; even is top_k, which a token "
  "selects, over the number of routed heads; shared heads have a load of 1",
  "entropy": "how even the load is: 1 where routed heads are selected equally "
  "often, 0 where all tokens select the same ones",
  "weight of shared": "part of shared heads in the output; 0.5 if not learned",
  "score": "mean of the router's softmax, among the shared or the routed heads",
  "gate": "mean weight of a head's output, 0 for tokens that do not use it",
  "importance": "to first order, how much the loss changes without the head",
  "similarity": "mean cosine between different heads, near 1 if they do the "
  "same: of attention weights (patterns), of what they add (features)",
  "best head": "of those that a token selected the one with the highest score",
}
# What may stand out, and what to do about it.
_REMEDIES = {
  "collapsed to the same heads": "raise train.balance_weight several times",
  "uneven load": "a larger train.balance_weight evens the load",
  "load 1": "share heads that all tokens select (model.shared_heads)",
  "load 0": "leave out heads that no token selects (model.num_heads)",
  "no choice": "set model.top_k between no and all routed heads for a choice",
  "equal": "leave out one of two heads that add the same, or share fewer",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; color: #222; background: #fff; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { border: 1px solid #ccc; padding: .15rem .5rem; text-align: right; }
.scroll { overflow-x: auto; }
.verdict { background: #eef3fb; padding: .4rem .8rem; }
img { max-width: 100%; } pre { font-size: .8rem; overflow: auto; }
p.text { white-space: pre-wrap; }
figure { display: inline-block; margin: .4rem; font-size: .8rem; }
figure img { width: 96px; image-rendering: pixelated; }
@media (max-width: 45rem) {
  th, td { padding: .1rem .2rem; font-size: .7rem; }
  section { overflow-x: auto; } section > img { max-width: 45rem; }
}
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
  config, stats, title = found.config, found.stats, "How heads are used"
  rows, others = similarity_rows(found.similarity), [*found.similarity][1:]
  said = verdict(config, stats, found.similarity[found.checkpoint].features)
  load = "".join(x for name, x in images.items() if name.startswith("load_by_"))
  sections = {
    "In short": f'<p class="verdict">{"<br>".join(map(_escaped, said))}</p>'
    + _explained(_WORDS, "load", "entropy"),
    "Layers": stats.layers
    and _table(*layer_table(stats)) + _explained(_WORDS, "weight of shared"),
    "Curves": "curves" in images and images["curves"] + _losses(found),
    "Load of heads": load and load + _explained(_WORDS, "load"),
    "Load over the training": images.get("load_over_steps"),
    "Similarity of heads": rows
    and _table(rows[0], rows[1:])
    + "".join(f"<p>other: {_escaped(name)}</p>" for name in others)
    + _explained(_WORDS, "similarity")
    + images["similarity"],
    "Which head each token chose": "routing_maps" in images
    and images["routing_maps"] + _explained(_WORDS, "best head"),
    "Samples": found.samples,
    "Every head": _heads(found),
    "Config": _preformatted(json.dumps(config_lib.to_dict(config), indent=1)),
  }
  parts = "\n".join(
    f"<section><h2>{_escaped(heading)}</h2>\n{body}</section>"
    for heading, body in sections.items()
    if body
  )
  where = _escaped(f"{found.checkpoint}, measured on {found.where}")
  return (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width">\n'
    f"<title>{title}</title>\n<style>{_STYLE}</style></head>\n"
    f"<body><h1>{title}</h1>\n<p>{where}: {config.model.activated_share:.1%} "
    f"of all heads are active</p>\n{parts}\n</body></html>\n"
  )


def verdict(
  config: Config, stats: HeadStats, features: Mapping[str, np.ndarray]
) -> list[str]:
  """Three sentences: how evenly heads are used, what stands out, what to do.

  Args:
    config: of the model.
    stats: of its heads.
    features: of its `HeadSimilarity`; {} where that was not measured.
  """
  found: dict[str, list[str]] = collections.defaultdict(list)
  entropies = dict(zip([x.name for x in stats.layers], stats.entropy()[:, 0]))
  uneven = [name for name, entropy in entropies.items() if entropy < 0.9]
  for layer, load in zip(stats.layers, stats.groups["all"].load):
    budget, name = layer.budget, layer.name
    if budget.top_k in (0, budget.routed) and not config.model.router.varies:
      found["no choice"].append(name)
      del entropies[name]
    elif entropies[name] < COLLAPSED:
      found["collapsed to the same heads"].append(name)
    else:
      if name in uneven:
        found["uneven load"].append(name)
      for head, share in zip(layer.routed, load[0, budget.shared :]):
        if not 0.005 < share < 0.995:
          found[f"load {share:.0f}"].append(f"head {head} of {name}")
  for name, cosines in features.items():
    for one, other in np.argwhere(np.triu(cosines, 1) > 0.95):
      found["equal"].append(f"heads {one} and {other} of {name}")
  first = "No layer has a choice of heads."
  if not stats.layers:
    first = "As multi-head attention it has no router: tokens use every head."
  if entropies:
    least = min(entropies, key=entropies.__getitem__)
    even = f"unevenly in {len(uneven)} of {len(entropies)} layers"
    first = (
      f"Heads are used {even if uneven else 'evenly'}: the smallest entropy of "
      f"the load is that of {least}, "
      f"{entropies[least]:.2f} (1: all heads equally, 0: always the same ones)."
    )
  seen = "; ".join(
    f"{', '.join(places[:4])}{', ...' * (len(places) > 4)} ({kind})"
    for kind, places in found.items()
  )
  todo = "; ".join(_REMEDIES[kind] for kind in found)
  second = f"What stands out: {seen or 'no layer and no head'}."
  return [first, second, f"What to do: {todo or 'nothing'}."]


def _losses(found: Findings) -> str:
  """What the curves are, and why those of held-out data differ."""
  config, values = found.config, dict[str, Any]()
  for section in (config.data, config.model, *config.sections.values()):
    values |= vars(section)
  only = ", ".join(
    f"{name}={values[name]}"
    for name in (
      *("augment", "auto_augment", "random_erasing", "mixup"),
      *("cutmix", "label_smoothing", "drop_path", "label_dropout"),
    )
    if values.get(name) not in (None, 0, "", "none")
  )
  why = f" Only train has {only}: its loss may rightly lie above that of val."
  shown = [name for name in _CURVES if name in found.metrics.curves]
  text = "train: batches of the training; val: what the run held out."
  meanings = _CURVES | (_OF_TEXTS if config.model.READS_TEXT else {})
  return f"{_explained(meanings, *shown)}<p>{text}{why * bool(only)}</p>"


def _explained(meanings: Mapping[str, str], *names: str) -> str:
  """What words mean, as a list."""
  rows = (f"<li><b>{name}</b>: {meanings[name]}</li>" for name in names)
  return f"<ul>{''.join(rows)}</ul>"


def similarity_rows(similarity: Mapping[str, HeadSimilarity]) -> list[tuple]:
  """A header, and a row for each layer: means over pairs of heads."""
  columns = {
    kind if number == 0 else f"{kind}, other": getattr(one, kind)
    for number, one in enumerate(similarity.values())
    for kind in ("patterns", "features")
  }
  layers = dict.fromkeys(itertools.chain(*columns.values()))
  rows: list[tuple] = [("layer", *columns)] if layers else []
  for layer in layers:
    found = [values.get(layer) for values in columns.values()]
    cells = ["" if x is None else f"{mean_similarity(x):.3f}" for x in found]
    rows.append((layer, *cells))
  return rows


def layer_table(stats: HeadStats) -> tuple[tuple[str, ...], list[tuple]]:
  """A header, and a row for each layer with a router."""
  rows = []
  for place, layer in enumerate(stats.layers):
    budget, groups = layer.budget, stats.groups["all"]
    loads = groups.load[place][0, budget.shared :]
    numbers = layer.order[budget.shared :]
    by_load = loads.argsort(kind="stable") if budget.top_k else []
    least, most = (
      f"{numbers[head]}: {loads[head]:.1%}" if len(by_load) else "none routed"
      for head in [*by_load[:1], *by_load[-1:]] or (0, 0)
    )
    measured = groups.weights[place, 0, 0], stats.entropy()[place, 0]
    cells = (budget.num_heads, budget.shared, budget.top_k)
    cells += tuple(f"{value:.2f}" for value in measured)
    rows.append((layer.name, *cells, least, most))
  header = ("layer", "heads", "shared", "top_k", "weight of shared", "entropy")
  return (*header, "least used", "most used"), rows


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
  table = _table(("layer", "head", "kind", *measured), rows)
  return rows and _explained(_WORDS, *measured) + table


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
  generate: Callable[[int], np.ndarray] | None = None,
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
    generate: of a diffusion model, number -> images uint8.
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
    caption = f"<figcaption>{_escaped(text)}</figcaption>"
    figures.append(f"<figure>{picture}{caption}</figure>")
  return "".join(figures)


def run_preview(directory: str, last: int) -> bytes | None:
  """The newest picture that a run drew up to a step; None without any.

  Raises:
    ValueError: it is damaged.
  """
  folder = steps.workdir(directory) / "samples"
  found = [file for file in folder.glob("*.png") if file.stem.isdecimal()]
  until = [file for file in sorted(found) if int(file.stem) <= last]
  if not until:
    return None
  content = read_bytes(until[-1], _MOST_PNG)
  decode_image(content, 3, str(until[-1]))  # names a damaged file
  return content


def _generated(
  config: Config,
  preview: bytes | None,
  generate: Callable[[int], np.ndarray] | None,
) -> str:
  if preview is not None:
    return _image(pictures.shrunk(preview), "samples of the run")
  if config.diffusion.space != "pixel":
    return "<p>Latents need their autoencoder to be shown: see `sample`.</p>"
  grid = image_grid(pictures.tiles(generate(_SAMPLES)), columns=_COLUMNS)
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
    parts.append(f"<details><summary>{_escaped(layer.name)}</summary>")
    for tokens, heads, real in zip(texts, best, is_real):
      spans = [
        f'<span title="head {head}" style="background:{colors[head]}99">'
        f"{_escaped(token)}</span>"
        if head >= 0
        else _escaped(token)
        for token, head in zip(tokens, heads[real].tolist())
      ]
      parts.append(f'<p class="text">{"".join(spans)}</p>')
    parts.append("</details>")
  return "\n".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """A table of plain text and numbers."""

  def line(cells: Sequence[Any], tag: str) -> str:
    texts = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells)
    inner = "".join(f"<{tag}>{_escaped(text)}</{tag}>" for text in texts)
    return f"<tr>{inner}</tr>"

  body = "\n".join(line(row, "td") for row in rows)
  return f'<div class="scroll"><table>{line(header, "th")}{body}</table></div>'


def _image(png: bytes, alt: str) -> str:
  data = base64.b64encode(png).decode()
  return f'<img alt="{_escaped(alt)}" src="data:image/png;base64,{data}">'


def _preformatted(text: str) -> str:
  return f"<pre>{_escaped(text)}</pre>"


def _escaped(text: str) -> str:
  """Text as HTML shows it; names in files may hold control characters."""
  return html.escape(printable(text))
