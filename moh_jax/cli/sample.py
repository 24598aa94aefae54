"""`python -m moh_jax sample`."""

import argparse
import pathlib

import numpy as np

from moh_jax.cli import common, distributed, fields
from moh_jax.cli.arguments.images import OVERRIDES
from moh_jax.config import Config, SampleConfig
from moh_jax.convert.decoder import load_decoder
from moh_jax.convert.downloads import HOW_TO_GET_VAE
from moh_jax.files import check_writable, replacing
from moh_jax.inference import sample, sample_files
from moh_jax.models.generation import image_grid
from moh_jax.runtime import sharding


def run(args: argparse.Namespace) -> int:
  """Samples images and writes them."""
  out = _target(args.out)
  is_first = distributed.join(args)
  encoder = _check_before_restoring(args)
  mesh = sharding.make_mesh(args.mesh)
  with sharding.use_mesh(mesh):
    given = fields.given_fields(args, SampleConfig, *OVERRIDES)
    restored = common.restore(args, mesh=mesh, sample=given)
    config = restored.config
    decode = None
    if args.vae:
      decode = load_decoder(
        args.vae, config, mesh, tile=args.vae_tile, encoder=encoder
      )
    sampler = sample.Sampler(
      restored, labels=args.labels, seed=args.seed, mesh=mesh, decode=decode
    )
    num = args.num or len(sampler.labels)
    size = min(args.batch_size, num)
    if out.suffix == ".png":
      images = sample.sample_images(sampler, num, size, progress=True)
      images = images.repeat(args.zoom, axis=1).repeat(args.zoom, axis=2)
      if is_first:
        _write_grid(out, images, args.columns or min(num, 10))
    else:
      write = (
        sample_files.sample_npz
        if out.suffix == ".npz"
        else sample_files.sample_folder
      )
      settings = _settings(args, config, restored.step)
      write(
        sampler, num, out, batch_size=size, settings=settings, progress=True
      )
  if is_first:
    print(f"{num} images written to {out}")
  return 0


def _target(path: str) -> pathlib.Path:
  """The file or folder to write; checks that it can be written."""
  out = pathlib.Path(path)
  if out.suffix and not out.is_dir():
    return common.out_file(path, ".png", ".npz")
  check_writable(path, "--out")
  return out


def _write_grid(out: pathlib.Path, images: np.ndarray, columns: int) -> None:
  with replacing(out) as fresh:
    sample_files.write_png(fresh, image_grid(images, columns))


def _check_before_restoring(args: argparse.Namespace) -> str:
  """Refuses what the checkpoint's config alone shows to be wrong.

  Returns:
    Hash of the encoder of the latents of the training, "" if unknown.
  """
  metadata, _ = common.read_metadata(args, "sample")
  sample.check_request(metadata.config, args.labels, args.seed)
  num = args.num or len(args.labels) or metadata.config.model.num_classes
  sample_files.check_room(metadata.config, num, pathlib.Path(args.out))
  if metadata.config.diffusion.space == "latent" and not args.vae:
    raise ValueError(f"--vae is missing: {HOW_TO_GET_VAE}")
  return metadata.encoder_sha256


def _settings(args: argparse.Namespace, config: Config, step: int) -> dict:
  """What the images depend on."""
  return {
    "checkpoint": str(pathlib.Path(args.checkpoint).absolute()),
    "step": step,
    "ema": not args.no_ema,
    "seed": args.seed,
    "labels": args.labels,
    "vae": args.vae,
    "vae_tile": args.vae_tile,
    **{name: getattr(config.sample, name) for name in OVERRIDES},
    "top_k": args.top_k,
    "gate_form": args.gate_form,
    "dtype": config.model.dtype,
  }
