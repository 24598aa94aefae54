"""`python -m moh_jax sample`."""

import argparse
import hashlib
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from moh_jax.cli import common, distributed, fields
from moh_jax.cli import options as options_lib
from moh_jax.cli.arguments.images import OVERRIDES
from moh_jax.config import Config, SampleConfig
from moh_jax.convert import HOW_TO_GET_VAE
from moh_jax.convert.vae import Autoencoder, load_autoencoder
from moh_jax.data.decode import read_image
from moh_jax.data.image_folders import find_images
from moh_jax.data.transforms import center_crop
from moh_jax.inference import sample
from moh_jax.inference.restore import fingerprint
from moh_jax.models.vae import weights_sha256
from moh_jax.runtime import sharding
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.files import check_writable


def run(args: argparse.Namespace) -> int:
  """Samples images and writes them."""
  out = _target(args.out)
  is_first = distributed.join(args)
  files = find_images(args.start)
  metadata = _check_before_restoring(args, len(files))
  mesh = sharding.make_mesh(args.mesh)
  with sharding.use_mesh(mesh):
    vae = decode = None
    if args.vae:
      vae = load_autoencoder(
        args.vae, metadata.config, mesh, encoder=metadata.encoder_sha256
      )
      decode = vae.decoder(args.vae_tile)
    start = _read_start(files, metadata.config, vae)
    given = fields.given_fields(args, SampleConfig, *OVERRIDES)
    restored = common.restore(args, mesh=mesh, sample=given)
    config = restored.config
    sampler = sample.Sampler(
      restored,
      labels=args.labels,
      seed=args.seed,
      mesh=mesh,
      decode=decode,
      start=_as_input(start, vae) if files else None,
      strength=args.strength,
    )
    num = args.num or max(len(sampler.labels), len(files))
    size = min(args.batch_size, num)
    if out.suffix == ".png":
      images = sample.sample_images(sampler, num, size, progress=True)
      images = images.repeat(args.zoom, axis=1).repeat(args.zoom, axis=2)
      if is_first:
        sample.write_grid(out, images, args.columns or min(num, 10))
    else:
      model = fingerprint(config.model, restored.params, mesh)
      settings = _settings(args, config, start) | {
        "checkpoint": model,
        "step": restored.step,
        "vae": vae and weights_sha256(vae.config, vae.params),
      }
      sample.sample_files(
        sampler, num, out, batch_size=size, settings=settings, progress=True
      )
  if is_first:
    print(f"{num} images written to {out}")
  return 0


def _target(path: str) -> pathlib.Path:
  """The file or folder to write; checks that it can be written."""
  out = pathlib.Path(path)
  if out.suffix and not out.is_dir():
    return options_lib.out_file(path, ".png", ".npz")
  check_writable(path, "--out")
  return out


def _read_start(
  files: list[str], config: Config, vae: Autoencoder | None
) -> list[np.ndarray]:
  """Pixels [X, Y, channels] uint8 to begin from, cropped to the model's size.

  Args:
    files: of the images.
    config: of the model.
    vae: autoencoder of a model of latents, else None.
  """
  size, channels = config.model.input_size, config.model.channels
  if vae:
    size = tuple(side * vae.config.downscale for side in size)
    channels = vae.config.image_channels
  return [center_crop(read_image(file, channels), size) for file in files]


def _as_input(images: list[np.ndarray], vae: Autoencoder | None) -> np.ndarray:
  """Pixels uint8 as the model's input [n, x, y, channels] float32."""
  rows = (image[None].astype(np.float32) / 127.5 - 1 for image in images)
  if vae:
    rows = map(vae.encoder(), rows)
  return np.concatenate([np.asarray(row) for row in rows])


def _check_before_restoring(args: argparse.Namespace, starts: int) -> Metadata:
  """Refuses what the checkpoint's config alone shows to be wrong.

  Args:
    args: of the command.
    starts: images to begin from.

  Returns:
    What the checkpoint says of itself.
  """
  metadata, _ = common.read_metadata(args, "sample")
  args.labels = _labels(args.labels, metadata.class_names)
  sample.check_request(metadata.config, args.labels, args.seed)
  if starts and not 0 < args.strength < 1:
    raise ValueError(
      f"--strength {args.strength} must be above 0 and below 1 with --start"
    )
  if not starts and args.strength != 1:
    raise ValueError(f"--strength {args.strength} needs --start")
  labels = len(args.labels) or metadata.config.model.num_classes
  num = args.num or max(labels, starts)
  sample.check_size(metadata.config, num, pathlib.Path(args.out))
  if metadata.config.diffusion.space == "latent" and not args.vae:
    raise ValueError(f"--vae is missing: {HOW_TO_GET_VAE}")
  return metadata


def _labels(text: str, class_names: Sequence[str]) -> tuple[int | None, ...]:
  """Labels of "3,none,cat", where names of classes may have commas too.

  Raises:
    ValueError: a name is none of the model's.
  """
  named = {_split(name): label for label, name in enumerate(class_names)}
  named["none",] = None
  longest = max(map(len, named))
  labels, parts = [], _split(text) if text else ()
  while parts:
    sizes = range(min(longest, len(parts)), 0, -1)
    size = next((n for n in sizes if parts[:n] in named), 1)
    name, parts = parts[:size], parts[size:]
    if size == 1 and re.fullmatch("-?[0-9]{1,18}", name[0]):
      labels.append(int(name[0]))
    elif name in named:
      labels.append(named[name])
    else:
      known = ", ".join(class_names[:10]) + ", ..." * (len(class_names) > 10)
      raise ValueError(
        f"--labels: {name[0]!r} must be a number, none, or one of the model's "
        f"{len(class_names)} class names ({known})"
      )
  return tuple(labels)


def _split(text: str) -> tuple[str, ...]:
  return tuple(part.strip() for part in text.split(","))


def _settings(
  args: argparse.Namespace, config: Config, start: list[np.ndarray]
) -> dict:
  """What the images depend on, beside the networks.

  Args:
    args: of the command.
    config: of the model.
    start: the pixels to begin from.
  """
  begin = {}
  # Only with --start: files of versions without it are continued too.
  if start:
    sha256 = hashlib.sha256(b"".join(pixels.tobytes() for pixels in start))
    begin["start"] = f"{len(start)} images, sha256 {sha256.hexdigest()[:16]}"
    begin["strength"] = args.strength
  return {
    **begin,
    "ema": not args.no_ema,
    "seed": args.seed,
    "labels": args.labels,
    "vae_tile": args.vae_tile,
    **{name: getattr(config.sample, name) for name in OVERRIDES},
    "top_k": args.top_k,
    "gate_form": args.gate_form,
    "dtype": config.model.dtype,
  }
