"""Normalization of pixels on the device, so that bytes cross to it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normalizer(data: Any) -> Callable[[Any], Any]:
  """Makes the function that normalizes the pixels of a batch.

  The result is that of `transforms.Normalize` up to float32 rounding: XLA
  multiplies by a reciprocal where numpy divides. Over all 256 values it differs
  by 1.2e-6 at most for the means and deviations of ImageNet, of [-1, 1] and of
  the digits.

  Args:
    data: section `data` of the config.

  Returns:
    Maps batches {"image": [B, X, Y, channels] uint8, ...} to the same with
    float32 images, (pixel / 255 - mean) / std per channel. Other batches (text,
    latents, images that are float32 already) stay as they are.
  """
  if getattr(data, "mean", None) is None:
    return lambda batch: batch
  mean, std = (np.float32([[[x]]]) for x in (data.mean, data.std))

  def normalize(batch: dict[str, Any]) -> dict[str, Any]:
    image = batch["image"]
    if image.dtype != jnp.uint8:
      return batch
    image = image.astype(jnp.float32) / 255
    return {**batch, "image": (image - mean) / std}

  return jax.jit(normalize)
