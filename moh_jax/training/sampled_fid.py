"""FID of images that a run samples: a further metric of its evaluations."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.convert.inception import load_inception
from moh_jax.evaluation.fid import frechet_distance
from moh_jax.evaluation.image_metrics import make_extractor
from moh_jax.evaluation.statistics import Gaussian, merge, moments
from moh_jax.evaluation.statistics_files import read_statistics
from moh_jax.models import inception
from moh_jax.models.generation import Decode, make_image_sampler
from moh_jax.models.registry import make_model
from moh_jax.models.weights_hash import params_sha256
from moh_jax.runtime import sharding
from moh_jax.training.stopping import interruptible
from moh_jax.training.task import Evaluate

# The decoder of latents takes far more memory for an image than the network in
# an evaluation, whose batches are larger. `sample` takes 64 at a time too.
_MOST_AT_ONCE = 64


def make_score(
  config: Config, mesh: Mesh, decode: Decode | None
) -> Evaluate | None:
  """The metric "fid" of a run's evaluations.

  Args:
    config: the run.
    mesh: the devices.
    decode: latents to images, where the run has it.

  Returns:
    (params, mesh) -> metrics; None unless `sample.fid_images` asks for it.

  Raises:
    FileNotFoundError: a file that the section `sample` names is missing.
    ValueError: the files do not belong together, or latents lack `decode`.
  """
  sample = config.sections.get("sample")
  if sample is None or not sample.fid_images:
    return None
  sizes = inception.POOL_DIM, inception.SPATIAL_DIM
  reference = read_statistics(sample.fid_reference, *sizes)
  params = load_inception(sample.fid_inception)
  ours = {"resize": sample.fid_resize, "inception": params_sha256(params)}
  reference.check_made_with(ours, sample.fid_reference)
  params = jax.device_put(params, sharding.replicated(mesh))
  features = make_extractor(inception.InceptionV3(), sample.fid_resize)

  def extract(images: jax.Array) -> jax.Array:
    return features(params, images).pool3

  return make_fid(config, reference.pool3, extract, decode)


def make_fid(
  config: Config,
  reference: Gaussian,
  extract: Callable[[jax.Array], jax.Array],
  decode: Decode | None = None,
) -> Evaluate:
  """Makes the metric "fid" of a state.

  Image i has the noise of (train.seed, i) and the label i modulo the number of
  classes, so the metric depends on the parameters alone.

  Args:
    config: of a diffusion model; `sample.fid_images` images are sampled,
      `eval.batch_size` at a time, but at most 64 (or one for each shard).
    reference: distribution of the features of real images.
    extract: maps images [B, X, Y, 3] uint8 on the mesh to features [B, D].
    decode: latents to images; required by models of latents.

  Raises:
    ValueError: the decoder is missing, or images have neither 1 nor 3 channels.
  """
  model, _ = make_model(config)
  paint = make_image_sampler(model, config, decode)
  num = config.sample.fid_images
  most = min(config.eval.batch_size, _MOST_AT_ONCE)
  channels, classes = config.model.channels, config.model.num_classes
  if decode is None and channels not in (1, 3):
    raise ValueError(
      f"sample.fid_images={num} must be 0 for model.channels={channels}: the "
      "metric is of images with 1 or 3"
    )

  def evaluate(params: Any, mesh: Mesh) -> dict[str, float]:
    seen, shards = None, sharding.batch_shards(mesh)
    size = max(most // shards, 1) * shards
    for start in interruptible(range(0, num, size)):
      index = np.arange(start, start + size, dtype=np.int32)
      batch = [sharding.put_batch(x, mesh) for x in (index, index % classes)]
      images = paint(params, config.train.seed, *batch)
      if images.shape[-1] == 1:
        images = images.repeat(3, -1)
      features = sharding.gather(extract(images), mesh)[: num - start]
      found = moments(features)
      seen = found if seen is None else merge(seen, found)
    return {"fid": frechet_distance(seen.gaussian(), reference)}

  return evaluate
