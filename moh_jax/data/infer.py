"""What a config leaves unset (None) and its data or its length tell."""

import dataclasses
import pathlib
from typing import Any

from etils import epath

from moh_jax.config import Config
from moh_jax.data.images import latents, records
from moh_jax.data.images.files import list_classes
from moh_jax.data.images.recipes import is_latent
from moh_jax.data.shards import read_metadata
from moh_jax.data.text.sequences import describe_set
from moh_jax.data.text.tokenizers import load_tokenizer

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_DIGITS = ((0.3,), (0.37,))  # of the training scans' pixels
_STDLIB_BPE = 2048  # tokens: 10 MiB of text train no more
# Random data have the shapes of the usual ones.
_FAKE_CLASSES = 1000
_FAKE_TOKENS = 65536


def resolve(config: Config) -> Config:
  """Fills in what a config leaves unset; what it states stays.

  `optim.warmup_steps` follows from the number of steps, `model.channels` and
  `model.num_classes` from the images or latents, `data.mean` and `data.std`
  from both, `model.vocab_size` from the text's tokenizer. Data are looked at
  only for values that are unset.

  Raises:
    FileNotFoundError: data that tell an unset value are missing.
    ValueError: they are damaged, or do not fit what the config states.
  """
  warmup = config.optim.warmup(config.train.steps)
  optim = dataclasses.replace(config.optim, warmup_steps=warmup)
  lookups = {
    "channels": _channels,
    "num_classes": _num_classes,
    "vocab_size": _vocab_size,
  }
  found = {
    name: look(config)
    for name, look in lookups.items()
    if getattr(config.model, name, 0) is None
  }
  model, data = dataclasses.replace(config.model, **found), config.data
  if getattr(data, "mean", ()) is None and not is_latent(config):
    mean, std = _normalization(config, model.channels)
    data = dataclasses.replace(data, mean=mean, std=std)
  return dataclasses.replace(config, model=model, data=data, optim=optim)


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
    changes: dict[str, Any] = {"source": "fake"}
    if getattr(config.data, "mix", ()):
      changes |= {"mix": (), "ratios": ()}
    data = dataclasses.replace(config.data, **changes)
    found = resolve(dataclasses.replace(config, data=data))
  assumed = {
    field.name: getattr(found.model, field.name)
    for field in dataclasses.fields(config.model)
    if getattr(config.model, field.name) is None
  }
  return dataclasses.replace(
    config, model=found.model, optim=found.optim
  ), assumed


def _channels(config: Config) -> int:
  if config.data.source == "latents":
    return _metadata(config)["latent_shape"][-1]
  if config.data.source == "digits":
    return 1
  return 4 if is_latent(config) else 3


def _num_classes(config: Config) -> int:
  data = config.data
  if data.source == "digits":
    return 10
  if data.source == "fake":
    return _FAKE_CLASSES
  if data.source == "image_folder":
    return len(list_classes(epath.Path(data.path) / "train"))
  return len(_metadata(config)["class_names"])


def _metadata(config: Config) -> dict[str, Any]:
  """What packed images or latents say of themselves."""
  data = config.data
  kind = latents.KIND if data.source == "latents" else records.KIND
  return read_metadata(pathlib.Path(data.path) / "train", kind)


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


def _vocab_size(config: Config) -> int:
  data = config.data
  if data.source == "fake":
    return _FAKE_TOKENS
  if data.source == "stdlib":
    is_bytes = data.tokenizer == "bytes"
    return load_tokenizer("bytes").vocab_size if is_bytes else _STDLIB_BPE
  root = pathlib.Path(data.path)
  folders = [root / name / "train" for name in data.mix] or [root / "train"]
  return max(describe_set(folder)["vocab_size"] for folder in folders)
