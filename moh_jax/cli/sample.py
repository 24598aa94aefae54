"""`python -m moh_jax sample`."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moh_jax.cli import command
from moh_jax.config import Config
from moh_jax.config.base import Count, Natural, Share
from moh_jax.runtime.alive import alive

if TYPE_CHECKING:
  import numpy as np

  from moh_jax.convert.vae import Autoencoder
  from moh_jax.runtime.checkpoint import Metadata

# Keys of the section `sample` that images depend on.
_KEYS = (*("method", "steps", "eta", "cfg_scale", "cfg_channels"),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.Checkpoint, command.Distributed, command.Output):
  """Sample images from a diffusion checkpoint.

  Sampler, steps and guidance are those of the run's config, or of changes such
  as --config.sample.steps=50 and --config.sample.cfg_scale=4.

  Attributes:
    out: .png: one grid of all images with their classes; .npz: arr_0 uint8 [N,
      X, Y, channels] and labels arr_1, in parts that survive a kill; no suffix:
      a folder of files CLASS/NUMBER.png.
    labels: classes of the images in turn, as "L,L,...": names, numbers (from 0,
      in alphabetical order of the folders) or none (default: every class).
    num: images (default: one for each of the labels).
    seed: of all noise.
    vae: weights of the autoencoder of latents.
    vae_tile: decode in overlapping squares of so many latent pixels, to bound
      memory; 0 decodes whole images.
    start: begin from these images in turn in place of noise: files, or folders
      with all below; they are cropped to the model's size.
    strength: part of the steps that is taken from --start on, which needs one
      above 0 and below 1: the more, the less is left of the image.
    batch_size: images at a time.
    columns: of the grid.
  """

  out: command.OutPath
  labels: str = ""
  num: Count | None = None
  seed: int = 0
  vae: command.Place | None = None
  vae_tile: Natural = 0
  start: tuple[command.InPath, ...] = command.option("listed", default=())
  strength: Share = 1.0
  batch_size: Count = 64
  columns: Count | None = None

  def check(self) -> None:
    """The output is of a known form; a strength is that of start images."""
    super().check()
    out = pathlib.Path(self.out)
    if out.is_file() or (out.suffix and not out.is_dir()):
      command.out_file(self.out, ".png", ".npz")
    self.need("vae_tile", self.vae, "needs --vae")
    self.need("columns", out.suffix == ".png", "needs --out FILE.png")
    self.need("strength", self.start, "needs --start")
    if self.start and not 0 < self.strength < 1:
      self.fail("strength", "must be above 0 and below 1 with --start")


@alive("sampling")
def run(options: Options) -> int:
  """Samples images and writes them."""
  import numpy as np

  from moh_jax.convert import HOW_TO_GET_VAE
  from moh_jax.convert.vae import load_autoencoder
  from moh_jax.data.folders import find_images
  from moh_jax.evaluation.pictures import tiles
  from moh_jax.inference import sample
  from moh_jax.inference.restore import fingerprint
  from moh_jax.models.vae import weights_sha256
  from moh_jax.runtime import sharding
  from moh_jax.runtime.devices import random_settings

  options.join()
  files, out = find_images(options.start), pathlib.Path(options.out)
  metadata, _ = options.stored("sample")
  config = metadata.config
  labels = _labels(options.labels, metadata.class_names)
  sample.check_request(config, labels, options.seed)
  num = options.num or max(len(labels) or config.model.num_classes, len(files))
  if config.diffusion.space == "latent" and not options.vae:
    raise ValueError(f"--vae is missing: {HOW_TO_GET_VAE}")
  mesh = sharding.make_mesh(config.mesh)
  with sharding.use_mesh(mesh):
    vae = decode = None
    if options.vae:
      encoder = metadata.encoder_sha256
      vae = load_autoencoder(options.vae, config, mesh, encoder=encoder)
      decode = vae.decoder(options.vae_tile)
    start, inputs = _read_start(files, config, vae)
    restored = options.restore(mesh=mesh)
    sampler = sample.Sampler(
      restored,
      labels=labels,
      seed=options.seed,
      mesh=mesh,
      decode=decode,
      start=inputs,
      strength=options.strength,
    )
    size = min(options.batch_size, num)
    if out.suffix == ".png":
      images = sample.sample_images(sampler, num, size)
      if options.is_first():
        names = [*map(sampler.name, sampler.label(np.arange(num)))]
        images = tiles(images, names, config.sample.zoom)
        sample.write_grid(out, images, min(options.columns or 10, num))
    else:
      settings = _settings(options, metadata, labels, start) | {
        "checkpoint": fingerprint(restored.config.model, restored.params),
        "step": restored.step,
        "vae": vae and weights_sha256(vae.config, vae.params),
        **random_settings(),
      }
      sample.sample_files(sampler, num, out, batch_size=size, settings=settings)
  told = f"{num} images written to {out}"
  options.give({"images": num, "out": str(out), "step": restored.step}, [told])
  return 0


def _read_start(
  files: Sequence[str], config: Config, vae: Autoencoder | None
) -> tuple[list[np.ndarray], np.ndarray | None]:
  """Images to begin from, and the same as the model's input.

  Args:
    files: of the images.
    config: of the model.
    vae: autoencoder of a model of latents, else None.

  Returns:
    Pixels [X, Y, channels] uint8, cropped to the model's size, and its input
    [n, x, y, channels] float32; None without files.
  """
  import numpy as np

  from moh_jax.data.decode import read_image
  from moh_jax.data.transforms import center_crop

  size, channels = config.model.input_size, config.model.channels
  if vae:
    size = tuple(side * vae.config.downscale for side in size)
    channels = vae.config.image_channels
  images = [center_crop(read_image(file, channels), size) for file in files]
  rows = (image[None].astype(np.float32) / 127.5 - 1 for image in images)
  if vae:
    rows = map(vae.encoder(), rows)
  rows = [np.asarray(row) for row in rows]
  return images, np.concatenate(rows) if rows else None


def _labels(text: str, class_names: Sequence[str]) -> tuple[int | None, ...]:
  """Labels of "3,none,cat"; a class whose name has a comma has a number.

  Raises:
    ValueError: a name is none of the model's, or may mean several classes.
  """
  labels: list[int | None] = []
  for name in map(str.strip, text.split(",") if text else ()):
    found = {i for i, own in enumerate(class_names) if own.strip() == name}
    found |= {None} if name == "none" else set()
    found |= {int(name)} if re.fullmatch("-?[0-9]{1,18}", name) else set()
    if len(found) > 1:
      raise ValueError(
        f"--labels: {name!r} may be any of the labels {found}; give a number "
        "that is no class name, such as 07 for 7"
      )
    labels += found
    if not found:
      known = ", ".join(class_names[:10]) + ", ..." * (len(class_names) > 10)
      raise ValueError(
        f"--labels: {name!r} must be a number, none, or one of the model's "
        f"{len(class_names)} class names ({known})"
      )
  return tuple(labels)


def _settings(
  options: Options,
  metadata: Metadata,
  labels: Sequence[int | None],
  start: list[np.ndarray],
) -> dict[str, Any]:
  """What the images depend on, beside the networks."""
  config = metadata.config
  settings = {
    "ema": config.eval.use_ema,
    "seed": options.seed,
    "labels": labels,
    "vae_tile": options.vae_tile,
    **{name: getattr(config.sample, name) for name in _KEYS},
    "top_k": options.top_k,
    "gate_form": options.change("model.router.gate_form"),
    "dtype": config.model.dtype,
  }
  # Only where they are given: files of versions without them are continued.
  if changes := [c for c in options.changes if c.startswith("diffusion.")]:
    settings["diffusion"] = changes
  if start:
    sha256 = hashlib.sha256(b"".join(pixels.tobytes() for pixels in start))
    settings["start"] = f"{len(start)} images, sha256 {sha256.hexdigest()[:16]}"
    settings["strength"] = options.strength
  return settings
