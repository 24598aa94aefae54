"""The config section `data` of runs on images."""

import dataclasses
from typing import ClassVar

from moh_jax.config.checks import (
  MOST_AHEAD,
  MOST_BATCH,
  MOST_SIDE,
  at_least,
  in_range,
  one_of,
)
from moh_jax.config.policy import parse_policy
from moh_jax.config.sources import check_source

DECODES = ("exact", "fast")
AUGMENTATIONS = ("none", "shift", "crop_flip", "center_flip")
BAD_IMAGES = ("raise", "skip", "check")


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where examples come from and how they become batches.

  Attributes:
    source: "digits" (scikit-learn's 1,797 scans), "image_folder"
      (path/train/CLASS/* and path/val/CLASS/*, or path/CLASS/* with
      `val_share`; images without class folders are one class),
      "array_record" (shards of encoded images, path/train/*.array_record and
      path/val/..., as `pack-images` writes them), "parquet" (Parquet or Arrow
      files of the library `datasets` with image bytes, path/train-*.parquet or
      path/train/*), "latents" (what `encode-latents` writes, in the same
      places) or "fake" (random).
    path: directory of the source; "digits" and "fake" have none.
    batch_size: examples per optimizer step, over all devices and processes.
    augment: change of training images: "none", "shift" (random crop after
      padding by one eighth), "crop_flip" (random resized crop and horizontal
      flip) or "center_flip" (the centre crop of ADM, arXiv:2105.05233, and
      horizontal flip).
    auto_augment: random operations after `augment`, as timm names: "" none,
      "rand-m9-mstd0.5-inc1" RandAugment (arXiv:1909.13719) with sections m
      (magnitude), n (operations), p (probability), mstd (spread of magnitudes),
      mmax (largest one) and inc (1: all stronger with the magnitude), "3a"
      three-augment (arXiv:2204.07118).
    color_jitter: brightness, contrast and saturation are multiplied by factors
      between 1 minus this (at least 0) and 1 plus this; 0 is off.
    random_erasing: probability that a box of an image becomes noise
      (arXiv:1708.04896), in [0, 1].
    repeats: copies of an image in an epoch, one after the other and augmented
      apart (arXiv:1901.09335). An epoch has as many examples as without, down
      to a multiple of 256, so it holds a part of the images.
    val_share: share of an image folder without val/ that is held out, in [0,
      1]. A hash of a file's name decides, so that further images move none.
    class_list: file that names a class on each line, whose order is that of the
      labels of "image_folder" and "parquet"; "" is alphabetical order, or that
      of the tables.
    label_column: column of the labels of "parquet"; "" finds it.
    decode: what is decoded and resized. "exact" decodes at full scale, and
      Pillow resizes. "fast" resizes with cykooz_resizer, repeats colours of
      JPEG files that have fewer of them than pixels, and lets random crops
      (`augment` "crop_flip" with `repeats` 1) that are more than four times as
      large as the model's input decode JPEG at 1/2, 1/4 or 1/8: less than 1 of
      255 levels on average from "exact". It needs the extra `images`.
    bad_images: what a training image that cannot be read does: "raise" ends the
      run when it is reached, "skip" takes another image in its place and warns,
      "check" reads all images before the first step and names the bad ones.
    eval_resize: shorter side in pixels before the centre crop of evaluation; 0
      resizes straight to the model's image size, None is the largest centre
      crop of the images.
    mean: subtracted from pixels in [0, 1], one value per channel; None is 0.5
      for diffusion models, ImageNet's for classifiers of three channels, the
      training scans' for "digits", else 0.5. Latents are not normalized.
    std: divides after the mean, one value per channel; None as for `mean`.
    num_threads: threads that read and transform images.
    prefetch: batches prepared ahead.
    workers: processes that prepare batches, each with `num_threads`; 0 prepares
      them in this process, None is one for each 16 CPUs, at most 8, as
      far as shared memory has room. A program that starts them needs
      `if __name__ == "__main__":`.
    device_prefetch: batches that are on the devices before their step.
    fake_examples: examples in each split of "fake".
  """

  reads: ClassVar[str] = "images"

  source: str = "fake"
  path: str = ""
  batch_size: int = 128
  augment: str = "none"
  auto_augment: str = ""
  color_jitter: float = 0.0
  random_erasing: float = 0.0
  repeats: int = 1
  val_share: float = 0.0
  class_list: str = ""
  label_column: str = ""
  decode: str = "exact"
  bad_images: str = "raise"
  eval_resize: int | None = 0
  mean: tuple[float, ...] | None = None
  std: tuple[float, ...] | None = None
  num_threads: int = 4
  prefetch: int = 4
  workers: int | None = None
  device_prefetch: int = 2
  fake_examples: int = 1024

  def __post_init__(self):
    one_of("data", self, augment=AUGMENTATIONS, bad_images=BAD_IMAGES)
    one_of("data", self, decode=DECODES)
    at_least("data", 1, self, "batch_size", most=MOST_BATCH)
    at_least("data", 1, self, "prefetch", "num_threads", most=MOST_AHEAD)
    at_least("data", 1, self, "device_prefetch", most=MOST_AHEAD)
    at_least("data", 0, self, "workers", most=MOST_AHEAD)
    at_least("data", 1, self, "fake_examples")
    at_least("data", 0, self, "eval_resize", most=MOST_SIDE)
    in_range("data", -1e6, 1e6, self, "mean", "std")
    in_range("data", 0, 1, self, "val_share", "random_erasing")
    at_least("data", 0, self, "color_jitter", most=10)
    at_least("data", 1, self, "repeats", most=MOST_AHEAD)
    parse_policy(self.auto_augment, "data.auto_augment")
    check_source(self)
    if self.mean is self.std is None:
      return
    if not self.mean or not self.std or len(self.mean) != len(self.std):
      raise ValueError(
        f"data.mean={self.mean} and data.std={self.std} must have one value "
        "per channel each, or both be None"
      )
    if min(self.std) <= 0:
      raise ValueError(f"data.std={self.std} must be above 0")
