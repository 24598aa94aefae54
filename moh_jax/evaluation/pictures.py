"""Pictures of head statistics: PNG and SVG, with palettes for all eyes.

Heads have the numbers and colours of their place in the layer's parameters,
0 to H - 1, in every picture. matplotlib is imported where a figure is made:
it takes long, and most commands make none.
"""

import io
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from moh_jax.data.decode import to_array, to_picture
from moh_jax.evaluation.head_stats import HeadStats
from moh_jax.runtime.files import write_whole

# Okabe and Ito's colours, which the common kinds of colour blindness tell
# apart. More heads than colours are shades of cividis.
_PALETTE = (
  *("#E69F00", "#56B4E9", "#009E73", "#F0E442"),
  *("#0072B2", "#D55E00", "#CC79A7", "#000000"),
)
_MASKED = "#DDDDDD"
SCORES = ("bits_per_byte", "accuracy", "loss")  # the main ones
_DPI = 110
_TILE = 112  # columns that an image is enlarged to in a grid
_PANELS = 4  # panels side by side
_SHOWN_LAYERS = 6  # columns of routing maps
_SHOWN_TICKS = 40  # more groups have no names at the axis


def write_plot(path: str, figure: Any) -> None:
  """Writes a figure to a file that ends in .png or .svg."""
  file = pathlib.Path(path)
  write_whole(file, encode(figure, file.suffix[1:]))


def encode(figure: Any, form: str) -> bytes:
  """A figure as the content of a file, "png" or "svg"."""
  from matplotlib.text import Text

  # Names of classes and texts may hold "$", which would begin a formula.
  for part in figure.findobj(Text):
    part.set_parse_math(False)
    part.set_text(part.get_text())
  stream = io.BytesIO()
  figure.savefig(stream, format=form, dpi=_DPI)
  return stream.getvalue()


def tiles(
  images: np.ndarray, names: Sequence[str] = (), zoom: int = 0
) -> np.ndarray:
  """Images at a size that is seen, with names beneath.

  Args:
    images: [B, X, Y, 1 or 3] uint8.
    names: of the images, cut to their width; () writes none.
    zoom: how often a pixel is repeated in each direction; 0 makes an image at
      least 112 pixels wide.
  """
  zoom = zoom or -(-_TILE // images.shape[2])
  images = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
  if not names:
    return images
  from matplotlib import get_data_path  # has a font of more than ASCII
  from PIL import ImageDraw, ImageFont

  (height, width), out = images.shape[1:3], []
  font = pathlib.Path(get_data_path(), "fonts/ttf/DejaVuSans.ttf")
  font = ImageFont.truetype(font, max(12, width // 9))
  margin = ((0, 0), (0, sum(font.getmetrics()) + 2), (0, 0), (0, 0))
  for image, name in zip(np.pad(images, margin, constant_values=255), names):
    text = name
    picture = to_picture(image)
    while font.getlength(text) > width - 2:
      text = text[:-1]
    ImageDraw.Draw(picture).text((1, height + 1), text, "black", font)
    out.append(to_array(picture))
  return np.stack(out)


def new_figure(**options: Any) -> Any:
  """An empty figure of matplotlib, with `options` of its `Figure`."""
  from matplotlib.figure import Figure

  return Figure(layout="constrained", **options)


def head_colors(count: int) -> list[str]:
  """A colour for each of several heads, "#RRGGBB"."""
  if count <= len(_PALETTE):
    return list(_PALETTE[:count])
  from matplotlib import colormaps, colors

  shades = colormaps["cividis"](np.linspace(0, 1, count))
  return [colors.to_hex(shade) for shade in shades]


def load_by_group(stats: HeadStats, kind: str) -> Any:
  """Share of tokens that select each routed head, groups by heads.

  Like Figures 3 and A to E of the paper (arXiv:2410.11842): a panel for each
  layer, a row for each class, task or range of timesteps. A group without
  examples is grey.

  Args:
    stats: the statistics.
    kind: one of the groupings.
  """
  groups = stats.groups[kind]
  count = len(groups.names)
  shown = {
    f"{layer.name}, top {layer.budget.top_k}": (layer, load)
    for layer, load in zip(stats.layers, groups.load)
    if layer.budget.top_k
  }
  names = groups.names if count <= _SHOWN_TICKS else ()
  height = min(max(1.2 + 0.16 * count, 1.8), 6.0 if names else 3.0)
  title = f"Load of routed heads by {kind}"
  figure, axes = _panels(shown, (2.4, height), title, sharey=True)
  for axis, (layer, load) in zip(axes, shown.values()):
    axis.set_facecolor(_MASKED)
    style = {"cmap": "cividis", "aspect": "auto", "rasterized": True}
    values = load[:, layer.budget.shared :]
    image = axis.imshow(values, vmin=0, vmax=1, **style)
    places = range(layer.budget.routed)
    axis.set_xticks(places, layer.routed, fontsize=6, rotation=90)
    axis.set_yticks(range(len(names)), names, fontsize=6)
  figure.supxlabel("routed head", fontsize=8)
  figure.supylabel(kind, fontsize=8)
  figure.colorbar(image, ax=figure.axes, label="share of tokens", shrink=0.6)
  return figure


def routing_maps(stats: HeadStats, pictures: np.ndarray | None) -> Any:
  """Which head the patches of the first examples chose, by layer.

  Args:
    stats: the statistics of a model of images.
    pictures: [M, X, Y, channels] uint8 of the examples; None shows the maps
      alone.

  Returns:
    A figure with a row for each example. Patches have the colour of their best
    selected head.
  """
  from matplotlib.colors import to_rgba_array
  from matplotlib.patches import Patch

  layers, best = stats.layers, stats.maps.best
  palette = head_colors(max(layer.budget.num_heads for layer in layers))
  colors = to_rgba_array([*palette, _MASKED])  # the last is for -1
  shown = np.linspace(0, len(layers) - 1, min(len(layers), _SHOWN_LAYERS))
  extra = pictures is not None
  names = stats.labels
  columns = len(shown) + extra
  figure = new_figure(figsize=(1.5 * columns + 1.1, 1.5 * len(names) + 0.6))
  axes = figure.subplots(len(names), columns, squeeze=False)
  for example, (row, name) in enumerate(zip(axes, names)):
    row[0].set_ylabel(name, fontsize=7)
    if extra:
      row[0].imshow(pictures[example].squeeze(), cmap="gray", vmin=0, vmax=255)
    for axis, place in zip(row[extra:], shown.round().astype(int)):
      axis.imshow(colors[best[place][example].reshape(layers[place].grid)])
      if not example:
        axis.set_title(layers[place].name, fontsize=8)
  for axis in axes.flat:
    axis.set(xticks=[], yticks=[])
  if len(palette) <= len(_PALETTE):  # whose colours all differ
    heads = sorted({head for layer in layers for head in layer.routed})
    handles = [Patch(color=palette[n], label=f"head {n}") for n in heads]
    figure.legend(handles=handles, fontsize=7, loc="outside right upper")
  figure.supylabel("class of the example", fontsize=8)
  figure.suptitle("Best selected head of each patch", fontsize=10)
  return figure


def similarity(features: Mapping[str, np.ndarray]) -> Any:
  """Mean cosines between the heads of every layer, heads by heads.

  Args:
    features: [H, H] for each layer.
  """
  title = "Similarity of what heads add to the tokens"
  figure, axes = _panels(features, (2, 2.1), title)
  for axis, values in zip(axes, features.values()):
    image = axis.imshow(values, cmap="cividis", vmin=-1, vmax=1)
    axis.locator_params(integer=True)  # as the numbers of heads are
  figure.supxlabel("head", fontsize=8)
  figure.supylabel("head", fontsize=8)
  figure.colorbar(image, ax=figure.axes, label="cosine", shrink=0.6)
  return figure


def _panels(
  names: Collection[str], each: tuple[float, float], title: str, **options: Any
) -> tuple[Any, list[Any]]:
  """A figure of panels, row by row, and their axes.

  Args:
    names: of the panels, at least one.
    each: width and height of a panel, inches.
    title: of the figure.
    **options: of matplotlib's `subplots`.
  """
  columns = min(_PANELS, len(names))
  lines = -(-len(names) // columns)
  figure = new_figure(figsize=(each[0] * columns + 1.6, each[1] * lines + 0.6))
  figure.suptitle(title, fontsize=10)
  axes = list(figure.subplots(lines, columns, squeeze=False, **options).flat)
  for axis in axes[len(names) :]:
    axis.set_axis_off()
  for axis, name in zip(axes, names):
    axis.set_title(name, fontsize=8)
    axis.tick_params(labelsize=6)
  return figure, axes[: len(names)]
