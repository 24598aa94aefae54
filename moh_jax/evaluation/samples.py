"""What a checkpoint makes of a few examples, for its report."""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import get_family
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.evaluation import report
from moh_jax.evaluation.head_stats import HeadStats
from moh_jax.evaluation.pictures import head_colors, png_of_pixels, shrunk
from moh_jax.evaluation.probe import Probe
from moh_jax.inference.restore import Restored
from moh_jax.inference.sample import Sampler
from moh_jax.models.generation import image_grid
from moh_jax.runtime import sharding, steps
from moh_jax.runtime.files import read_bytes

_SAMPLES = 8
_COLUMNS = 4
_MOST_PNG = 1 << 26
_ZOOM_TO = 256  # pixels that small samples are enlarged to, about


def pixels(restored: Restored, inputs: np.ndarray) -> np.ndarray | None:
  """Images [M, X, Y, channels] uint8 from what the network read.

  None for texts, and for latents, which only their autoencoder can show.
  """
  data = restored.config.data
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
  restored: Restored,
  directory: str,
  probe: Probe,
  stats: HeadStats,
  names: Sequence[str],
  tokenizer: Tokenizer | None,
  mesh: Mesh,
) -> str:
  """HTML of images with their classes, a generated grid, or coloured text.

  Args:
    restored: the model.
    directory: of its checkpoint.
    probe: of the family.
    stats: with the examples that are shown.
    names: of the labels.
    tokenizer: of a language model, or None.
    mesh: the devices.
  """
  family = get_family(restored.config.model.family)
  if restored.config.model.READS_TEXT:
    return _texts(stats, names, tokenizer)
  if "sample" in family.commands:
    return _generated(restored, directory, mesh)
  shown = pixels(restored, stats.maps.inputs)
  if shown is None or "classify" not in family.commands:
    return ""
  return _classified(restored, probe, stats, shown, names, mesh)


def _classified(
  restored: Restored,
  probe: Probe,
  stats: HeadStats,
  shown: np.ndarray,
  names: Sequence[str],
  mesh: Mesh,
) -> str:
  @jax.jit
  def probabilities(params: Any, batch: Any) -> jax.Array:
    return jax.nn.softmax(probe.apply(params, batch)[0])

  images = sharding.pad_to_shards(stats.maps.inputs, mesh)
  batch = {probe.shown: sharding.put_batch(images, mesh)}
  found = sharding.gather(probabilities(restored.params, batch), mesh)
  figures = []
  for image, row, label in zip(shown, found, stats.maps.label.tolist()):
    best = int(row.argmax())
    caption = f"{names[label]}: taken for {names[best]}, {row[best]:.0%}"
    figures.append(report.captioned(png_of_pixels(image), caption))
  return "".join(figures)


def _generated(restored: Restored, directory: str, mesh: Mesh) -> str:
  """The run's own newest picture up to the checkpoint, else new samples."""
  folder = steps.workdir(directory) / "samples"
  own = []
  if folder.is_dir():
    own = [
      file
      for file in sorted(folder.glob("*.png"))
      if (stem := pathlib.PurePath(file.name).stem).isdecimal()
      and int(stem) <= restored.step
    ]
  if own:
    png = shrunk(read_bytes(own[-1], _MOST_PNG))
    return report.image(png, "samples of the run")
  if restored.config.diffusion.space != "pixel":
    return "<p>Latents need their autoencoder to be shown: see `sample`.</p>"
  made = Sampler(restored, mesh=mesh).batch(0, _SAMPLES)
  grid = image_grid(made, columns=_COLUMNS)
  zoom = max(1, _ZOOM_TO // grid.shape[0])
  grid = grid.repeat(zoom, axis=0).repeat(zoom, axis=1)
  return report.image(shrunk(png_of_pixels(grid)), "generated samples")


def _texts(
  stats: HeadStats, names: Sequence[str], tokenizer: Tokenizer | None
) -> str:
  texts = token_texts(tokenizer, stats)
  is_real = np.broadcast_to(stats.maps.counted, stats.maps.inputs.shape)
  layers = {}
  for place, layer in enumerate(stats.layers):
    shared, routed = layer.budget.shared, layer.budget.routed
    layers[layer.name] = {
      "heads": [
        np.where(row < 0, -1, row - shared)[real].tolist()
        for row, real in zip(stats.maps.best[place], is_real)
      ],
      "colors": head_colors(routed),
      "names": list(layer.order[shared:]),
    }
  tasks = ", ".join(dict.fromkeys(names[i] for i in stats.maps.label.tolist()))
  if not layers:
    plain = ["".join(text) for text in texts]
    return "".join(report.preformatted(text) for text in plain)
  return f"{report.preformatted(tasks)}{report.colored_texts(texts, layers)}"
