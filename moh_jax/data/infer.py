"""What a config leaves unset (None) and its data or its length tell."""

import contextlib
import dataclasses
import os
import pathlib
from typing import Any

from moh_jax.config import Config, imported
from moh_jax.config.dit import LatentScaling
from moh_jax.config.registry import SOURCES, SPLITS, get_source
from moh_jax.data.sources import is_latent
from moh_jax.runtime.steps import workdir

# Mean and standard deviation of ImageNet's pixels in [0, 1].
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Fields of the section `model` that data tell.
_FIELDS = ("channels", "num_classes", "image_size", "vocab_size")


def resolve(config: Config) -> Config:
  """Fills in what a config leaves unset; what it states stays.

  `data.tokenizer_path` is the folder of `train.init_from`, `optim.warmup_steps`
  follows from the number of steps, `model.channels`, `model.num_classes` and
  `model.image_size` from the images or latents, `data.mean`, `data.std` and
  `data.eval_resize` from both, `diffusion.latent_scale` from the latents,
  `model.vocab_size` from the text's tokenizer. Data are looked at only for
  values that are unset.

  Raises:
    FileNotFoundError: data that tell an unset value are missing.
    ValueError: they are damaged, or do not fit what the config states.
  """
  if "tokenizer_path" in get_source(config.data).options:
    path, start = config.data.tokenizer_path, config.train.init_from
    if start and not path:
      path = os.fspath(workdir(start))
    data = dataclasses.replace(config.data, tokenizer_path=path)
    config = dataclasses.replace(config, data=data)
  warmup = config.optim.warmup(config.train.steps)
  optim = dataclasses.replace(config.optim, warmup_steps=warmup)
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
  model, data = dataclasses.replace(config.model, **found), config.data
  if normalizes:
    mean = std = (0.5,) * model.channels  # pixels in [-1, 1]
    if "diffusion" not in config.sections:
      if "mean" in told:
        mean, std = told["mean"], told["std"]
      elif model.channels == 3:
        mean, std = _IMAGENET
    data = dataclasses.replace(data, mean=mean, std=std)
  if getattr(data, "eval_resize", 0) is None:
    data = dataclasses.replace(data, eval_resize=min(model.input_shape[:2]))
  resolved = dataclasses.replace(config, model=model, data=data, optim=optim)
  diffusion = config.sections.get("diffusion")
  if diffusion is None or diffusion.latent_scale is not None:
    return resolved
  scaling = LatentScaling()
  # Checkpoints are converted with configs of runs whose data are elsewhere.
  with contextlib.suppress(FileNotFoundError):
    scaling = source.tell(config, ["scaling"]).get("scaling", scaling)
  values = dataclasses.asdict(scaling)
  stated = {f"latent_{name}": value for name, value in values.items()}
  diffusion = dataclasses.replace(diffusion, **stated)
  sections = {**config.sections, "diffusion": diffusion}
  return dataclasses.replace(resolved, sections=sections)


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
    data = dataclasses.replace(
      config.data, source="fake", **_usual(config.data)
    )
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


def _usual(data: Any) -> dict[str, Any]:
  """Defaults of the fields that its source reads, and random data do not."""
  fields = {f.name: f.default for f in dataclasses.fields(data)}
  lacking = {*get_source(data).options} - {
    *SOURCES[data.reads].get("fake").options
  }
  return {name: fields[name] for name in lacking}


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
  is_own = kind.has_path and "decode" not in kind.options
  if "images" not in kind.holds or is_own:
    return {"path": path}
  # Their libraries take a while.
  from moh_jax.data.image_tables import is_tables
  from moh_jax.data.shards import METADATA

  if any((pathlib.Path(path) / n / METADATA).is_file() for n in SPLITS):
    of_tables = {"label_column": "", "class_list": ""}
    return {"source": "array_record", "path": path, **of_tables}
  all_of_it = {"path": path, "val_share": 1.0}
  if is_tables(path):
    return {"source": "parquet", **all_of_it}
  return {"source": "image_folder", "label_column": "", **all_of_it}
