"""Prints digests of training batches, for numbers of worker processes."""

import dataclasses
import hashlib
import sys

from moh_jax.config import DataConfig, apply_overrides
from moh_jax.data import pipeline
from moh_jax.data.sources import make_source
from tests.data.pipeline_test import CONFIG


def main(workers: int, count: int) -> None:
  """Batches from 0 and from 3 on: those of an uninterrupted stream."""
  data = DataConfig(
    source="digits",
    batch_size=4,
    augment="crop_flip",
    auto_augment="rand-m9-mstd0.5-inc1",
    color_jitter=0.3,
    random_erasing=0.5,
    repeats=3,
    mean=(0.3,),
    std=(0.37,),
  )
  model = dataclasses.replace(CONFIG.model, num_classes=10)
  config = dataclasses.replace(CONFIG, model=model, data=data)
  config = apply_overrides(config, "data", workers=workers, num_threads=1)
  dataset = pipeline.train_images(config, make_source(config, "train"))
  stream = pipeline.TrainBatches(dataset, config.data, (2, 3))
  for start in (0, 3):
    stream.seek(start)
    for _ in range(count - start):
      batch = next(stream)
      bits = batch["image"].tobytes() + batch["label"].tobytes()
      print(stream.position, hashlib.sha256(bits).hexdigest())
  stream.close()


if __name__ == "__main__":
  main(*map(int, sys.argv[1:]))
