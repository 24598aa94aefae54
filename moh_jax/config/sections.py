"""Config sections that every family shares."""

import dataclasses
from typing import ClassVar

from moh_jax.config.checks import (
  DTYPES,
  MOST_BATCH,
  at_least,
  in_range,
  one_of,
  shown,
)

SCHEDULES = ("cosine", "constant", "wsd")
STATE_MEMORIES = ("device", "host")
DECAYS = ("linear", "cosine", "sqrt")
OPTIMIZERS = ("adamw", "adafactor", "lion", "muon")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """The optimizer, its schedule and what surrounds it.

  Attributes:
    name: the optimizer: "adamw" (arXiv:1711.05101), "adafactor"
      (arXiv:1804.04235, with absolute learning rates as in arXiv:2106.04560),
      "lion" (arXiv:2302.06675), or "muon" (arXiv:2502.16982) for the matrices
      of attention and MLPs with AdamW for other parameters. Updates of
      "adafactor" and "muon" are as large as AdamW's, so its learning rates
      serve them; Lion's are larger and want a third to a tenth of them.
    lr: peak learning rate.
    schedule: learning rate after the warm-up: "cosine" falls from `lr` to
      `final_lr`, "constant" stays, "wsd" stays and falls in the last
      `decay_steps` (arXiv:2405.18392). A run of "wsd" can be made longer from
      any checkpoint before its fall.
    warmup_steps: steps of the linear warm-up from `warmup_lr`, which begin the
      run; 0 is none, None a twentieth of `train.steps`, at most 2,000.
    warmup_lr: learning rate of the first step of a warm-up.
    final_lr: learning rate at the end of "cosine" and "wsd".
    decay_steps: steps of the fall of "wsd"; None is a fifth of `train.steps`.
    decay_form: how "wsd" falls: "linear", "cosine", or "sqrt", as 1 minus the
      root of the share of the fall that is done.
    b1: decay of the first moment, in [0, 1). With 0 "adafactor" keeps none;
      "lion" weights its moment against the gradient by it.
    b2: decay of the second moment, in [0, 1), for "adafactor" its limit; "lion"
      has none, and its only moment decays by this, usually 0.99.
    eps: added to the root of the second moment by AdamW.
    moment_dtype: dtype of the first moment, "float32" or "bfloat16". The second
      moment is float32: it changes by less than bfloat16 resolves.
    state_memory: where the optimizer's state lies between steps: on the
      "device", or in the memory of its "host", which takes the time of two
      copies in every step.
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
    ema_every: steps between updates of the averaged parameters, each of which
      decays them as so many steps.
    ema_dtype: dtype of the averaged parameters, "float32" or "bfloat16". The
      latter has 8 bits: an update that changes a value by less than 1/512 is
      lost, so `ema_decay` to the power of `ema_every` should be far from 1.
    accumulation: microbatches that a step's batch is split into, to save
      memory.
  """

  name: str = "adamw"
  lr: float = 1e-3
  schedule: str = "cosine"
  warmup_steps: int | None = None
  warmup_lr: float = 0.0
  final_lr: float = 0.0
  decay_steps: int | None = None
  decay_form: str = "linear"
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  moment_dtype: str = "float32"
  state_memory: str = "device"
  weight_decay: float = 0.05
  no_decay: tuple[str, ...] = ("*bias", "*scale")
  clip_norm: float = 1.0
  ema_decay: float = 0.0
  layer_decay: float = 1.0
  ema_every: int = 1
  ema_dtype: str = "float32"
  accumulation: int = 1

  def __post_init__(self):
    one_of("optim", self, name=OPTIMIZERS, schedule=SCHEDULES)
    one_of("optim", self, decay_form=DECAYS, state_memory=STATE_MEMORIES)
    one_of("optim", self, moment_dtype=DTYPES, ema_dtype=DTYPES)
    at_least("optim", 0, self, "lr", "warmup_lr", "final_lr", "eps")
    at_least("optim", 0, self, "weight_decay", "clip_norm", "warmup_steps")
    at_least("optim", 0, self, "decay_steps")
    at_least("optim", 1, self, "accumulation", most=MOST_BATCH)
    at_least("optim", 1, self, "ema_every")
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

  def decay(self, steps: int) -> int:
    """Steps in which a run of so many steps ends: the fall of "wsd"."""
    if self.schedule != "wsd":
      return 0
    return steps // 5 if self.decay_steps is None else self.decay_steps


@dataclasses.dataclass(frozen=True)
class RewindConfig:
  """What a run does when its loss is NaN or a spike.

  It goes back to a checkpoint, skips all batches from there to the bad step,
  and goes on.

  Attributes:
    steps: steps to go back at least, or to the oldest checkpoint that is kept
      (without any, to the beginning); 0 ends the run instead.
    limit: times that a run goes back; then it ends.
    spike: loss above this many times its mean over some 50 steps before is as
      bad as NaN; 0 sees NaN and infinite values alone. At least 1.
  """

  steps: int = 0
  limit: int = 3
  spike: float = 0.0

  def __post_init__(self):
    at_least("rewind", 0, self, "steps", "spike")
    at_least("rewind", 1, self, "limit")
    if 0 < self.spike < 1:
      raise ValueError(f"rewind.spike={self.spike} must be 0 or at least 1")
    if self.spike and not self.steps:
      raise ValueError(
        f"rewind.spike={self.spike} must be 0 where rewind.steps=0"
      )


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
    rewind: what the run does when its loss is NaN or a spike.
    compilation_cache: folder or bucket that keeps compiled programs, so that a
      run that is started again does not compile; "" keeps none.
  """

  steps: int = 1000
  seed: int = 0
  init_from: str = ""
  balance_weight: float = 0.01
  rewind: RewindConfig = RewindConfig()
  compilation_cache: str = ""

  def __post_init__(self):
    at_least("train", 1, self, "steps")
    in_range("train", 0, 2**31 - 1, self, "seed")
    at_least("train", 0, self, "balance_weight")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices per mesh axis; at most one axis is -1, "all that are left".

  Attributes:
    data: replicas of the model, each with its share of the batch. With several
      slices, those in one slice.
    fsdp: devices that share parameters, optimizer state and the batch.
    tensor: devices that share heads and MLP columns.
    sequence: devices that share the tokens of one example.
    dcn_data: slices of the devices, such as TPU pods that a data center's
      network joins. Each holds `data` replicas, so that only gradients cross
      between slices.
    max_imbalance: largest allowed ratio of the active heads that are expected
      on the busiest device of `tensor` to their mean. More is refused: the
      other devices would wait.
    max_whole: bytes of parameters that may be whole on every device although
      `fsdp` or `tensor` is above 1, since no axis divides a dimension of them.
      More are refused.
  """

  data: int = -1
  fsdp: int = 1
  tensor: int = 1
  sequence: int = 1
  dcn_data: int = 1
  max_imbalance: float = 1.1
  max_whole: int = 1 << 30

  AXES: ClassVar[tuple[str, ...]] = ("data", "fsdp", "tensor", "sequence")

  def __post_init__(self):
    at_least("mesh", 1, self, "dcn_data", "max_imbalance")
    at_least("mesh", 0, self, "max_whole")
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
