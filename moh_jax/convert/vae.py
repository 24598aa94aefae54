"""Converts the Stable Diffusion autoencoder, diffusers' AutoencoderKL.

It reads stabilityai/sd-vae-ft-mse, sd-vae-ft-ema and other files of the same
layout, with the tensor names of old or current versions of diffusers.
"""

import dataclasses
import functools
import logging
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from moh_jax.config import Config, differing_fields
from moh_jax.config.dit import LatentScaling, VAEConfig
from moh_jax.convert import rules
from moh_jax.convert.rules import CONFIG_FILE, Rule
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.models.vae import VAE, encoder_sha256
from moh_jax.runtime.files import check_json, read_json
from moh_jax.runtime.mesh import replicated

VAE_FILES = (
  "diffusion_pytorch_model.safetensors",
  "diffusion_pytorch_model.bin",
  "diffusion_pytorch_model.fp16.safetensors",
  "diffusion_pytorch_model.fp16.bin",
)
HOW_TO_GET_VAE = (
  f"latents need the Stable Diffusion autoencoder: put {VAE_FILES[0]} (or "
  f"{VAE_FILES[1]}) and config.json of stabilityai/sd-vae-ft-ema or "
  "stabilityai/sd-vae-ft-mse (https://huggingface.co/stabilityai/"
  "sd-vae-ft-ema) into one folder and pass --vae PATH, the folder or the file"
)
_Size = Annotated[int, msgspec.Meta(ge=1)]
_LOG = logging.getLogger(__name__)


class _Public(msgspec.Struct):
  """What is read of diffusers' config.json, by the names of `VAEConfig`."""

  block_out_channels: list[_Size]
  layers_per_block: _Size = 1
  image_channels: _Size = msgspec.field(name="in_channels", default=3)
  latent_channels: _Size = 4
  norm_groups: _Size = msgspec.field(name="norm_num_groups", default=32)
  norm_eps: float = 1e-6
  use_quant_conv: bool = True
  use_post_quant_conv: bool = True
  mid_attention: bool = msgspec.field(
    name="mid_block_add_attention", default=True
  )
  scaling_factor: float = LatentScaling.scale
  shift_factor: float | None = None
  latents_mean: list[float] | None = None
  latents_std: list[float] | None = None


_ATTENTION = ".mid_block.attentions.0."
# Our names of modules, as regular expressions, and the public ones.
_MODULES = (
  (r"(down|up)(\d+)_resnet(\d+)", r"\1_blocks.\2.resnets.\3"),
  (r"(down|up)(\d+)_conv", r"\1_blocks.\2.\1samplers.0.conv"),
  (r"\.mid\.resnet(\d)", r".mid_block.resnets.\1"),
  (r"\.mid\.attn\.", _ATTENTION),
  *((r"0\.norm$", "0.group_norm"), (r"0\.query$", "0.to_q")),
  *((r"0\.key$", "0.to_k"), (r"0\.value$", "0.to_v")),
  (r"0\.out$", "0.to_out.0"),
  *(("shortcut", "conv_shortcut"), ("norm_out", "conv_norm_out")),
)
# Names of the attention's layers in old files, and today.
_RENAMED = {
  "query": "to_q",
  "key": "to_k",
  "value": "to_v",
  "proj_attn": "to_out.0",
}


def load_vae(path: str | os.PathLike) -> tuple[VAEConfig, Any]:
  """Reads a public autoencoder.

  Args:
    path: file of weights (safetensors or `torch.save`), folder as diffusers
      writes it, or folder of a pipeline with the subfolder `vae`. A config.json
      beside the weights says the sizes.

  Returns:
    The config, and the parameter tree of NumPy float32 arrays.

  Raises:
    FileNotFoundError: there are no weights, or no config.json; the message says
      how to get them.
    NotImplementedError: the autoencoder has another architecture.
    ValueError: a file is damaged, or its tensors do not fit.
  """
  file = _find_weights(pathlib.Path(path))
  beside = file.with_name(CONFIG_FILE)
  if not beside.is_file():
    raise FileNotFoundError(f"{beside}: no such file; {HOW_TO_GET_VAE}")
  entries = read_json(beside)
  try:
    config = public_config(entries)
  except (NotImplementedError, ValueError) as error:
    raise type(error)(f"{beside}: {error}") from error
  return config, convert_vae(read_tensors(file), config, source=str(file))


def convert_vae(
  tensors: Mapping[str, np.ndarray], config: VAEConfig, *, source: str
) -> Any:
  """Converts public tensors to the parameters of `VAE(config)`.

  Args:
    tensors: tensors by old or current public name.
    config: config of the autoencoder.
    source: where the tensors come from, for messages.

  Returns:
    The parameter tree of NumPy float32 arrays.

  Raises:
    ValueError: tensors are missing, unexpected or of a wrong shape.
  """
  return rules.load_params(
    vae_rules(config),
    current_names(tensors),
    abstract_vae(config),
    source=source,
  )


def abstract_vae(config: VAEConfig) -> Any:
  """Parameter tree of the autoencoder as ShapeDtypeStructs."""
  side = config.downscale
  images = jax.ShapeDtypeStruct(
    (1, side, side, config.image_channels), jnp.float32
  )
  return jax.eval_shape(VAE(config).init, jax.random.key(0), images)["params"]


def vae_rules(config: VAEConfig) -> list[Rule]:
  """Conversion rules of the whole autoencoder, with current public names."""
  table = []
  for path, leaf in traverse_util.flatten_dict(abstract_vae(config)).items():
    *modules, name = path
    theirs = ".".join(modules)
    for ours, public in _MODULES:
      theirs = re.sub(ours, public, theirs)
    theirs += ".bias" if name == "bias" else ".weight"
    maps = {4: rules.CONV_MAPS, 2: rules.TRANSPOSED}.get(leaf.ndim, rules.SAME)
    table.append(rules.one(theirs, "/".join(path), maps))
  return table


def current_names(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Renames old public tensors to current names and shapes.

  The attention's layers were once called query, key, value and proj_attn, and
  are 1x1 convolutions in files that were converted from the original release.
  """
  out = {}
  for name, tensor in tensors.items():
    module, found, rest = name.partition(_ATTENTION)
    if found:
      if tensor.ndim == 4:
        tensor = tensor.squeeze((2, 3))
      layer, _, leaf = rest.rpartition(".")
      name = f"{module}{found}{_RENAMED.get(layer, layer)}.{leaf}"
    out[name] = tensor
  return out


def public_config(entries: Mapping[str, Any]) -> VAEConfig:
  """Makes a config from diffusers' config.json, with diffusers' defaults.

  Args:
    entries: the parsed file.

  Raises:
    NotImplementedError: `VAE` does not compute this architecture.
    ValueError: a value is out of range.
  """
  public = msgspec.convert(check_json(entries, _Public), _Public)
  for key, allowed in (
    ("_class_name", {"AutoencoderKL"}),
    ("act_fn", {"silu", "swish"}),
    ("down_block_types", {"DownEncoderBlock2D"}),
    ("up_block_types", {"UpDecoderBlock2D"}),
  ):
    found = entries.get(key, ())
    if not {*([found] if isinstance(found, str) else found)} <= allowed:
      raise NotImplementedError(f"{key}={found!r} must be {min(allowed)!r}")
  fields = msgspec.structs.asdict(public)
  scaling = LatentScaling(
    fields.pop("scaling_factor"),
    fields.pop("shift_factor") or 0.0,
    tuple(fields.pop("latents_mean") or ()),
    tuple(fields.pop("latents_std") or ()),
  )
  return VAEConfig(**fields, scaling=scaling)


def _find_weights(path: pathlib.Path) -> pathlib.Path:
  if path.is_file():
    return path
  for folder in (path, path / "vae"):
    for name in VAE_FILES:
      if (folder / name).is_file():
        return folder / name
  raise FileNotFoundError(
    f"{path}: no such file, and no folder with {' or '.join(VAE_FILES)}, here "
    f"or in its subfolder vae; {HOW_TO_GET_VAE}"
  )


@dataclasses.dataclass(frozen=True)
class Autoencoder:
  """A public autoencoder that fits a diffusion model, its weights on the mesh.

  Attributes:
    config: its sizes.
    params: its weights; each device of the mesh holds all of them.
  """

  config: VAEConfig
  params: Any

  def decode(self, latents: jax.Array) -> jax.Array:
    """Maps latents [B, x, y, channels] to images [B, X, Y, 3] in [-1, 1]."""
    return _decode(self.config, self.params, latents)


@functools.partial(jax.jit, static_argnums=0)
def _decode(config: VAEConfig, params: Any, latents: jax.Array) -> jax.Array:
  return VAE(config).apply({"params": params}, latents, method="decode")


def load_autoencoder(
  path: str, config: Config, mesh: Mesh, *, encoder: str = ""
) -> Autoencoder:
  """Reads an autoencoder and checks that it fits a diffusion model.

  Args:
    path: weights, see `convert.vae.load_vae`.
    config: config of the diffusion model.
    mesh: the devices.
    encoder: hash of the encoder that made the latents of the training. Where
      the autoencoder has another one, or scales latents otherwise, a warning
      says so.

  Raises:
    FileNotFoundError: there are no such weights.
    ValueError: the model has no latents or another number of channels.
  """
  diffusion = config.sections.get("diffusion")
  if diffusion is None or diffusion.space != "latent":
    raise ValueError(f"--vae {path!r}: the model does not work on latents")
  vae_config, params = load_vae(path)
  if vae_config.latent_channels != config.model.channels:
    raise ValueError(
      f"--vae {path!r}: its {vae_config.latent_channels} latent channels must "
      f"be model.channels={config.model.channels}"
    )
  others = differing_fields(diffusion.scaling, vae_config.scaling, "latent")
  if encoder and encoder_sha256(vae_config, params) != encoder:
    others.append("its encoder is another one")
  if others:
    _LOG.warning(
      "--vae %s: it is not the autoencoder of the latents that the model was "
      "trained on, images may come out wrong (%s)",
      path,
      "; ".join(others),
    )
  params = jax.device_put(params, replicated(mesh))
  return Autoencoder(vae_config, params)
