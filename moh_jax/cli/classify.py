"""`python -m moh_jax classify`."""

import dataclasses

from moh_jax.cli import command
from moh_jax.config.base import Count
from moh_jax.runtime.alive import alive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.Checkpoint, command.Output):
  """Name what image files show.

  Attributes:
    images: files, or folders: the images in them and all below.
    top: classes of an image.
  """

  images: tuple[command.InPath, ...] = command.option("positional")
  top: Count = 5


@alive("classifying")
def run(options: Options) -> int:
  """Prints the most probable classes of each image."""
  from moh_jax.data.decode import read_image
  from moh_jax.data.sources import find_images

  metadata, _ = options.stored("classify")
  files = find_images(options.images)
  for file in files:  # before the parameters, which take a while
    read_image(file, metadata.config.model.channels)
  found = options.restore().predict(files, top=options.top)
  rows = [
    {"image": file, "predictions": [dataclasses.asdict(p) for p in best]}
    for file, best in zip(files, found)
  ]
  lines = (
    f"{file}: " + ", ".join(f"{p.name} {p.probability:.1%}" for p in best)
    for file, best in zip(files, found)
  )
  options.give(rows, lines)
  return 0
