"""What a model is trained on, as pictures or text, for `inspect --batch`."""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from moh_jax.config import (
  Config,
  DataConfig,
  DiffusionConfig,
  DiTConfig,
  MeshConfig,
)
from moh_jax.convert.vae import load_autoencoder
from moh_jax.data.packed import LatentSource
from moh_jax.data.pipeline import Batch, TrainBatches, train_images
from moh_jax.data.sequences import Text
from moh_jax.data.sources import ImageSource, is_latent, make_source
from moh_jax.data.tokenizers import JsonTokenizer, Tokenizer
from moh_jax.evaluation.pictures import tiles
from moh_jax.inference.sample import write_grid
from moh_jax.models.generation import to_pixels
from moh_jax.runtime import sharding
from moh_jax.runtime.files import printable, printable_name
from moh_jax.training import classification

_LATENTS = 64  # that are decoded at a time


def write_batch(
  out: pathlib.Path, config: Config, step: int, num: int, columns: int | None
) -> Iterator[str]:
  """Writes images of one training batch as a grid.

  Args:
    out: PNG file.
    config: of the run, resolved.
    step: whose batch it is, from 1 on.
    num: images at most.
    columns: of the grid; None is 8 at most.

  Returns:
    A line for each row of the grid: the classes in it.

  Raises:
    ValueError: the run reads no pixels.
  """
  if config.model.READS_TEXT or is_latent(config):
    raise ValueError(
      f"data.source={config.data.source!r} of model.family="
      f"{config.model.family!r}: --batch shows pixels, not text or latents"
    )
  source = make_source(config, "train")
  batch = _read(config, source, step, num)
  # Images are mixed in pairs, which may be one more than was asked for.
  images, targets = (part[:num] for part in _mixed(config, batch))
  columns = columns or min(len(images), 8)
  names = [_name(target, source.class_names) for target in targets]
  write_grid(out, tiles(images, names), columns)
  return _by_row(names, columns)


def text_lines(
  config: Config, step: int, num: int, marks: tuple[str, str]
) -> Iterator[str]:
  """The text of packed sequences of one training batch.

  Args:
    config: of the run, resolved.
    step: whose batch it is, from 1 on.
    num: sequences at most.
    marks: what stands before and after text that the model learns to write.

  Yields:
    Of each sequence a line of counts, and its text without padding.

  Raises:
    ValueError: the run reads no text.
  """
  data = config.data
  if not config.model.READS_TEXT or data.source == "fake":
    raise ValueError(
      f"data.source={data.source!r} of model.family={config.model.family!r}: "
      "--batch - shows text; pictures need a file that ends in .png"
    )
  text = Text(data, config.model.vocab_size, "train")
  stream, size = text.stream(config.train.seed), data.batch_size
  for index in range(min(num, size)):
    sequence = stream[(step - 1) * size + index]
    count, segments = (
      np.count_nonzero(sequence["segments"]),
      sequence["segments"],
    )
    tokens = np.append(sequence["inputs"][:1], sequence["targets"][:count])
    trained = np.append(False, sequence["weights"][:count] > 0)
    yield (
      f"sequence {index + 1}: {count} tokens of {len(segments)}, "
      f"{trained.sum()} trained, {segments.max()} documents or conversations"
    )
    runs = np.split(tokens, np.flatnonzero(np.diff(trained)) + 1)
    shown = [printable(_text_of(text.tokenizer, run)) for run in runs]
    yield "".join(
      f"{marks[0]}{part}{marks[1]}" if number % 2 else part
      for number, part in enumerate(shown)
    )


def _text_of(tokenizer: Tokenizer, ids: np.ndarray) -> str:
  """The text of ids, with special tokens where the tokenizer writes them."""
  if isinstance(tokenizer, JsonTokenizer):
    return tokenizer.parser.decode(ids.tolist(), skip_special_tokens=False)
  return tokenizer.decode(ids)


def write_latents(
  out: pathlib.Path,
  folder: str,
  split: str,
  vae: str,
  num: int,
  columns: int | None,
) -> Iterator[str]:
  """Writes a grid of decoded latents.

  Args:
    out: PNG file.
    folder: what `prepare encode-latents` wrote.
    split: of the latents.
    vae: weights of the autoencoder.
    num: latents at most, at even distances in the set.
    columns: of the grid; None is about as many as there are rows.

  Returns:
    A line for each row of the grid: the classes in it.

  Raises:
    ValueError: there are no latents.
  """
  source = LatentSource(folder, split)
  if not len(source):
    raise ValueError(f"{folder}/{split} holds no latents")
  mesh = sharding.make_mesh(MeshConfig())
  encoder = source.encoder_sha256
  config = _config_of_run(folder, source)
  decode = load_autoencoder(vae, config, mesh, encoder=encoder).decode
  num = min(num, len(source))
  examples = [source[i * len(source) // num] for i in range(num)]
  means = np.stack([x["image"][0, 0] for x in examples]).astype(np.float32)
  images = []
  for i in range(0, num, _LATENTS):
    decoded = decode(means[i : i + _LATENTS])
    sharding.check_finite(decoded, f"the images that {vae} makes")
    images.append(np.asarray(to_pixels(decoded)))
  images = np.concatenate(images)
  columns = columns or max(1, round(num**0.5))
  names = [source.class_names[int(x["label"])] for x in examples]
  write_grid(out, tiles(images, names), columns)
  return _by_row(names, columns)


def _by_row(names: Sequence[str], columns: int) -> Iterator[str]:
  for row, start in enumerate(range(0, len(names), columns), 1):
    shown = map(printable_name, names[start : start + columns])
    yield f"row {row}: {', '.join(shown)}"


def _config_of_run(path: str, source: LatentSource) -> Config:
  """The config of a run on these latents, which a decoder must fit."""
  model = DiTConfig(
    input_size=source.latent_shape[:2],
    patch_size=1,
    channels=source.channels,
    num_classes=len(source.class_names),
  )
  scaling = dataclasses.asdict(source.scaling)
  diffusion = {f"latent_{name}": value for name, value in scaling.items()}
  return Config(
    model=model,
    data=DataConfig(source="latents", path=path),
    diffusion=DiffusionConfig(**diffusion),
  )


def _read(config: Config, source: ImageSource, step: int, num: int) -> Batch:
  """Rows of both ends of a step's batch, which the run mixes in pairs."""
  size = config.data.batch_size
  half = min(-(-num // 2), size // 2)
  rows = [*range(half), *range(size - half, size)] if half else [0]
  stream = TrainBatches(train_images(config, source), config.data, rows)
  stream.seek(step - 1)
  try:
    return next(stream)
  finally:
    stream.close()


def _mixed(config: Config, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
  """Images [B, X, Y, channels] uint8 and targets [B, classes].

  Mixup and CutMix are those of the run's section `classifier`, if it has one,
  with a sample of their own.
  """
  images = batch["image"].astype(np.float32)
  classes = config.model.num_classes
  targets = classification.class_targets(batch["label"], classes)
  if "classifier" in config.sections:
    images, targets = classification.mix_images(
      jax.random.key(config.train.seed), images, targets, config.classifier
    )
  return np.asarray(images).round().astype(np.uint8), np.asarray(targets)


def _name(target: np.ndarray, names: tuple[str, ...]) -> str:
  """The class of an image, or both of a mixed one with their shares."""
  first, *second = np.argsort(-target, kind="stable")[:2]
  if not second or target[second[0]] < 0.005:
    return names[first]
  return " + ".join(f"{names[i]} {target[i]:.0%}" for i in (first, *second))
