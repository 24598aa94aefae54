"""`python -m moh_jax encode-latents`."""

import argparse
import dataclasses
import os
import pathlib

from moh_jax.config.checks import DTYPES
from moh_jax.config.sections import BAD_IMAGES
from moh_jax.convert.vae import load_vae
from moh_jax.data.images.files import SPLITS, find_splits
from moh_jax.data.images.sources import check_class_names
from moh_jax.inference import latent_set
from moh_jax.inference.encode import encode_latents

_DEFAULTS = latent_set.EncodeOptions()


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  parser.add_argument(
    "--images",
    required=True,
    metavar="DIR",
    help="folder with a folder of images per class, or with train/ and val/ "
    "that have those; or what `pack-images` made of it",
  )
  parser.add_argument(
    "--vae", required=True, metavar="PATH", help="weights of the autoencoder"
  )
  parser.add_argument("--out", required=True, metavar="DIR")
  parser.add_argument(
    "--split",
    choices=SPLITS,
    help="encode this split alone; without train/ and val/, what the images "
    "are (default: train)",
  )
  for name, text in (
    ("image-size", "sides of the centre crop in pixels"),
    ("batch-size", "images encoded at a time, per process"),
    ("shard-size", "images per shard"),
  ):
    default = getattr(_DEFAULTS, name.replace("-", "_"))
    parser.add_argument(
      f"--{name}",
      type=int,
      default=default,
      metavar="N",
      help=f"{text} (default: {default})",
    )
  parser.add_argument(
    "--latent-scale",
    type=float,
    default=_DEFAULTS.latent_scale,
    metavar="S",
    help="factor that training will apply to the latents (default: that of "
    "Stable Diffusion's autoencoder)",
  )
  parser.add_argument(
    "--bad-images",
    choices=BAD_IMAGES,
    default=_DEFAULTS.bad_images,
    help="what an image does that cannot be read or is too small",
  )
  parser.add_argument(
    "--dtype", choices=DTYPES, default="float32", help="of the computation"
  )
  parser.add_argument(
    "--process",
    type=_part,
    default=(None, None),
    metavar="I/N",
    help="of N processes that write one set, this is number I, from 0; each "
    "takes every N-th shard",
  )


def run(args: argparse.Namespace) -> int:
  """Writes the latents; a second run continues the first."""
  names = [field.name for field in dataclasses.fields(latent_set.EncodeOptions)]
  given = {name: getattr(args, name) for name in names if hasattr(args, name)}
  options = latent_set.EncodeOptions(**given)
  folders = find_splits(args.images, args.split)
  config, params = load_vae(args.vae)
  config = dataclasses.replace(config, dtype=args.dtype)
  sources = {
    split: latent_set.open_images(folder, config.image_channels)
    for split, folder in folders.items()
  }
  first, *others = sources.values()
  for other in others:
    check_class_names(first.class_names, other.class_names, args.images)
  out = pathlib.Path(args.out)
  weights = latent_set.weights_sha256(config, params)
  writers = {  # all before the first image: here other settings are refused
    split: latent_set.open_latents(
      source,
      out / split,
      config,
      options,
      weights=weights,
      notes={"vae": args.vae, "encoded_from": os.fspath(folders[split])},
    )
    for split, source in sources.items()
  }
  index, count = args.process
  for split, source in sources.items():
    metadata = encode_latents(
      source,
      writers[split],
      config,
      params,
      options,
      process_index=index,
      process_count=count,
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
    text += f"; {metadata['skipped']:,} skipped, see {folder}/skipped.txt"
  print(text)


def _part(text: str) -> tuple[int, int]:
  """Parses "0/2"."""
  try:
    index, count = (int(number) for number in text.split("/"))
  except ValueError:
    index, count = 0, 0
  if not 0 <= index < count:
    raise argparse.ArgumentTypeError(
      f"{text!r} must be I/N with 0 <= I < N, for instance 0/2"
    )
  return index, count
