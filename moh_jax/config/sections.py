"""Config sections that every family shares."""

import dataclasses
from typing import ClassVar

from moh_jax.config.checks import (
  MOST_AHEAD,
  MOST_BATCH,
  MOST_SIDE,
  at_least,
  in_range,
  one_of,
  shown,
)

SOURCES = ("digits", "image_folder", "array_record", "latents", "fake")
AUGMENTATIONS = ("none", "shift", "crop_flip", "center_flip")
BAD_IMAGES = ("raise", "skip", "check")
SCHEDULES = ("cosine", "constant")


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where examples come from and how they become batches.

  Attributes:
    source: "digits" (scikit-learn's 1,797 scans), "image_folder"
      (path/train/CLASS/* and path/val/CLASS/*, or path/CLASS/* with
      `val_share`; images without class folders are one class),
      "array_record" (shards of encoded images, path/train/*.array_record and
      path/val/..., as `pack-images` writes them), "latents" (what
      `encode-latents` writes, in the same places) or "fake" (random).
    path: directory of the source; "digits" and "fake" have none.
    batch_size: examples per optimizer step, over all devices and processes.
    augment: change of training images: "none", "shift" (random crop after
      padding by one eighth), "crop_flip" (random resized crop and horizontal
      flip) or "center_flip" (the centre crop of ADM, arXiv:2105.05233, and
      horizontal flip).
    val_share: share of an image folder without val/ that is held out, in [0,
      1]. A hash of a file's name decides, so that further images move none.
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
    fake_examples: examples in each split of "fake".
  """

  source: str = "fake"
  path: str = ""
  batch_size: int = 128
  augment: str = "none"
  val_share: float = 0.0
  bad_images: str = "raise"
  eval_resize: int | None = 0
  mean: tuple[float, ...] | None = None
  std: tuple[float, ...] | None = None
  num_threads: int = 4
  prefetch: int = 4
  fake_examples: int = 1024

  def __post_init__(self):
    one_of("data", self, source=SOURCES, augment=AUGMENTATIONS)
    one_of("data", self, bad_images=BAD_IMAGES)
    at_least("data", 1, self, "batch_size", most=MOST_BATCH)
    at_least("data", 1, self, "prefetch", "num_threads", most=MOST_AHEAD)
    at_least("data", 1, self, "fake_examples")
    at_least("data", 0, self, "eval_resize", most=MOST_SIDE)
    in_range("data", -1e6, 1e6, self, "mean", "std")
    in_range("data", 0, 1, self, "val_share")
    if self.source not in ("digits", "fake") and not self.path:
      raise ValueError(
        f"data.path='' must name the directory of data.source={self.source!r}, "
        "with train/ and val/"
      )
    if self.mean is self.std is None:
      return
    if not self.mean or not self.std or len(self.mean) != len(self.std):
      raise ValueError(
        f"data.mean={self.mean} and data.std={self.std} must have one value "
        "per channel each, or both be None"
      )
    if min(self.std) <= 0:
      raise ValueError(f"data.std={self.std} must be above 0")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """AdamW, its schedule and what surrounds it.

  Attributes:
    lr: peak learning rate.
    schedule: learning rate after the warm-up: "cosine" falls from `lr` to
      `final_lr`, "constant" stays.
    warmup_steps: steps of the linear warm-up from `warmup_lr`, which begin the
      run; 0 is none, None a twentieth of `train.steps`, at most 2,000.
    warmup_lr: learning rate of the first step of a warm-up.
    final_lr: learning rate at the end of the cosine.
    b1: decay of AdamW's first moment, in [0, 1).
    b2: decay of AdamW's second moment, in [0, 1).
    eps: added to the root of the second moment.
    weight_decay: decoupled weight decay per step, multiplied by the learning
      rate.
    no_decay: patterns (fnmatch) of parameter paths "a/b/c" that do not decay.
    clip_norm: largest global norm of the gradients, larger ones are scaled
      down; 0 clips nothing.
    ema_decay: decay per step of the averaged parameters, in [0, 1); 0 keeps
      none.
    layer_decay: factor in (0, 1] of the learning rate from a layer to the one
      before it, as fine-tuning wants it: the output has the whole rate, the
      first layers the least. 1 is one rate for all.
    accumulation: microbatches that a step's batch is split into, to save
      memory.
  """

  lr: float = 1e-3
  schedule: str = "cosine"
  warmup_steps: int | None = None
  warmup_lr: float = 0.0
  final_lr: float = 0.0
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.05
  no_decay: tuple[str, ...] = ("*bias", "*scale")
  clip_norm: float = 1.0
  ema_decay: float = 0.0
  layer_decay: float = 1.0
  accumulation: int = 1

  def __post_init__(self):
    one_of("optim", self, schedule=SCHEDULES)
    at_least("optim", 0, self, "lr", "warmup_lr", "final_lr", "eps")
    at_least("optim", 0, self, "weight_decay", "clip_norm", "warmup_steps")
    at_least("optim", 1, self, "accumulation", most=MOST_BATCH)
    for name in ("b1", "b2", "ema_decay"):
      value = getattr(self, name)
      if not 0 <= value < 1:
        raise ValueError(f"optim.{name}={value!r} must be in [0, 1)")

    if not 0 < self.layer_decay <= 1:
      raise ValueError(
        f"optim.layer_decay={self.layer_decay!r} must be in (0, 1]"
      )

  def warmup(self, steps: int) -> int:
    """Steps of the warm-up in a run of so many steps."""
    if self.warmup_steps is not None:
      return self.warmup_steps
    return min(steps // 20, 2000)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """Length and seed of the run, what it starts from, and the balance loss.

  Attributes:
    steps: optimizer steps.
    seed: seed of parameters, data order and every random choice.
    init_from: workdir or output of `convert` whose parameters the run starts
      from, with a fresh optimizer; "" initialises them at random. So is what
      that model lacks, such as a router or the head of new classes; further
      rows of its vocabulary are the
      mean of its own.
    balance_weight: weight of the router's load-balance loss in the loss.
  """

  steps: int = 1000
  seed: int = 0
  init_from: str = ""
  balance_weight: float = 0.01

  def __post_init__(self):
    at_least("train", 1, self, "steps")
    in_range("train", 0, 2**31 - 1, self, "seed")
    at_least("train", 0, self, "balance_weight")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices per mesh axis; at most one axis is -1, "all that are left".

  Attributes:
    data: replicas of the model, each with its share of the batch.
    fsdp: devices that share parameters, optimizer state and the batch.
    tensor: devices that share heads and MLP columns.
    sequence: devices that share the tokens of one example.
    max_imbalance: largest allowed ratio of the active heads that are expected
      on the busiest device of `tensor` to their mean. More is refused: the
      other devices would wait.
  """

  data: int = -1
  fsdp: int = 1
  tensor: int = 1
  sequence: int = 1
  max_imbalance: float = 1.1

  AXES: ClassVar[tuple[str, ...]] = ("data", "fsdp", "tensor", "sequence")

  def __post_init__(self):
    at_least("mesh", 1, self, "max_imbalance")
    sizes = {axis: getattr(self, axis) for axis in self.AXES}
    for name, size in sizes.items():
      if size != -1 and not 1 <= size <= MOST_BATCH:
        raise ValueError(
          f"mesh.{name}={shown(size)} must be -1 or at least 1, and at most "
          f"{MOST_BATCH}"
        )
    if list(sizes.values()).count(-1) > 1:
      raise ValueError(f"mesh={sizes} must have at most one axis of size -1")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When the run is saved and what is kept.

  Attributes:
    every: steps between checkpoints; the last step is always saved.
    keep_last: number of newest checkpoints that are kept.
    keep_every: steps: checkpoints at multiples of this are kept too; itself a
      multiple of `every`, 0 keeps none.
    async_save: whether to write in the background while training goes on.
    on_error: what follows when a checkpoint or metrics cannot be written:
      "stop" ends the run, "continue" warns and tries again at the next one.
  """

  every: int = 1000
  keep_last: int = 2
  keep_every: int = 0
  async_save: bool = True
  on_error: str = "stop"

  def __post_init__(self):
    one_of("checkpoint", self, on_error=("stop", "continue"))
    at_least("checkpoint", 1, self, "every", "keep_last")
    at_least("checkpoint", 0, self, "keep_every")
    if self.keep_every % self.every:
      raise ValueError(
        f"checkpoint.keep_every={self.keep_every} must be a multiple of "
        f"checkpoint.every={self.every}: other steps are not saved"
      )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """Evaluation on the held-out split.

  Attributes:
    every: steps between evaluations; the last step is always evaluated, 0
      evaluates only there.
    batch_size: examples per batch, over all devices.
    examples: examples at most, spread evenly over the split (text: sequences);
      0 takes all.
    use_ema: whether to evaluate the averaged parameters where the run keeps
      them.
  """

  every: int = 1000
  batch_size: int = 128
  examples: int = 0
  use_ema: bool = True

  def __post_init__(self):
    at_least("eval", 0, self, "every", "examples")
    at_least("eval", 1, self, "batch_size", most=MOST_BATCH)


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """What the run writes besides checkpoints.

  Attributes:
    every: steps between records of metrics.
    tensorboard: whether to write tensorboard scalars beside metrics.jsonl.
    progress: whether to show a progress bar.
  """

  every: int = 50
  tensorboard: bool = True
  progress: bool = True

  def __post_init__(self):
    at_least("log", 1, self, "every")
