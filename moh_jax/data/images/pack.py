"""Packs a folder of images into array_record shards."""

import concurrent.futures
import os
from typing import Any

import tqdm
from etils import epath

from moh_jax.data.images.folders import fingerprint, list_images
from moh_jax.data.images.records import KIND
from moh_jax.data.shard_writer import ShardSetWriter

_THREADS = 8  # threads that read image files


def pack_images(
  folder: str | os.PathLike,
  out: str | os.PathLike,
  *,
  shard_size: int = 1024,
  progress: bool = True,
) -> dict[str, Any]:
  """Packs FOLDER/CLASS/* into shards; continues an interrupted run.

  Files are copied unchanged and not decoded; the option `data.bad_images`
  decides how training treats files that cannot be decoded.

  Args:
    folder: folder of the classes, local or in a bucket.
    out: folder of the new set, local or mounted.
    shard_size: images per shard.
    progress: show a progress bar on stderr, where that is a terminal.

  Returns:
    The content of metadata.json.

  Raises:
    FileNotFoundError: there is no image.
    OSError: an image cannot be read, or a shard not be written.
    ValueError: `out` holds a set of other images or another shard size.
  """
  class_names, files = list_images(folder)
  writer = ShardSetWriter(
    out,
    KIND,
    items=len(files),
    shard_size=shard_size,
    settings={"images": fingerprint(files)},
    notes={"class_names": class_names, "packed_from": os.fspath(folder)},
  )
  root = epath.Path(folder)
  todo = writer.todo()
  left = sum(len(writer.items(shard)) for shard in todo)
  with (
    concurrent.futures.ThreadPoolExecutor(_THREADS) as pool,
    tqdm.tqdm(
      total=len(files),
      initial=len(files) - left,
      unit="image",
      disable=not progress or None,
    ) as bar,
  ):
    for shard in todo:
      items = writer.items(shard)
      chosen = [files[item] for item in items]
      with writer.open(shard) as target:
        contents = pool.map(lambda f: (root / f[0]).read_bytes(), chosen)
        for (name, label), content in zip(chosen, contents):
          target.add({"label": label, "name": name}, content)
          bar.update()
  return writer.finish()
