"""Packs folders of images into shards."""

import concurrent.futures
import os
from typing import Any

import tqdm
from etils import epath

from moh_jax.data.images.files import fingerprint, list_images
from moh_jax.data.images.records import KIND
from moh_jax.data.shard_writer import ShardSetWriter

_THREADS = 8  # that read files


def pack_images(
  folder: str | os.PathLike,
  out: str | os.PathLike,
  *,
  shard_size: int = 1024,
  progress: bool = True,
) -> dict[str, Any]:
  """Packs folder/CLASS/* into shards; continues where it was interrupted.

  The files are copied as they are, readable or not: `data.bad_images` says what
  becomes of a bad one.

  Args:
    folder: the classes, local or in a bucket.
    out: folder of the set, local or mounted.
    shard_size: images of a shard.
    progress: show a progress bar on stderr.

  Returns:
    What metadata.json says.

  Raises:
    FileNotFoundError: there is no image.
    OSError: an image cannot be read, or a shard not written.
    ValueError: `out` holds other images or shards of another size.
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
      disable=not progress,
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
