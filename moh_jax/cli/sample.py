"""`python -m moh_jax sample`."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated

from moh_jax.cli import command
from moh_jax.config.base import Count, Range
from moh_jax.runtime.alive import alive

_COLUMNS = 10  # of a grid


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
    batch_size: images at a time.
  """

  out: command.OutPath
  labels: str = ""
  num: Count | None = None
  seed: Annotated[int, Range(0, 2**31 - 1)] = 0
  vae: command.Place | None = None
  batch_size: Count = 64

  def check(self) -> None:
    """The output is of a known form."""
    super().check()
    out = pathlib.Path(self.out)
    if out.suffix not in ("", ".png", ".npz") and not out.is_dir():
      self.fail("out", "must end in .png or .npz, or be a folder")


@alive("sampling")
def run(options: Options) -> int:
  """Samples images and writes them."""
  import numpy as np

  from moh_jax.convert.vae import HOW_TO_GET_VAE, load_autoencoder
  from moh_jax.evaluation.pictures import tiles
  from moh_jax.inference import sample
  from moh_jax.inference.restore import fingerprint
  from moh_jax.models.vae import weights_sha256
  from moh_jax.runtime.devices import random_settings
  from moh_jax.runtime.mesh import make_mesh, use_mesh

  options.join()
  out = pathlib.Path(options.out)
  metadata, _ = options.stored("sample")
  config = metadata.config
  labels = _labels(options.labels, metadata.class_names)
  sample.check_request(config, labels)
  num = options.num or len(labels) or config.model.num_classes
  if config.diffusion.space == "latent" and not options.vae:
    raise ValueError(f"--vae is missing: {HOW_TO_GET_VAE}")
  mesh = make_mesh(config.mesh)
  with use_mesh(mesh):
    vae = options.vae and load_autoencoder(
      options.vae, config, mesh, encoder=metadata.encoder_sha256
    )
    restored = options.restore(mesh=mesh)
    sampler = sample.Sampler(
      restored,
      labels=labels,
      seed=options.seed,
      mesh=mesh,
      decode=vae.decode if vae else None,
    )
    size = min(options.batch_size, num)
    if out.suffix == ".png":
      images = sample.sample_images(sampler, num, size)
      if options.is_first():
        names = [*map(sampler.name, sampler.label(np.arange(num)))]
        images = tiles(images, names, config.sample.zoom)
        sample.write_grid(out, images, min(_COLUMNS, num))
    else:
      settings = {
        "model": fingerprint(restored.config.model, restored.params),
        "vae": vae and weights_sha256(vae.config, vae.params),
        "seed": options.seed,
        "labels": labels,
        "diffusion": dataclasses.asdict(config.diffusion),
        "sample": dataclasses.asdict(config.sample),
        **random_settings(),
      }
      sample.sample_files(sampler, num, out, batch_size=size, settings=settings)
  told = f"{num} images written to {out}"
  options.give({"images": num, "out": str(out), "step": restored.step}, [told])
  return 0


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
