"""`python -m moh_jax show-batch`."""

import argparse

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from moh_jax.cli import common
from moh_jax.config import Config
from moh_jax.data.decode import to_array, to_picture
from moh_jax.data.infer import resolve
from moh_jax.data.pipeline import Batch, TrainBatches, train_images
from moh_jax.data.sources import ImageSource, is_latent, make_source
from moh_jax.inference.sample import write_grid
from moh_jax.training import classification

_SMALLEST_SIDE = 112  # columns of an image in the sheet, for a readable name
_LINE = 14  # rows of a name


def run(args: argparse.Namespace) -> int:
  """Writes images of one training batch, with their classes, as a grid."""
  out = common.out_file(args.out, ".png")
  config = resolve(_checked(args.config))
  source = make_source(config, "train")
  batch = _read(config, source, args.step, args.num)
  # Images are mixed in pairs, which may be one more than was asked for.
  images, targets = (part[: args.num] for part in _mixed(config, batch))
  names = [_name(target, source.class_names) for target in targets]
  zoom = -(-_SMALLEST_SIDE // images.shape[2])
  images = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
  tiles = np.stack([_captioned(*pair) for pair in zip(images, names)])
  columns = args.columns or min(len(tiles), 8)
  write_grid(out, tiles, columns)
  print(f"{len(tiles)} images of step {args.step} written to {out}")
  return 0


def _checked(config: Config) -> Config:
  """The config, if its training reads pixels."""
  if config.model.READS_TEXT or is_latent(config):
    raise ValueError(
      f"data.source={config.data.source!r} of model.family="
      f"{config.model.family!r}: show-batch shows pixels, not text or latents"
    )
  return config


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


def _captioned(image: np.ndarray, name: str) -> np.ndarray:
  """An image above its name."""
  picture = to_picture(image)
  sheet = Image.new(
    picture.mode, (picture.width, picture.height + _LINE), "white"
  )
  sheet.paste(picture)
  font = ImageFont.load_default(size=10)
  ImageDraw.Draw(sheet).text((2, picture.height), name, fill="black", font=font)
  return to_array(sheet)
