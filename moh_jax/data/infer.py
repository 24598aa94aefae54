"""What a config leaves unset (None) and its data or its length tell."""

import contextlib
import dataclasses
import functools
import pathlib
import statistics
from typing import Any

from moh_jax.config import Config, DiffusionConfig
from moh_jax.config.autoencoder import LatentScaling
from moh_jax.config.data import FILE_SOURCES
from moh_jax.data.images import latents
from moh_jax.data.images.encoded import EncodedSource
from moh_jax.data.images.folders import SPLITS
from moh_jax.data.images.recipes import is_latent
from moh_jax.data.images.sources import open_files
from moh_jax.data.images.tables import is_tables
from moh_jax.data.shards import METADATA, read_metadata
from moh_jax.data.text.sequences import describe_set
from moh_jax.data.text.tokenizers import load_tokenizer

# What random data refuse beside other data, and its default.
_OF_FILES = {
  **{"mix": (), "ratios": ()},
  **{"class_list": "", "label_column": "", "decode": "exact"},
}
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_DIGITS = ((0.3,), (0.37,))  # of the training scans' pixels
_STDLIB_BPE = 2048  # tokens: 10 MiB of text train no more
# Random data have the shapes of the usual ones.
_FAKE_CLASSES = 1000
_FAKE_TOKENS = 65536
_FAKE_SIDE = 224
# Images whose headers tell the size and the channels of all: a look at each
# would take minutes at ImageNet's size.
_LOOKED_AT = 64
# Sides of inputs are multiples of this, which every stage can halve.
_SIDE_STEP, _MOST_INFERRED_SIDE = 32, 224


def resolve(config: Config) -> Config:
  """Fills in what a config leaves unset; what it states stays.

  `optim.warmup_steps` follows from the number of steps, `model.channels`,
  `model.num_classes` and `model.image_size` from the images or latents,
  `data.mean`, `data.std` and `data.eval_resize` from both,
  `diffusion.latent_scale` from the latents, `model.vocab_size` from the text's
  tokenizer. Data are looked at only for values that are unset.

  Raises:
    FileNotFoundError: data that tell an unset value are missing.
    ValueError: they are damaged, or do not fit what the config states.
  """
  warmup = config.optim.warmup(config.train.steps)
  optim = dataclasses.replace(config.optim, warmup_steps=warmup)
  lookups = _Lookups(config)
  found = {
    name: getattr(lookups, name)()
    for name in ("channels", "num_classes", "image_size", "vocab_size")
    if getattr(config.model, name, 0) is None
  }
  model, data = dataclasses.replace(config.model, **found), config.data
  if getattr(data, "mean", ()) is None and not is_latent(config):
    mean, std = _normalization(config, model.channels)
    data = dataclasses.replace(data, mean=mean, std=std)
  if getattr(data, "eval_resize", 0) is None:
    data = dataclasses.replace(data, eval_resize=min(model.input_shape[:2]))
  resolved = dataclasses.replace(config, model=model, data=data, optim=optim)
  if "diffusion" not in config.sections:
    return resolved
  diffusion = _scaled(config)
  sections = {**config.sections, "diffusion": diffusion}
  return dataclasses.replace(resolved, sections=sections)


def _scaled(config: Config) -> DiffusionConfig:
  """The section `diffusion` with the scaling of the latents."""
  if config.diffusion.latent_scale is not None:
    return config.diffusion
  scaling = LatentScaling()
  if config.data.source == "latents":
    # Checkpoints are converted with configs of runs whose data are elsewhere.
    with contextlib.suppress(FileNotFoundError):
      scaling = latents.stored_scaling(_metadata(config))
  values = dataclasses.asdict(scaling)
  stated = {f"latent_{name}": value for name, value in values.items()}
  return dataclasses.replace(config.diffusion, **stated)


def resolve_without_data(config: Config) -> tuple[Config, dict[str, Any]]:
  """As `resolve`, but data may be missing.

  Returns:
    The config, and by name the fields of the model that only missing data could
    tell; they have the values of random data.

  Raises:
    ValueError: data that are there are damaged, or do not fit the config.
  """
  try:
    return resolve(config), {}
  except FileNotFoundError:
    changes = {k: v for k, v in _OF_FILES.items() if hasattr(config.data, k)}
    data = dataclasses.replace(config.data, **changes, source="fake")
    found = resolve(dataclasses.replace(config, data=data))
  assumed = {
    field.name: getattr(found.model, field.name)
    for field in dataclasses.fields(config.model)
    if getattr(config.model, field.name) is None
  }
  unset = {
    field.name: getattr(found.data, field.name)
    for field in dataclasses.fields(config.data)
    if getattr(config.data, field.name) is None
  }
  data = dataclasses.replace(config.data, **unset)
  return dataclasses.replace(found, data=data), assumed


def _metadata(config: Config) -> dict[str, Any]:
  """What latents say of themselves."""
  return read_metadata(pathlib.Path(config.data.path) / "train", latents.KIND)


def _normalization(
  config: Config, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Mean and standard deviation of pixels in [0, 1]."""
  if "diffusion" not in config.sections:
    if config.data.source == "digits":
      return _DIGITS
    if channels == 3:
      return _IMAGENET
  halves = (0.5,) * channels  # pixels in [-1, 1]
  return halves, halves


class _Lookups:
  """What data tell of fields of a model that are unset."""

  def __init__(self, config: Config):
    self._config = config

  @functools.cached_property
  def _files(self) -> EncodedSource:
    """The training images, opened once."""
    return open_files(self._config.data, "train", 3)

  def channels(self) -> int:
    if self._config.data.source == "latents":
      return _metadata(self._config)["latent_shape"][-1]
    if self._config.data.source == "digits":
      return 1
    if is_latent(self._config):
      return 4
    return 3 if any(not grey for _, grey in self._described) else 1

  def image_size(self) -> tuple[int, int]:
    """A square about as large as the images, in steps of 32 up to 224."""
    sizes = [size for size, _ in self._described]
    side = statistics.median_low([min(size) for size in sizes])
    side = min(side // _SIDE_STEP * _SIDE_STEP, _MOST_INFERRED_SIDE)
    return (max(side, _SIDE_STEP),) * 2

  @functools.cached_property
  def _described(self) -> list[tuple[tuple[int, int], bool]]:
    """Rows and columns, and whether grey, of some training images.

    Images whose headers cannot be read are for `data.bad_images` to decide on.
    """
    data = self._config.data
    if data.source == "fake":
      return [((_FAKE_SIDE, _FAKE_SIDE), False)]
    if data.source == "digits":
      return [((8, 8), True)]
    source = self._files
    found, bad = [], ""
    for i in range(0, len(source), -(-len(source) // _LOOKED_AT)):
      try:
        found.append(source.describe(i))
      except (ValueError, FileNotFoundError) as error:
        bad = bad or str(error)
    if not found:
      raise ValueError(
        f"data.path={data.path!r}: none of the images that were looked at can "
        f"be read; the first: {bad}"
      )
    return found

  def num_classes(self) -> int:
    data = self._config.data
    if data.source == "digits":
      return 10
    if data.source == "fake":
      return _FAKE_CLASSES
    if data.source in FILE_SOURCES:
      return len(self._files.class_names)
    return len(_metadata(self._config)["class_names"])

  def vocab_size(self) -> int:
    data = self._config.data
    if data.source == "fake":
      return _FAKE_TOKENS
    if data.source == "stdlib":
      is_bytes = data.tokenizer == "bytes"
      return load_tokenizer("bytes").vocab_size if is_bytes else _STDLIB_BPE
    root = pathlib.Path(data.path)
    folders = [root / name / "train" for name in data.mix] or [root / "train"]
    return max(describe_set(folder)["vocab_size"] for folder in folders)


def data_at(config: Config, path: str) -> dict[str, Any]:
  """Fields of the section `data` that read another directory.

  Text is one token set in place of a mix. Latents are read as such, images as
  what `path` holds: shards, tables or folders. Without val/ all images of the
  latter two are held out.

  Args:
    config: of the run.
    path: directory with data of the same kind as the run's.
  """
  if config.model.READS_TEXT:
    return {"source": "tokens", "path": path, "mix": (), "ratios": ()}
  if config.data.source == "latents":
    return {"path": path}
  if any((pathlib.Path(path) / n / METADATA).is_file() for n in SPLITS):
    of_tables = {"label_column": "", "class_list": ""}
    return {"source": "array_record", "path": path, **of_tables}
  all_of_it = {"path": path, "val_share": 1.0}
  if is_tables(path):
    return {"source": "parquet", **all_of_it}
  return {"source": "image_folder", "label_column": "", **all_of_it}
