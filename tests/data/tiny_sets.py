"""Small sets of shards and the configs that read them."""

import dataclasses

import numpy as np

from moh_jax.data import packed, pipeline
from moh_jax.data.shards import ShardWriter
from tests.training import tiny

VIT = dataclasses.replace(
  tiny.MODEL, image_size=(16, 16), channels=3, num_classes=3
)
SHAPE = (4, 4, 2)
CLASSES = ("ant", "cat")


def moments(index):
  """[2, 2, *SHAPE]: means 10 * index (mirror: its negative), variances e^-4."""
  mean = np.full(SHAPE, 10 * index, np.float32)
  variance = np.full(SHAPE, -4, np.float32)
  return np.stack([np.stack([mean, variance]), np.stack([-mean, variance])])


def write_latents(folder, examples=10, shard_size=4, **settings):
  """Example i has the label i % 2."""
  defaults = {
    "image_size": 16,
    "latent_shape": SHAPE,
    "scaling": {"scale": 0.5},
  }
  defaults |= {"class_names": CLASSES, "encoder_sha256": ""}
  items = packed.shard_items(examples, shard_size)
  settings = {**defaults, **settings}
  writer = ShardWriter(folder, packed.LATENTS, len(items), settings)
  for shard in writer.todo():
    with writer.open(shard) as target:
      for item in items[shard]:
        header = {"label": item % 2, "name": f"{CLASSES[item % 2]}/{item}"}
        target.add(header, packed.encode_moments(moments(item)))
  return writer.finish()


def dit_config(
  space="latent",
  source="latents",
  path="",
  input_size=(4, 4),
  channels=2,
  **data,
):
  """A diffusion model of images or of the latents above."""
  halves = (0.5,) * (1 if space == "latent" else channels)
  usual = {"batch_size": 4, "mean": halves, "std": halves}
  usual |= {"num_threads": 2, "prefetch": 2}
  sizes = {"input_size": input_size, "channels": channels}
  return tiny.dit_config(
    model=sizes | {"num_classes": len(CLASSES)},
    data={"source": source, "path": str(path), **usual, **data},
    eval={"batch_size": 4},
    diffusion={"space": space, "latent_scale": 0.5},
  )


def train_stream(config, source, rows=None):
  rows = range(config.data.batch_size) if rows is None else rows
  dataset = pipeline.train_images(config, source)
  return pipeline.TrainBatches(dataset, config.data, rows)


def eval_stream(config, source, rows=None):
  rows = range(config.eval.batch_size) if rows is None else rows
  ready = pipeline.held_out_images(config, source)
  return pipeline.eval_batches(config, ready, rows)
