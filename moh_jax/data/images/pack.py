"""Packs images into array_record shards."""

import concurrent.futures
import io
import os
from typing import Any

import tqdm

from moh_jax.data.images.encoded import EncodedSource, Record
from moh_jax.data.images.files import (
  decode_image,
  describe_image,
)
from moh_jax.data.images.pictures import to_picture
from moh_jax.data.images.records import KIND
from moh_jax.data.images.resizing import resize
from moh_jax.data.shard_writer import ShardSetWriter

_THREADS = 8  # threads that read image files
_QUALITY = 95  # of JPEG files that are written in place of larger images


def pack_images(
  source: EncodedSource,
  out: str | os.PathLike,
  *,
  packed_from: str | os.PathLike,
  shard_size: int = 1024,
  shorter_side: int = 0,
  bad_images: str = "raise",
  progress: bool = True,
) -> dict[str, Any]:
  """Packs images into shards; continues an interrupted run.

  A run that was killed and continued writes the same bytes as one that was not.

  Args:
    source: the images.
    out: folder of the new set, local or mounted.
    packed_from: where they are from, for the reader of metadata.json.
    shard_size: images per shard.
    shorter_side: makes images whose shorter side has more pixels smaller
      (bicubic, JPEG of quality 95); the others, and all with 0, are copied
      unchanged and not decoded: `data.bad_images` decides how training treats
      them.
    bad_images: "raise" ends at a file that cannot be read (or made smaller),
      "skip" leaves it out.
    progress: show a progress bar on stderr, where that is a terminal.

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
      return _shrunk(record, shorter_side) if shorter_side else record
    except (ValueError, FileNotFoundError) as error:
      return error

  todo = writer.todo()
  left = sum(len(writer.items(shard)) for shard in todo)
  with (
    concurrent.futures.ThreadPoolExecutor(_THREADS) as pool,
    tqdm.tqdm(
      total=len(source),
      initial=len(source) - left,
      unit="image",
      disable=not progress or None,
    ) as bar,
  ):
    for shard in todo:
      items = writer.items(shard)
      with writer.open(shard) as target:
        for item, found in zip(items, pool.map(prepare, items)):
          name = source.name(item)
          if isinstance(found, Record):
            target.add({"label": found.label, "name": name}, found.content)
          elif bad_images == "raise":
            raise found
          else:
            target.skip(name, "unreadable", f": {found}")
          bar.update()
  return writer.finish()


def _shrunk(record: Record, shorter: int) -> Record:
  """The image with a shorter side of at most `shorter` pixels.

  Raises:
    ValueError: it is to be made smaller, and damaged.
  """
  size, grey = describe_image(record.content, record.place)
  if min(size) <= shorter:
    return record
  pixels = decode_image(record.content, 1 if grey else 3, record.place)
  scale = shorter / min(size)
  pixels = resize(pixels, tuple(round(side * scale) for side in size))
  file = io.BytesIO()
  to_picture(pixels).save(file, "JPEG", quality=_QUALITY)
  return record._replace(content=file.getvalue())
