"""`python -m moh_jax show-latents`."""

import argparse
import dataclasses

import numpy as np

from moh_jax.cli import common
from moh_jax.config import (
  Config,
  DataConfig,
  DiffusionConfig,
  DiTConfig,
  MeshConfig,
)
from moh_jax.convert.vae import load_autoencoder
from moh_jax.data.latents import LatentSource
from moh_jax.inference.sample import write_grid
from moh_jax.models.generation import to_pixels
from moh_jax.runtime import sharding

_BATCH = 64  # latents that are decoded at a time


def run(args: argparse.Namespace) -> int:
  """Writes a grid of decoded latents and prints their labels row by row."""
  out = common.out_file(args.out, ".png")
  source = LatentSource(args.data, args.split)
  if not len(source):
    raise ValueError(f"{args.data}/{args.split} holds no latents")
  mesh = sharding.make_mesh(MeshConfig())
  encoder = source.encoder_sha256
  config = _config_of_run(args.data, source)
  decode = load_autoencoder(args.vae, config, mesh, encoder=encoder).decoder()
  num = min(args.num, len(source))
  examples = [source[i * len(source) // num] for i in range(num)]
  means = np.stack([x["image"][0, 0] for x in examples]).astype(np.float32)
  images = np.concatenate(
    [
      np.asarray(to_pixels(decode(means[i : i + _BATCH])))
      for i in range(0, num, _BATCH)
    ]
  )
  columns = max(1, round(num**0.5))
  write_grid(out, images, columns)
  names = [source.class_names[int(x["label"])] for x in examples]
  for row, start in enumerate(range(0, num, columns), 1):
    print(f"row {row}: {', '.join(names[start : start + columns])}")
  return 0


def _config_of_run(path: str, source: LatentSource) -> Config:
  """The config of a run on these latents, which a decoder must fit."""
  model = DiTConfig(
    input_size=source.latent_shape[:2],
    patch_size=1,
    channels=source.channels,
    num_classes=len(source.class_names),
  )
  scaling = dataclasses.asdict(source.scaling)
  diffusion = {f"latent_{name}": value for name, value in scaling.items()}
  return Config(
    model=model,
    data=DataConfig(source="latents", path=path),
    diffusion=DiffusionConfig(**diffusion),
  )
