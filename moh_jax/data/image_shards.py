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
"latent_shape", "latent_scale" (and "latent_shift", "latent_mean", "latent_std"
where the autoencoder has them), "image_size", "vae", "vae_sha256",
"encoder_sha256" and "encoded_from".
"""

import dataclasses
import io
import itertools
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tqdm

from moh_jax.config import Config, differing_fields
from moh_jax.config.dit import LatentScaling
from moh_jax.config.registry import SPLITS
from moh_jax.data import decode
from moh_jax.data.decoding_memory import DECODING_MEMORY
from moh_jax.data.identity import Identity
from moh_jax.data.image_folders import (
  ALL,
  EncodedSource,
  ImageFolderSource,
  Record,
  Selection,
  find_splits,
)
from moh_jax.data.image_tables import ParquetSource, find_tables, is_tables
from moh_jax.data.shard_writer import ShardSetWriter
from moh_jax.data.shards import METADATA, Shards, read_metadata, unpack
from moh_jax.data.sources import (
  Example,
  ImageSource,
  check_class_names,
  read_ahead,
)

KIND, LATENTS = "images", "latents"
_DTYPE = np.dtype("<f2")  # of latents
_THREADS = 8  # threads that read image files
_QUALITY = 95  # of JPEG files that are written in place of larger images


class _ShardSource(ImageSource):
  """Examples in PATH/SPLIT/*.array_record."""

  kind: str  # of the set

  def __init__(self, path: str, split: str):
    """Opens a split, whose metadata.json says the classes.

    Args:
      path: directory of the splits, local or mounted.
      split: "train" or "val"; "" reads `path` itself.

    Raises:
      FileNotFoundError: metadata.json or a shard is missing.
      ValueError: the set is of another kind, or a shard is truncated.
    """
    self._folder = pathlib.Path(path) / split
    self._shards = Shards(self._folder, self.kind)
    self.metadata = self._shards.metadata
    self.class_names = tuple(self.metadata["class_names"])

  def identity(self) -> Identity:
    """Identifies the examples and their order."""
    return self._shards.identity()

  def __len__(self) -> int:
    return len(self._shards)

  def name(self, index: int) -> str:
    """Names an example for messages, by its shard and position."""
    return self._shards.locate(index)


class ArrayRecordSource(_ShardSource, EncodedSource):
  """Source of packed images, which are as they were selected for it."""

  kind = KIND

  def __init__(
    self, path: str, split: str, channels: int, selection: Selection = ALL
  ):
    """Opens a split; images become grey with 1 of `channels`, RGB with 3."""
    del selection
    super().__init__(path, split)
    self.channels = channels

  @property
  def fingerprint(self) -> str:
    """Identifies the list of images that were packed."""
    return self.metadata["images"]

  def read(self, index: int) -> Record:
    """The file of an image, not decoded."""
    header, content = self._shards[index]
    place = f"{header['name']} in {self._folder}"
    return Record(header["label"], place, content)

  def name(self, index: int) -> str:
    """The image's "CLASS/NAME"; shard and position if the record is damaged."""
    try:
      return self._shards[index][0]["name"]
    except ValueError:
      return super().name(index)


class LatentSource(_ShardSource):
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
    self.scaling = stored_scaling(self.metadata)
    # "" in sets of older versions.
    self.encoder_sha256 = self.metadata.get("encoder_sha256", "")

  @classmethod
  def open(
    cls, config: Config, split: str, class_names: tuple[str, ...] = ()
  ) -> "LatentSource":
    """Opens a split.

    Raises:
      ValueError: the configured model does not take these latents.
    """
    del class_names
    source, model = cls(config.data.path, split), config.model
    if source.latent_shape != model.input_shape:
      raise ValueError(
        f"data.path={config.data.path!r} holds latents of shape "
        f"{source.latent_shape} (images of {source.metadata['image_size']} "
        f"pixels), the model takes {model.input_shape}: model.input_size and "
        "model.channels"
      )
    ours = config.diffusion.scaling
    if differing := differing_fields(ours, source.scaling, "latent"):
      raise ValueError(
        f"data.path={config.data.path!r}: the latents are of another scale: "
        f"{'; '.join(differing).replace('latent.', 'diffusion.latent_')}"
      )
    return source

  @classmethod
  def tell(cls, config: Config, names: Collection[str]) -> dict[str, Any]:
    """Classes and channels; also "scaling" and "encoder_sha256"."""
    del names
    metadata = read_metadata(pathlib.Path(config.data.path) / "train", LATENTS)
    return {
      "channels": metadata["latent_shape"][-1],
      "num_classes": len(metadata["class_names"]),
      "scaling": stored_scaling(metadata),
      "encoder_sha256": metadata.get("encoder_sha256", ""),
    }

  def __getitem__(self, index: int) -> Example:
    return self._shards.record(index, self._parse)

  def _parse(self, record: bytes) -> Example:
    header, payload = unpack(record)
    moments = np.frombuffer(payload, _DTYPE).reshape(2, 2, *self.latent_shape)
    return {"image": moments, "label": np.int32(header["label"])}


def open_splits(
  path: str,
  split: str | None,
  channels: int = 3,
  selection: Selection = ALL,
) -> dict[str, EncodedSource]:
  """Opens images of any kind on disk, whichever it is.

  Args:
    path: folder with train/ and val/ (or one of them), or with one split
      directly, of class folders or of what `prepare pack-images` wrote; or a
      folder of Parquet or Arrow files.
    split: the wanted split; None opens all. If `path` is one split directly,
      this is the name it gets, "train" for None.
    channels: 1 decodes to grey, 3 to RGB.
    selection: of the images; the classes of the first split are those of all.

  Returns:
    Sources by split.

  Raises:
    FileNotFoundError: there is no such split.
    ValueError: the data are damaged, or have classes beside `class_names`; a
      column of folders or shards; a share of shards.
  """
  of_tables, share = is_tables(path), selection.val_share
  if selection.label_column and not of_tables:
    raise ValueError(
      f"--label-column={selection.label_column!r} must be '': {path} has no "
      "tables"
    )
  found = find_tables(path) if of_tables else find_splits(path)
  divided = share > 0 and found.keys() == {"train"}
  if divided and not of_tables and (found["train"] / METADATA).is_file():
    raise ValueError(f"--val-share={share} must be 0: {path} is packed")
  places: dict[str, tuple[type[EncodedSource], str, str]] = {}
  if divided or of_tables:
    kind = ParquetSource if of_tables else ImageFolderSource
    names = [split] if split else (SPLITS if divided else found)
    places = {name: (kind, path, name) for name in names}
  else:
    for name, folder in find_splits(path, split).items():
      packed = (folder / METADATA).is_file()
      kind = ArrayRecordSource if packed else ImageFolderSource
      places[name] = kind, str(folder), ""
  opened: dict[str, EncodedSource] = {}
  for name, (kind, *place) in places.items():
    opened[name] = source = kind(*place, channels, selection)
    selection = selection._replace(class_names=source.class_names)
  first, *others = opened.values()
  for other in others:
    check_class_names(first.class_names, other.class_names, path)
  return opened


def pack_images(
  source: EncodedSource,
  out: str | os.PathLike,
  *,
  packed_from: str | os.PathLike,
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
    FileNotFoundError: an image is gone, with bad_images="raise".
    OSError: a shard cannot be written.
    ValueError: `out` holds a set of other images or settings, or an image is
      damaged, with bad_images="raise".
  """
  images = source.fingerprint
  if shorter_side:
    images += f", shorter side at most {shorter_side}"
  writer = ShardSetWriter(
    out,
    KIND,
    items=len(source),
    shard_size=shard_size,
    settings={"images": images},
    notes={
      "class_names": source.class_names,
      "packed_from": os.fspath(packed_from),
    },
  )

  def prepare(item: int) -> Record | Exception:
    try:
      record = source.read(item)
      return _checked(record, shorter_side)
    except (ValueError, FileNotFoundError) as error:
      return error

  todo = writer.todo()
  left = sum(len(writer.items(shard)) for shard in todo)
  places = itertools.chain.from_iterable(map(writer.items, todo))
  images_read = read_ahead(prepare, places, _THREADS, 2 * _THREADS)
  # None disables it where stderr is no terminal.
  with tqdm.tqdm(total=left, unit="image", disable=None) as bar:
    for shard in todo:
      with writer.open(shard) as target:
        for item, found in zip(writer.items(shard), images_read):
          name = source.name(item)
          if isinstance(found, Record):
            target.add({"label": found.label, "name": name}, found.content)
          elif bad_images == "raise":
            raise found
          else:
            target.skip(name, "unreadable", f": {found}")
          bar.update()
  return writer.finish()


def _checked(record: Record, shorter: int) -> Record:
  """The image with a shorter side of at most `shorter` pixels; 0 is any.

  Raises:
    ValueError: it is no image, or to be made smaller and damaged.
  """
  size, grey = decode.describe_image(record.content, record.place)
  if not shorter or min(size) <= shorter:
    return record
  with DECODING_MEMORY.held():
    pixels = decode.decode_image(record.content, 1 if grey else 3, record.place)
    # Some files say behind the pixels that rows are columns.
    size = tuple(round(n * shorter / min(size)) for n in pixels.shape[:2])
    pixels = decode.resize(pixels, size)
  file = io.BytesIO()
  decode.to_picture(pixels).save(file, "JPEG", quality=_QUALITY)
  return record._replace(content=file.getvalue())


def stored_scaling(metadata: Mapping[str, Any]) -> LatentScaling:
  """How the latents of a set are scaled, from its metadata.json."""
  stored = {
    field.name: metadata.get(f"latent_{field.name}", field.default)
    for field in dataclasses.fields(LatentScaling)
  }
  for name in ("mean", "std"):
    stored[name] = tuple(stored[name])
  return LatentScaling(**stored)


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
