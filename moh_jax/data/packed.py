"""Images and latents in shards, as `prepare` writes and training reads them.

The header of a record is {"label": 3, "name": "ant/1.jpg"}. The payload of a
record of images is the unchanged image file; metadata.json has the fields
"class_names", "images" (a fingerprint of the list of files) and "packed_from".

The payload of latents is a little-endian float16 array [2, 2, X, Y, channels]:
for the image and for its mirror image, mean and log-variance of the
autoencoder's posterior. float16 takes half the disk space of float32 (32 KiB
for an image of 256 x 256 pixels). It rounds a mean between 4 and 8 by at most
0.002; after `latent_scale` that is 0.0004, a 25th of the smallest noise of the
training (0.01 at timestep 0). metadata.json has the fields "class_names",
"latent_shape", "scaling" (of `LatentScaling`), "image_size", "vae",
"vae_sha256", "encoder_sha256" and "encoded_from".
"""

import io
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Self

import grain
import numpy as np
import tqdm

from moh_jax.config import Config, differing_fields, imported
from moh_jax.config.dit import LatentScaling
from moh_jax.config.registry import SOURCES, SPLITS, MissingSplitError
from moh_jax.data import decode, sources
from moh_jax.data.files import Identity, StrPath
from moh_jax.data.shards import METADATA, Shards, ShardWriter
from moh_jax.data.sources import ALL, EncodedSource, Names, Selection
from moh_jax.data.tables import find_tables

IMAGES, LATENTS = "images", "latents"  # kinds of sets
_DTYPE = np.dtype("<f2")  # of latents
_THREADS = 8  # that read image files
_QUALITY = 95  # of JPEG files that are written in place of larger images


class _PackedSource(sources.ImageSource):
  """Examples in PATH/SPLIT/*.array_record."""

  kind: str  # of the set

  def __init__(
    self, path: str, split: str, channels: int = 0, selection: Selection = ALL
  ):
    """Opens a split, whose metadata.json says the classes.

    Args:
      path: directory of the splits, local or mounted.
      split: "train" or "val".
      channels: 1 converts images to grey, 3 to RGB.
      selection: ignored; images were selected when they were packed.

    Raises:
      FileNotFoundError: there is no metadata.json.
      ValueError: the set is of another kind, or a shard is truncated.
    """
    self._folder = pathlib.Path(path) / split
    self._shards = Shards(self._folder, self.kind)
    self.metadata, self.channels = self._shards.metadata, channels
    self.class_names = tuple(self.metadata["class_names"])

  def identity(self) -> Identity:
    """Identifies the examples and their order."""
    return self._shards.identity()

  def __len__(self) -> int:
    return len(self._shards)

  def name(self, index: int) -> str:
    """The image's "CLASS/NAME"."""
    return self._shards[index][0]["name"]


class PackedImages(_PackedSource, EncodedSource):
  """Source of packed images."""

  kind = IMAGES

  @property
  def fingerprint(self) -> str:
    """Identifies the images that were packed, and as what."""
    return self.metadata["fingerprint"]

  def read(self, index: int) -> sources.Record:
    """The file of an image, not decoded."""
    header, content = self._shards[index]
    place = f"{header['name']} in {self._folder}"
    return sources.Record(header["label"], place, content)


class LatentSource(_PackedSource):
  """Source of latents.

  `source[i]` is {"image": [2, 2, X, Y, channels] float16, "label": int32}. The
  first axis is the image and its mirror image, the second mean and
  log-variance.
  """

  kind = LATENTS

  def __init__(self, path: str, split: str):
    """Opens a split."""
    super().__init__(path, split)
    self.latent_shape = tuple(self.metadata["latent_shape"])
    self.channels = self.latent_shape[-1]
    self.scaling = LatentScaling(**self.metadata["scaling"])
    self.encoder_sha256 = self.metadata["encoder_sha256"]

  @classmethod
  def open(cls, config: Config, split: str, class_names: Names = ()) -> Self:
    """Opens a split.

    Raises:
      ValueError: the configured model does not take these latents.
    """
    source, model = cls(config.data.path, split), config.model
    where = f"data.path={config.data.path!r}"
    if source.latent_shape != model.input_shape:
      raise ValueError(
        f"{where} holds latents of shape {source.latent_shape}, the model "
        f"takes {model.input_shape}: model.input_size and model.channels"
      )
    ours = config.diffusion.scaling
    if differing := differing_fields(ours, source.scaling, "latent"):
      named = "; ".join(differing).replace("latent.", "diffusion.latent_")
      raise ValueError(f"{where}: latents of another scale: {named}")
    return source

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """Classes and channels; also "scaling" and "encoder_sha256"."""
    source = cls(config.data.path, "train")
    return {
      "channels": source.channels,
      "num_classes": len(source.class_names),
      "scaling": source.scaling,
      "encoder_sha256": source.encoder_sha256,
    }

  def __getitem__(self, index: int) -> sources.Example:
    header, payload = self._shards[index]
    moments = np.frombuffer(payload, _DTYPE).reshape(2, 2, *self.latent_shape)
    return {"image": moments, "label": np.int32(header["label"])}


def encode_moments(moments: np.ndarray) -> bytes:
  """Encodes the payload of a record.

  Args:
    moments: [2, 2, X, Y, channels] float, see the head of this file.

  Raises:
    ValueError: a value is not finite in float16.
  """
  with np.errstate(over="ignore"):
    stored = moments.astype(_DTYPE)
  if not np.isfinite(stored).all():
    raise ValueError("the autoencoder's output is not finite in float16")
  return stored.tobytes()


def source_at(path: StrPath) -> str:
  """What a folder of images holds: the name of its source."""
  if any(pathlib.Path(path, split, METADATA).is_file() for split in SPLITS):
    return "array_record"
  return "parquet" if find_tables(path) else "image_folder"


def open_splits(
  path: str, split: str | None, channels: int = 3, selection: Selection = ALL
) -> dict[str, EncodedSource]:
  """Opens images of any kind on disk, whichever it is.

  Args:
    path: folder of class folders, tables, or what `prepare pack-images` wrote.
    split: the wanted split; None opens those that there are.
    channels: 1 decodes to grey, 3 to RGB.
    selection: of the images; the classes of the first split are those of all.

  Returns:
    Sources by split.

  Raises:
    FileNotFoundError: there is no such split.
    ValueError: the data are damaged, or have classes beside `class_names`.
  """
  kind = imported(SOURCES["images"].get(source_at(path)).source)
  opened: dict[str, EncodedSource] = {}
  for name in (split,) if split else SPLITS:
    try:
      opened[name] = kind(path, name, channels, selection)
    except MissingSplitError:
      if split:
        raise
      continue
    selection = selection._replace(class_names=opened[name].class_names)
  return opened


def shard_items(items: int, shard_size: int) -> list[range]:
  """Numbers of the images that belong to each shard."""
  starts = range(0, items, shard_size)
  return [range(i, min(i + shard_size, items)) for i in starts]


def read_ahead(
  read: Callable[[int], Any], places: Iterable[int], ahead: int, bad_images: str
) -> Iterator[Any]:
  """Reads examples on threads, at most `ahead` of them before their turn.

  What raises ValueError or OSError ends it, or with bad_images="skip" is its
  message in place of the example.
  """

  def checked(place: int) -> Any:
    try:
      return read(place)
    except (ValueError, OSError) as error:
      if bad_images == "skip":
        return str(error)
      raise ValueError(f"{error} (--bad-images skip leaves it out)") from error

  options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=ahead)
  dataset = grain.MapDataset.source(list(places)).map(checked)
  return iter(dataset.to_iter_dataset(options))


def pack_images(
  source: EncodedSource,
  out: StrPath,
  *,
  packed_from: StrPath,
  shard_size: int = 1024,
  shorter_side: int = 0,
  bad_images: str = "raise",
) -> dict[str, Any]:
  """Packs images into shards; continues an interrupted run.

  A run that was killed and continued writes the same bytes as one that was not.

  Args:
    source: the images.
    out: folder of the new set, local or mounted.
    packed_from: where they are from, for the reader of metadata.json.
    shard_size: images per shard.
    shorter_side: makes images whose shorter side has more pixels smaller
      (bicubic, JPEG of quality 95); of the others, and of all with 0, only the
      header is read: `data.bad_images` decides how training treats truncated
      ones.
    bad_images: "raise" ends at a file that is no image or cannot be read (or
      made smaller), "skip" leaves it out.

  Returns:
    The content of metadata.json.

  Raises:
    OSError: a shard cannot be written.
    ValueError: `out` holds a set of other images or settings, or an image
      cannot be read, with bad_images="raise".
  """
  items = shard_items(len(source), shard_size)
  settings = {"images": source.fingerprint, "shard_size": shard_size}
  settings |= {"shorter_side": shorter_side}
  writer = ShardWriter(out, IMAGES, len(items), settings)
  places = [item for shard in writer.todo() for item in items[shard]]

  def read(item: int) -> sources.Record:
    return _fitted(source.read(item), shorter_side)

  found = read_ahead(read, places, 2 * _THREADS, bad_images)
  # None disables it where stderr is no terminal.
  with tqdm.tqdm(total=len(places), unit="image", disable=None) as bar:
    for shard in writer.todo():
      with writer.open(shard) as target:
        for item, image in zip(items[shard], found):
          if isinstance(image, str):
            target.skip(image)
          else:
            header = {"label": image.label, "name": source.name(item)}
            target.add(header, image.content)
          bar.update()
  return writer.finish(
    class_names=source.class_names, packed_from=os.fspath(packed_from)
  )


def _fitted(record: sources.Record, shorter: int) -> sources.Record:
  """The image with a shorter side of at most `shorter` pixels; 0 is any.

  Raises:
    ValueError: it is no image, or to be made smaller and damaged.
  """
  size, grey = decode.describe_image(record.content, record.place)
  if not shorter or min(size) <= shorter:
    return record
  pixels = decode.decode_image(record.content, 1 if grey else 3, record.place)
  # Some files say behind the pixels that rows are columns.
  size = tuple(round(n * shorter / min(size)) for n in pixels.shape[:2])
  file = io.BytesIO()
  smaller = decode.to_picture(decode.resize(pixels, size))
  smaller.save(file, "JPEG", quality=_QUALITY)
  return record._replace(content=file.getvalue())
