"""What a config leaves unset (None) and its data or its length tell."""

import contextlib
import dataclasses
import math
import os
from typing import Any

from moh_jax.config import Config, apply_overrides, imported
from moh_jax.config.dit import LatentScaling
from moh_jax.config.registry import SOURCES, get_source
from moh_jax.data.sequences import COUNTED
from moh_jax.data.sources import EncodedSource, is_latent
from moh_jax.runtime.steps import workdir

# Mean and standard deviation of ImageNet's pixels in [0, 1].
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Fields of the section `model` that data tell.
_FIELDS = ("channels", "num_classes", "image_size", "vocab_size")


def resolve(config: Config) -> Config:
  """Fills in what a config leaves unset; what it states stays.

  `data.tokenizer_path` is the folder of `train.init_from`, what counts steps
  follows from their number (`Config.scheduled`), and that from `train.epochs`
  and the training examples, `model.channels`, `model.num_classes` and
  `model.image_size` from the images or latents, `data.mean`, `data.std` and
  `data.eval_resize` from both, `diffusion.latent_scale` (and with it
  `latent_shift`, `latent_mean` and `latent_std`) from the latents,
  `model.vocab_size` from the text's tokenizer. Data are looked at only for
  values that are unset.

  Raises:
    FileNotFoundError: data that tell an unset value are missing.
    ValueError: they are damaged, or do not fit what the config states.
  """
  start, options = config.train.init_from, get_source(config.data).options
  if start and "tokenizer_path" in options and not config.data.tokenizer_path:
    folder = os.fspath(workdir(start))
    config = apply_overrides(config, "data", tokenizer_path=folder)
  wanted = [n for n in _FIELDS if getattr(config.model, n, 0) is None]
  normalizes = getattr(config.data, "mean", ()) is None
  normalizes = normalizes and not is_latent(config)
  source = imported(get_source(config.data).source)
  asked = [*wanted, *["mean", "std"] * normalizes]
  told = source.tell(config, asked) if asked else {}
  if missing := [name for name in wanted if name not in told]:
    raise ValueError(
      f"model.{missing[0]}=None must be stated: data.source="
      f"{config.data.source!r} does not tell it"
    )
  found = {name: told[name] for name in wanted}
  config = apply_overrides(config, "model", **found)
  if normalizes:
    mean = std = (0.5,) * config.model.channels  # pixels in [-1, 1]
    if "diffusion" not in config.sections:
      if "mean" in told:
        mean, std = told["mean"], told["std"]
      elif config.model.channels == 3:
        mean, std = _IMAGENET
    config = apply_overrides(config, "data", mean=mean, std=std)
  if getattr(config.data, "eval_resize", 0) is None:
    side = min(config.model.input_shape[:2])
    config = apply_overrides(config, "data", eval_resize=side)
  diffusion = config.sections.get("diffusion")
  if diffusion is not None and diffusion.latent_scale is None:
    scaling = LatentScaling()
    # Checkpoints are converted with configs of runs whose data are elsewhere.
    with contextlib.suppress(FileNotFoundError):
      scaling = source.tell(config, ["scaling"]).get("scaling", scaling)
    values = dataclasses.asdict(scaling).items()
    stated = {f"latent_{name}": value for name, value in values}
    config = apply_overrides(config, "diffusion", **stated)
  # Last: examples of latents are counted by opening them with their scale.
  return _counted(config).scheduled()


def _counted(config: Config) -> Config:
  """A run with the steps that its passes over the training examples take."""
  epochs, data = config.train.epochs, config.data
  if not epochs:
    return config
  opens = imported(get_source(data).source).open
  if config.model.READS_TEXT:
    key = data, config.model.vocab_size, "train"
    COUNTED[key] = opens(*key)
    examples = sum(map(len, COUNTED[key].values()))
  else:
    examples = len(opens(config, "train"))
  steps = max(math.ceil(epochs * examples / data.batch_size), 1)
  return apply_overrides(config, "train", steps=steps, epochs=0.0)


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
    if config.train.epochs:  # which missing data cannot count
      raise
  data = dataclasses.replace(config.data, source="fake", **_usual(config.data))
  found = resolve(dataclasses.replace(config, data=data))
  assumed, unset = (
    {name: getattr(filled, name) for name, x in vars(own).items() if x is None}
    for own, filled in ((config.model, found.model), (config.data, found.data))
  )
  data = dataclasses.replace(config.data, **unset)
  return dataclasses.replace(found, data=data), assumed


def _usual(data: Any) -> dict[str, Any]:
  """Defaults of the fields that its source reads, and random data do not."""
  others = SOURCES[data.reads].get("fake").options
  names = (name for name in get_source(data).options if name not in others)
  return {name: getattr(type(data), name) for name in names}


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
    return {**_usual(config.data), "source": "tokens", "path": path}
  kind = get_source(config.data)
  # Sources that do not decode image files read files of their own kind.
  is_own = not issubclass(imported(kind.source), EncodedSource)
  if "images" not in kind.holds or (is_own and kind.has_path):
    return {"path": path}
  from moh_jax.data.packed import source_at  # whose libraries take a while

  source = source_at(path)
  read = SOURCES["images"].get(source).options
  unread = {n: "" for n in ("class_list", "label_column") if n not in read}
  return {"source": source, "path": path, "val_share": 1.0, **unread}
