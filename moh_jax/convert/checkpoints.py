"""Whole checkpoints: public to ours (`convert`) and back (`export`)."""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from moh_jax.config import Config, DataConfig, DiffusionConfig, SampleConfig
from moh_jax.convert import dit, rules, vit
from moh_jax.convert.tensor_files import read_tensors, write_safetensors
from moh_jax.inference.restore import restore
from moh_jax.models.build import make_model
from moh_jax.models.registry import MODELS, get_model
from moh_jax.training import checkpoint
from moh_jax.training.state import abstract_params, unbox

FORMATS = ("moh-vit", "transnext", "moh-dit", "dit")
_RULES = {"vit": vit.model_rules, "dit": dit.model_rules}
# Released classifiers: ImageNet, centre crop of a 256-pixel resize.
_IMAGENET = DataConfig(
  source="image_folder",
  path="data/imagenet",
  eval_resize=256,
  augment="crop_flip",
)
# Released diffusion models: latents of ImageNet.
_LATENTS = DataConfig(source="latents", path="data/imagenet_latents")


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
    image_size: input size of a classifier, instead of the model's; that of a
      diffusion model is in its checkpoint.

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
    config = _released_run(get_model(name), tensors)
  else:
    name = "custom"
  if image_size:
    config = _resized(config, image_size)
  table = model_rules(config.model)
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
  table = model_rules(restored.config.model)
  tensors = rules.dump_params(table, jax.device_get(restored.params))
  write_safetensors(out, tensors, {"step": str(restored.step)})
  return _count(restored.params)


def _find_model(kind: str, tensors: dict[str, np.ndarray], source: str) -> str:
  """The released model whose tensor shapes are exactly these."""
  found = {name: tuple(array.shape) for name, array in tensors.items()}
  names = [name for name in MODELS if name.startswith(kind)]
  for name in names:
    config = _released_run(MODELS[name], tensors)
    table = model_rules(config.model)
    expected = jax.eval_shape(
      functools.partial(rules.dump_params, table), _abstract(config)
    )
    if found == {n: leaf.shape for n, leaf in expected.items()}:
      return name
  raise ValueError(
    f"{source}: its {len(found)} tensors have the shapes of none of {names}; "
    "name the model (--model) to list what differs, or give its --config"
  )


def model_rules(model: Any) -> list[rules.Rule]:
  """The conversion table of a model section."""
  return _RULES[model.family](model)


def _released_run(model: Any, tensors: dict[str, np.ndarray]) -> Config:
  """The run that a released model stands for."""
  if model.family == "vit":
    return Config(model=model, data=_IMAGENET)
  tokens = tensors["pos_embed"].shape[1] if "pos_embed" in tensors else 0
  side = math.isqrt(tokens) * model.patch_size
  if side and math.isqrt(tokens) ** 2 == tokens:  # 256 or 512 pixels, or other
    model = dataclasses.replace(model, input_size=(side, side))
  return Config(
    model=model,
    data=_LATENTS,
    diffusion=DiffusionConfig(),
    sample=SampleConfig(),
  )


def _abstract(config: Config) -> Any:
  model, inputs = make_model(config)
  return unbox(abstract_params(model, inputs))


def _resized(config: Config, size: int) -> Config:
  model = config.model
  if model.family != "vit":
    raise ValueError(
      f"--image-size {size}: only classifiers change their size; model.family="
      f"{model.family!r} has that of its position table"
    )
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
