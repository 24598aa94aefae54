"""`python -m moh_jax encode-latents`."""

import argparse
import dataclasses
import pathlib

from moh_jax.cli import fields
from moh_jax.config.dit import EncodeOptions
from moh_jax.convert.vae import load_vae
from moh_jax.data.image_shards import open_splits
from moh_jax.inference import encode


def run(args: argparse.Namespace) -> int:
  """Writes the latents; a second run continues the first."""
  options = EncodeOptions(**fields.given_fields(args, EncodeOptions))
  config, params = load_vae(args.vae)
  config = dataclasses.replace(config, dtype=args.dtype)
  sources = open_splits(
    args.data,
    args.split,
    config.image_channels,
    label_column=args.label_column,
    val_share=args.val_share,
  )
  out = pathlib.Path(args.out)
  writers = {  # all before the first image: here other settings are refused
    split: encode.open_latents(
      source,
      out / split,
      config,
      options,
      params=params,
      notes={"vae": args.vae, "encoded_from": args.data},
    )
    for split, source in sources.items()
  }
  for split, source in sources.items():
    metadata = encode.encode_latents(
      source,
      writers[split],
      config,
      params,
      options,
      process=args.process,
    )
    if metadata is None:
      print(f"{out / split}: this process is done, others are not yet")
    else:
      _report(metadata, out / split)
  return 0


def _report(metadata: dict, folder: pathlib.Path):
  shape = " x ".join(str(side) for side in metadata["latent_shape"])
  text = f"{folder}: {metadata['examples']:,} images as latents of {shape}"
  if metadata["skipped"]:
    text += f"; {metadata['skipped']:,} skipped, see {folder}/skipped"
  print(text)
