"""Whole checkpoints: public to ours (`convert`) and back (`export`)."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from moh_jax.config import Config, DataConfig
from moh_jax.convert import rules, vit
from moh_jax.convert.tensor_files import read_tensors, write_safetensors
from moh_jax.inference.restore import restore
from moh_jax.models.registry import MODELS, get_model
from moh_jax.training import checkpoint
from moh_jax.training.state import abstract_params, unbox
from moh_jax.training.tasks import make_model

FORMATS = ("moh-vit", "transnext")
# Released classifiers: ImageNet, centre crop of a 256-pixel resize.
_IMAGENET = DataConfig(
  source="image_folder",
  path="data/imagenet",
  eval_resize=256,
  augment="crop_flip",
)


def convert(
  kind: str,
  source: str,
  out: str,
  *,
  key: str | None = None,
  model: str | None = None,
  config: Config | None = None,
  image_size: int | None = None,
) -> tuple[str, int]:
  """Turns a public checkpoint into one that inference restores.

  Args:
    kind: one of `FORMATS`.
    source: safetensors file or folder, or a torch zip checkpoint.
    out: directory to write to; must hold no checkpoint yet.
    key: entry of a torch checkpoint that holds the weights.
    model: released name; None finds the one of `kind` whose shapes fit.
    config: run of a model that is not a released one.
    image_size: input size, instead of the model's.

  Returns:
    The model's name and its number of parameters.

  Raises:
    FileNotFoundError: there is no such source.
    ValueError: the tensors fit no (or not the named) model; they are listed.
  """
  if kind not in FORMATS:
    raise ValueError(f"--from {kind!r} must be one of {FORMATS}")
  tensors = read_tensors(source, key)
  if config is None:
    name = model or _find_model(kind, tensors, source)
    config = Config(model=get_model(name), data=_IMAGENET)
  else:
    name = "custom"
  if image_size:
    config = _resized(config, image_size)
  table = vit.model_rules(config.model)
  params = rules.load_params(table, tensors, _abstract(config), source=source)
  checkpoint.save_params(
    out, jax.tree.map(jax.numpy.asarray, params), checkpoint.Metadata(config)
  )
  return name, _count(params)


def export(
  directory: str, out: str, *, step: int | None = None, use_ema: bool = True
) -> int:
  """Writes a checkpoint's weights under their public names.

  Args:
    directory: a working directory or an output of `convert`.
    out: safetensors file to write.
    step: which checkpoint; None is the newest.
    use_ema: prefer averaged parameters.

  Returns:
    The number of parameters.
  """
  restored = restore(directory, step=step, use_ema=use_ema)
  table = vit.model_rules(restored.config.model)
  tensors = rules.dump_params(table, jax.device_get(restored.params))
  write_safetensors(out, tensors, {"step": str(restored.step)})
  return _count(tensors)


def _find_model(kind: str, tensors: dict[str, np.ndarray], source: str) -> str:
  """The released model whose tensor shapes are exactly these."""
  found = {name: tuple(array.shape) for name, array in tensors.items()}
  names = [name for name in MODELS if name.startswith(kind)]
  for name in names:
    config = Config(model=MODELS[name])
    table = vit.model_rules(config.model)
    expected = jax.eval_shape(
      functools.partial(rules.dump_params, table), _abstract(config)
    )
    if found == {n: leaf.shape for n, leaf in expected.items()}:
      return name
  raise ValueError(
    f"{source}: its {len(found)} tensors have the shapes of none of {names}; "
    "name the model (--model) to list what differs, or give its --config"
  )


def _abstract(config: Config) -> Any:
  model, inputs = make_model(config)
  return unbox(abstract_params(model, inputs))


def _resized(config: Config, size: int) -> Config:
  model = config.model
  pretrain = model.pretrain_image_size or model.image_size[0]
  model = dataclasses.replace(
    model, image_size=(size, size), pretrain_image_size=pretrain
  )
  # Keep the ratio of crop to resize that the model was evaluated with.
  resize = config.data.eval_resize * size // config.model.image_size[0]
  data = dataclasses.replace(config.data, eval_resize=resize)
  return dataclasses.replace(config, model=model, data=data)


def _count(tree: Any) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(tree))
