"""Pictures of head statistics: PNG and SVG, with palettes for all eyes."""

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from moh_jax.data.decode import to_picture
from moh_jax.data.input_files import import_extra
from moh_jax.evaluation.head_stats import HeadStats, Layer, RoutingMaps

FORMATS = ("png", "svg")
# Okabe and Ito's colours, which the common kinds of colour blindness tell
# apart. More heads than colours are shades of cividis.
_PALETTE = (
  *("#E69F00", "#56B4E9", "#009E73", "#F0E442"),
  *("#0072B2", "#D55E00", "#CC79A7", "#000000"),
)
_MASKED = "#DDDDDD"
SCORES = ("bits_per_byte", "accuracy", "loss")  # the main ones
_PURPOSE = "a picture"  # what needs matplotlib, where `check` was not asked
_DPI = (110, 80, 55, 40)  # the first one where nothing limits the size
_MOST_BYTES = 400_000  # of a picture in a page
_PANELS = 4  # panels side by side
_SHOWN_LAYERS = 6  # columns of routing maps
_SHOWN_TICKS = 40  # more groups have no names at the axis


def check(option: str) -> None:
  """Checks that matplotlib is installed, before anything is measured.

  Args:
    option: what asks for pictures, such as "--out".

  Raises:
    ValueError: it is not.
  """
  import_extra("matplotlib", option, "train")


def check_plot(path: str) -> None:
  """Checks that a picture can be written, before anything is measured.

  Raises:
    ValueError: matplotlib is missing, or the file is of another form.
  """
  if pathlib.PurePath(path).suffix[1:] not in FORMATS:
    raise ValueError(f"--plot {path} must end in .png or .svg")
  check("--plot")


def encode(figure: Any, form: str, dpi: int = _DPI[0]) -> bytes:
  """A figure as the content of a file, "png" or "svg"."""
  # Names of classes and texts may hold "$", which would begin a formula.
  text = import_extra("matplotlib.text", _PURPOSE, "train").Text
  for part in figure.findobj(text):
    part.set_parse_math(False)
  stream = io.BytesIO()
  figure.savefig(stream, format=form, dpi=dpi)
  return stream.getvalue()


def encode_small(figure: Any) -> bytes:
  """A figure as a PNG of at most 400 kB where a coarser one can be so small."""
  for dpi in _DPI:
    content = encode(figure, "png", dpi)
    if len(content) <= _MOST_BYTES:
      break
  return content


def shrunk(png: bytes) -> bytes:
  """A PNG file of at most 400 kB: the same one, or halved until it is so."""
  while len(png) > _MOST_BYTES:
    with Image.open(io.BytesIO(png)) as picture:
      png = _png(picture.convert("RGB").reduce(2))
  return png


def png_of_pixels(pixels: np.ndarray) -> bytes:
  """A PNG file of an image [X, Y, 1 or 3] uint8."""
  return _png(to_picture(pixels))


def head_colors(count: int) -> list[str]:
  """A colour for each of a layer's routed heads, "#RRGGBB"."""
  if count <= len(_PALETTE):
    return list(_PALETTE[:count])
  colors = import_extra("matplotlib.colors", _PURPOSE, "train")
  colormaps = import_extra("matplotlib", _PURPOSE, "train").colormaps
  shades = colormaps["cividis"](np.linspace(0, 1, count))
  return [colors.to_hex(shade) for shade in shades]


def load_by_group(stats: HeadStats, kind: str) -> Any:
  """Share of tokens that select each routed head, groups by heads.

  The paper's Figure 3 and A to E in kind (arXiv:2410.11842): a panel for each
  layer, a row for each class, task or range of timesteps. A group without
  examples is grey.

  Args:
    stats: the statistics.
    kind: one of the groupings.
  """
  groups = stats.groups[kind]
  count = len(groups.names)
  shown = [i for i, layer in enumerate(stats.layers) if layer.budget.top_k]
  named = count <= _SHOWN_TICKS
  height = min(max(1.2 + 0.16 * count, 1.8), 6.0 if named else 3.0)
  figure, axes = _panels(len(shown), (2.4, height), (1.6, 0.6))
  columns = min(_PANELS, len(shown))
  for panel, (axis, place) in enumerate(zip(axes, shown)):
    layer = stats.layers[place]
    shared = layer.budget.shared
    values = groups.load[place][:, shared:]
    axis.set_facecolor(_MASKED)
    image = axis.imshow(
      values, cmap="cividis", vmin=0, vmax=1, aspect="auto", rasterized=True
    )
    axis.set_title(f"{layer.name}, top {layer.budget.top_k}", fontsize=8)
    axis.set_xticks(
      range(values.shape[1]), layer.order[shared:], fontsize=6, rotation=90
    )
    first = panel % columns == 0
    names = [_printable(n) for n in groups.names] if named and first else []
    axis.set_yticks(range(count) if names else [], names, fontsize=6)
    if first:
      axis.set_ylabel(kind, fontsize=8)
    if panel + columns >= len(shown):
      axis.set_xlabel("routed head", fontsize=8)
  figure.colorbar(image, ax=figure.axes, label="share of tokens", shrink=0.6)
  figure.suptitle(f"Load of routed heads by {kind}", fontsize=10)
  return figure


def routing_maps(
  stats: HeadStats,
  titles: Sequence[str],
  pictures: Sequence[np.ndarray] | None = None,
) -> Any:
  """Which head the tokens of the first examples chose, by layer.

  Args:
    stats: the statistics.
    titles: of the examples.
    pictures: [X, Y, channels] uint8 of each example, for models of images;
      None shows the maps alone.

  Returns:
    A figure with a row for each example. Patches have the colour of their best
    selected head; of a text each row is a layer and each column a token.
  """
  maps, titles = stats.maps, [_printable(title) for title in titles]
  if stats.layers[0].grid is None:
    return _text_maps(stats.layers, maps, titles)
  shown = _spread(len(stats.layers), _SHOWN_LAYERS)
  extra = pictures is not None
  columns = len(shown) + extra
  figure = new_figure(
    figsize=(1.5 * columns + 0.4, 1.5 * len(titles) + 0.9), layout="constrained"
  )
  axes = figure.subplots(len(titles), columns, squeeze=False)
  for example, title in enumerate(titles):
    row = axes[example]
    if extra:
      row[0].imshow(pictures[example].squeeze(), cmap="gray", vmin=0, vmax=255)
    row[0].set_ylabel(title, fontsize=7)
    for axis, place in zip(row[extra:], shown):
      layer = stats.layers[place]
      axis.imshow(
        _colored(maps.best[place][example].reshape(layer.grid), layer)
      )
      if not example:
        axis.set_title(layer.name, fontsize=8)
  for axis in axes.flat:
    axis.set_xticks([])
    axis.set_yticks([])
  _head_legend(figure, stats.layers)
  figure.suptitle("Best selected head of each patch", fontsize=10)
  return figure


def load_over_steps(
  loads: Mapping[str, Sequence[tuple[int, Sequence[float]]]],
) -> Any:
  """Load of every routed head over the steps of the training.

  Args:
    loads: for each layer pairs of the step and the loads of its routed heads.
  """
  figure, axes = _panels(len(loads), (2.6, 1.9), (0.4, 0.6))
  for axis, (name, points) in zip(axes, loads.items()):
    steps = [step for step, _ in points]
    values = np.array([load for _, load in points])
    for head, color in enumerate(head_colors(values.shape[1])):
      axis.plot(steps, values[:, head], color=color, linewidth=1)
    axis.set_title(name, fontsize=8)
    axis.set_ylim(0, 1)
    axis.tick_params(labelsize=6)
  figure.supxlabel("step", fontsize=8)
  figure.supylabel("share of tokens", fontsize=8)
  figure.suptitle("Load of routed heads over the training", fontsize=10)
  return figure


def similarity(features: Mapping[str, np.ndarray]) -> Any:
  """Mean cosines between the heads of every layer, heads by heads.

  Args:
    features: [H, H] for each layer.
  """
  figure, axes = _panels(len(features), (2, 2.1), (0.8, 0.5))
  for axis, (name, values) in zip(axes, features.items()):
    image = axis.imshow(values, cmap="cividis", vmin=-1, vmax=1)
    axis.set_title(name, fontsize=8)
    ticks = range(0, len(values), -(-len(values) // 16))
    axis.set_xticks(ticks)
    axis.set_yticks(ticks)
    axis.tick_params(labelsize=6)
  figure.colorbar(image, ax=figure.axes, label="cosine", shrink=0.6)
  figure.suptitle("Similarity of what heads add to the tokens", fontsize=10)
  return figure


def curves(
  series: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]],
) -> Any:
  """Metrics over the steps of the training, a panel for each.

  Args:
    series: for each metric its splits, each with pairs of step and value.
  """
  figure, axes = _panels(len(series), (3.2, 2.2), (0, 0.3), across=3)
  splits = list(dict.fromkeys(s for parts in series.values() for s in parts))
  for axis, (name, parts) in zip(axes, series.items()):
    for split, points in parts.items():
      color = _PALETTE[4 + splits.index(split) % 4]
      marker = "o" if len(points) < 20 else None
      steps, values = zip(*points)
      axis.plot(
        steps, values, color=color, marker=marker, markersize=3, label=split
      )
    axis.set_title(name, fontsize=8)
    axis.tick_params(labelsize=6)
    axis.ticklabel_format(useOffset=False)
    axis.legend(fontsize=6)
  return figure


def dial(rows: Sequence[Mapping[str, float]]) -> Any:
  """Scores of one checkpoint with several numbers of heads.

  Args:
    rows: metrics of each, among them "activated_share" and "seconds".

  Returns:
    A figure with a row of panels over the activated share, and one over time.
  """
  over = {
    "activated_share": "activated share of the heads",
    "seconds": "seconds of an evaluation",
  }
  shown = [name for name in SCORES if name in rows[0]]
  if not shown:  # a family of the user's own may have other scores
    found = {n for n, value in rows[0].items() if isinstance(value, float)}
    shown = sorted(found - over.keys())
  figure = new_figure(figsize=(3.4 * len(shown), 5), layout="constrained")
  axes = figure.subplots(2, len(shown), squeeze=False)
  for line, (place, label) in zip(axes, over.items()):
    points = sorted(rows, key=lambda row: row[place])
    for axis, name in zip(line, shown):
      xs = [row[place] for row in points]
      ys = [row[name] for row in points]
      axis.plot(xs, ys, color=_PALETTE[4], marker="o")
      axis.set_xlabel(label, fontsize=8)
      axis.set_ylabel(name, fontsize=8)
      axis.grid(alpha=0.3)
  return figure


def _text_maps(
  layers: Sequence[Layer], maps: RoutingMaps, titles: Sequence[str]
) -> Any:
  figure = new_figure(
    figsize=(10, len(titles) * (0.6 + 0.12 * len(layers)) + 1.0),
    layout="constrained",
  )
  axes = figure.subplots(len(titles), 1, squeeze=False)[:, 0]
  for example, (axis, title) in enumerate(zip(axes, titles)):
    colored = [
      _colored(maps.best[place][example][None], layer)[0]
      for place, layer in enumerate(layers)
    ]
    axis.imshow(np.stack(colored), aspect="auto", interpolation="nearest")
    axis.set_title(title, fontsize=7, loc="left")
    axis.set_ylabel("layer", fontsize=7)
    axis.tick_params(labelsize=6)
  axes[-1].set_xlabel("token", fontsize=7)
  _head_legend(figure, layers)
  figure.suptitle("Best selected head of each token", fontsize=10)
  return figure


def _colored(best: np.ndarray, layer: Layer) -> np.ndarray:
  """RGB in [0, 1] of the best heads [X, Y]; grey where there is none."""
  to_rgb = import_extra("matplotlib.colors", _PURPOSE, "train").to_rgb
  colors = [*head_colors(layer.budget.routed), _MASKED]
  table = np.array([to_rgb(color) for color in colors])
  return table[np.where(best < 0, -1, best - layer.budget.shared)]


def _head_legend(figure: Any, layers: Sequence[Layer]) -> None:
  """Names the colours, by place among a layer's routed heads."""
  patch = import_extra("matplotlib.patches", _PURPOSE, "train").Patch
  count = max(layer.budget.routed for layer in layers)
  if count > len(_PALETTE):
    return
  handles = [patch(color=color) for color in head_colors(count)]
  labels = [f"routed head {place + 1}" for place in range(count)]
  figure.legend(
    handles, labels, loc="outside lower center", ncols=4, fontsize=7
  )


def _spread(count: int, most: int) -> list[int]:
  """At most `most` of `count` places, evenly spread, with first and last."""
  places = np.linspace(0, count - 1, min(count, most))
  return sorted({round(place) for place in places.tolist()})


def _printable(name: str) -> str:
  """A name with "?" for bytes that are not UTF-8, which no font can show."""
  return name.encode(errors="replace").decode()


def _png(picture: Image.Image) -> bytes:
  stream = io.BytesIO()
  picture.save(stream, "png")
  return stream.getvalue()


def _panels(
  count: int,
  each: tuple[float, float],
  around: tuple[float, float],
  across: int = _PANELS,
) -> tuple[Any, list[Any]]:
  """A figure of `count` panels, row by row, and their axes.

  Args:
    count: at least 1.
    each: width and height of a panel, inches.
    around: what the figure has beside them.
    across: panels of a row, at most.
  """
  columns = min(across, count)
  lines = -(-count // columns)
  size = each[0] * columns + around[0], each[1] * lines + around[1]
  figure = new_figure(figsize=size, layout="constrained")
  axes = list(figure.subplots(lines, columns, squeeze=False).flat)
  for axis in axes[count:]:
    axis.set_axis_off()
  return figure, axes[:count]


def new_figure(**options: Any) -> Any:
  """An empty figure of matplotlib, with `options` of its `Figure`."""
  return import_extra("matplotlib.figure", _PURPOSE, "train").Figure(**options)
