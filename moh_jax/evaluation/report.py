"""What the heads of a checkpoint do: a verdict, tables, and one HTML page.

The page holds its pictures and needs no network and no server.
"""

import base64
import collections
import pathlib
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from moh_jax.config import Config
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation import pictures
from moh_jax.evaluation.head_stats import HeadStats
from moh_jax.evaluation.similarity import HeadSimilarity, mean_similarity
from moh_jax.ops.routing import COLLAPSED
from moh_jax.runtime.files import write_whole

WORDS = (
  "Every token uses the shared heads of a layer, and of the others, the routed "
  "heads, the top_k that its router scores highest. The load of a head is the "
  "share of tokens that use it; entropy says how even the load of the routed "
  "heads is, from 0 (all tokens select the same ones) to 1 (equally often)."
)
# What the sections of the page show.
_SHOWN = {
  "Layers": "A layer is named by its stage or group of equal layers, and by "
  "its place in it, from 0. The router's weights of a token's heads are their "
  "gates; the weight of shared is the part of the shared heads in their sum, "
  "0.5 where it is not learned. Least and most used: routed heads, by load.",
  "Load of heads": "If all routed heads were selected equally often, the load "
  "of each would be top_k over their number.",
  "Which head each token chose": "Of those that it selected the one with the "
  "highest score.",
  "Similarity of heads": "Mean cosine between different heads, near 1 if they "
  "do the same: of attention weights (patterns), of what they add (features).",
}
# What may stand out, and what to do about it.
_REMEDIES = {
  "collapsed to the same heads": "raise train.balance_weight several times",
  "uneven load": "a larger train.balance_weight evens the load",
  "load 1": "share heads that all tokens select (model.shared_heads)",
  "load 0": "leave out heads that no token selects (model.num_heads)",
  "no choice": "for a choice, set model.top_k below the routed heads, above 0",
  "equal": "leave out one of two heads that add the same, or share fewer",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; color: #222; background: #fff; }
table { border-collapse: collapse; font-size: .85rem; }
th, td { border: 1px solid #ccc; padding: .15rem .5rem; text-align: right; }
section { overflow-x: auto; } img { max-width: 100%; }
p.text { white-space: pre-wrap; }
"""
_TOKENS = 200  # of a text that are coloured


def verdict(
  config: Config, stats: HeadStats, similarity: HeadSimilarity | None
) -> list[str]:
  """Three sentences: how evenly heads are used, what stands out, what to do.

  Args:
    config: of the model.
    stats: of its heads.
    similarity: of its heads; None where it was not measured.
  """
  found: dict[str, list[str]] = collections.defaultdict(list)
  entropies = dict(zip([x.name for x in stats.layers], stats.entropy()))
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
  for name, cosines in (similarity.features if similarity else {}).items():
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


def layer_table(stats: HeadStats) -> tuple[tuple[str, ...], list[tuple]]:
  """A header, and a row for each layer with a router."""
  rows, groups = [], stats.groups["all"]
  measured = zip(stats.layers, groups.load, groups.weights, stats.entropy())
  for layer, load, weights, entropy in measured:
    budget, ends = layer.budget, ("none routed",) * 2
    if budget.top_k:
      loads = load[0, budget.shared :]
      by_load = loads.argsort(kind="stable")
      ends = (f"{layer.routed[i]}: {loads[i]:.1%}" for i in by_load[[0, -1]])
    cells = layer.name, budget.num_heads, budget.shared, budget.top_k
    rows.append((*cells, f"{weights[0, 0]:.2f}", f"{entropy:.2f}", *ends))
  header = ("layer", "heads", "shared", "top_k", "weight of shared", "entropy")
  return (*header, "least used", "most used"), rows


def write_report(
  folder: pathlib.Path,
  title: str,
  config: Config,
  stats: HeadStats,
  similarity: HeadSimilarity,
  tokenizer: Tokenizer | None,
) -> None:
  """Writes report.html and its pictures as PNG files to a folder.

  Args:
    folder: made if needed.
    title: the checkpoint, and what its heads were measured on.
    config: of the model.
    stats: of its heads.
    similarity: of its heads.
    tokenizer: of a language model, or None.
  """
  images = {}
  for name, figure in _figures(config, stats, similarity):
    content = pictures.encode(figure, "png")
    write_whole(folder / f"{name}.png", content)
    data = base64.b64encode(content).decode()
    images[name] = f'<img alt="{name}" src="data:image/png;base64,{data}">'
  said = map(escape, verdict(config, stats, similarity))
  cosines = [
    (name, *(f"{mean_similarity(x[name]):.3f}" for x in similarity))
    for name in similarity.features
  ]
  of_cosines = _table(("layer", "patterns", "features"), cosines)
  loads = [x for name, x in images.items() if name.startswith("load_by_")]
  bodies = {
    "In short": f"<p>{'<br>'.join(said)}</p>",
    "Layers": _table(*layer_table(stats)),
    "Load of heads": "".join(loads),
    "Which head each token chose": images.get("routing_maps")
    or _texts(stats, tokenizer),
    "Similarity of heads": images["similarity"] + of_cosines,
  }
  sections = "\n".join(
    f"<section><h2>{heading}</h2>\n{body}<p>{_SHOWN.get(heading, '')}</p>"
    "</section>"
    for heading, body in bodies.items()
    if body
  )
  page = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
    f"<title>How heads are used</title>\n<style>{_STYLE}</style></head>\n"
    f"<body><h1>How heads are used</h1>\n<p>{escape(title)}: "
    f"{config.model.activated_share:.1%} of all heads are active. "
    f"{WORDS}</p>\n"
    f"{sections}\n</body></html>\n"
  )
  # Names of classes and files may hold bytes that are not UTF-8.
  write_whole(folder / "report.html", page.encode(errors="replace"))


def _figures(
  config: Config, stats: HeadStats, similarity: HeadSimilarity
) -> Iterator[tuple[str, Any]]:
  yield "similarity", pictures.similarity(similarity.features)
  if not any(layer.budget.top_k for layer in stats.layers):
    return
  for kind in list(stats.groups)[1:]:
    yield f"load_by_{kind}", pictures.load_by_group(stats, kind)
  if stats.layers[0].grid is not None:
    shown = _pixels(config, stats.maps.inputs)
    yield "routing_maps", pictures.routing_maps(stats, shown)


def _pixels(config: Config, inputs: np.ndarray) -> np.ndarray | None:
  """Images [M, X, Y, channels] uint8 from what the network read.

  None for texts, and for latents, which only their autoencoder can show.
  """
  data = config.data
  if getattr(data, "mean", None) is None:
    return None
  values = (inputs * np.float32(data.std) + np.float32(data.mean)) * 255
  return np.clip(np.rint(values), 0, 255).astype(np.uint8)


def _texts(stats: HeadStats, tokenizer: Tokenizer | None) -> str:
  """The beginnings of texts, for each layer coloured by the tokens' heads."""
  inputs, parts = stats.maps.inputs, []
  if not stats.layers or stats.layers[0].grid is not None:
    return ""
  is_real = np.broadcast_to(stats.maps.counted, inputs.shape)
  for layer, best in zip(stats.layers, stats.maps.best):
    colors = pictures.head_colors(layer.budget.num_heads)
    is_open = " open" * (not parts)
    parts.append(f"<details{is_open}><summary>{escape(layer.name)}</summary>")
    named = (_span(f"head {n}", n, colors) for n in sorted(layer.routed))
    parts.append(f"<p>{' '.join(named)}</p>")
    texts = zip(stats.labels, inputs, best, is_real)
    for label, tokens, heads, real in texts:
      spans = []
      shown = zip(tokens[real][:_TOKENS].tolist(), heads[real].tolist())
      for token, head in shown:
        text = tokenizer.decode([token]) if tokenizer else f"{token} "
        spans.append(_span(text, head, colors))
      parts.append(f'<p class="text">{escape(label)}: {"".join(spans)}</p>')
    parts.append("</details>")
  return "\n".join(parts)


def _span(text: str, head: int, colors: Sequence[str]) -> str:
  """Text in the colour of a head; -1 is none."""
  style = f' style="background:{colors[head]}99"' * (head >= 0)
  return f'<span title="head {head}"{style}>{escape(text)}</span>'


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """A table of plain text and numbers; "" without rows."""

  def line(cells: Sequence[Any], tag: str) -> str:
    inner = "".join(f"<{tag}>{escape(str(x))}</{tag}>" for x in cells)
    return f"<tr>{inner}</tr>"

  body = "\n".join(line(row, "td") for row in rows)
  return f"<table>{line(header, 'th')}{body}</table>" * bool(rows)
