"""The config of a whole run, and the sections that all families share."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from moh_jax.config import base
from moh_jax.config.registry import get_family, get_source, imported
from moh_jax.config.tune import TuneConfig

Fields = dict[str, dict[str, Any]]  # by section
_Axis = Annotated[int, base.Range(-1)]


@dataclasses.dataclass(frozen=True)
class OptimConfig(base.Section):
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
      `final_lr`, "constant" stays, "wsd" stays and falls evenly in the last
      `decay_steps` (arXiv:2405.18392). A run of "wsd" can be made longer from
      any checkpoint before its fall.
    warmup_steps: steps of the linear warm-up from `warmup_lr`, which begin the
      run; 0 is none, None `warmup_share` of `train.steps`, at most 2,000.
    warmup_share: of the run, where `warmup_steps` is None.
    warmup_lr: learning rate of the first step of a warm-up.
    final_lr: learning rate at the end of "cosine" and "wsd".
    decay_steps: steps of the fall of "wsd"; None is a fifth of `train.steps`.
    b1: decay of the first moment, in [0, 1). With 0 "adafactor" keeps none;
      "lion" weights its moment against the gradient by it.
    b2: decay of the second moment, in [0, 1), for "adafactor" its limit; "lion"
      has none, and its only moment decays by this, usually 0.99.
    eps: added to the root of the second moment by AdamW.
    moment_dtype: dtype of the first moment, "float32" or "bfloat16". The second
      moment is float32: it changes by less than bfloat16 resolves.
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
    skip_nonfinite: steps in a row whose gradients may be NaN or infinite: they
      change nothing, and the schedule waits. 0 ends the run at the first one.
    accumulation: microbatches that a step's batch is split into, to save
      memory.
  """

  NAME = "optim"

  name: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
  lr: base.Amount = 1e-3
  schedule: Literal["cosine", "constant", "wsd"] = "cosine"
  warmup_steps: base.Natural | None = None
  warmup_share: base.Share = 0.05
  warmup_lr: base.Amount = 0.0
  final_lr: base.Amount = 0.0
  decay_steps: base.Natural | None = None
  b1: base.Decay = 0.9
  b2: base.Decay = 0.999
  eps: base.Amount = 1e-8
  moment_dtype: base.Dtype = "float32"
  weight_decay: base.Amount = 0.05
  no_decay: tuple[str, ...] = ("*bias", "*scale")
  clip_norm: base.Amount = 1.0
  ema_decay: base.Decay = 0.0
  layer_decay: Annotated[float, base.Range(0, 1, "(]")] = 1.0
  skip_nonfinite: base.Natural = 0
  accumulation: base.Count = 1

  def warmup(self, steps: int) -> int:
    """Steps of the warm-up in a run of so many steps."""
    if self.warmup_steps is not None:
      return self.warmup_steps
    return min(int(steps * self.warmup_share), 2000)

  def decay(self, steps: int) -> int:
    """Steps at the end in which the rate falls, for "wsd"; else 0."""
    if self.schedule != "wsd":
      return 0
    return steps // 5 if self.decay_steps is None else self.decay_steps


@dataclasses.dataclass(frozen=True)
class TrainConfig(base.Section):
  """Length and seed of the run, what it starts from, and the balance loss.

  Attributes:
    steps: optimizer steps.
    epochs: passes over the training examples in place of `steps`, which follow
      from it; 0 leaves `steps` as it is.
    seed: seed of parameters, data order and every random choice.
    init_from: workdir or output of `convert` whose parameters the run starts
      from, with a fresh optimizer; "" initialises all at random. What that
      model lacks, such as a router or the head of new classes, is initialised
      at random too; further rows of its vocabulary are the mean of its own.
    balance_weight: weight of the router's load-balance loss in the loss.
    compilation_cache: folder or bucket that keeps compiled programs, so that a
      run that is started again does not compile; "" keeps none.
  """

  NAME = "train"

  steps: base.Count = 1000
  epochs: base.Amount = 0.0
  seed: Annotated[int, base.Range(0, 2**31 - 1)] = 0
  init_from: str = ""
  balance_weight: base.Amount = 0.01
  compilation_cache: str = ""


@dataclasses.dataclass(frozen=True)
class MeshConfig(base.Section):
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
    gather: how often the axis `fsdp` gathers parameters. "microbatch": a layer
      at a time, in every microbatch, and gradients are reduced as often.
      "step": all of them once, and gradients once too, for which each device
      holds both whole, in float32.
    exchange: dtype in which gradients are sent once a step, over `data` and,
      with gather="step", `fsdp`; they are added up over microbatches in
      float32.
  """

  NAME = "mesh"
  AXES = ("data", "fsdp", "tensor", "sequence")

  data: _Axis = -1
  fsdp: _Axis = 1
  tensor: _Axis = 1
  sequence: _Axis = 1
  dcn_data: base.Count = 1
  gather: Literal["microbatch", "step"] = "microbatch"
  exchange: base.Dtype = "float32"

  def check(self) -> None:
    """Sizes are -1 or those of axes; one axis at most takes what is left."""
    sizes = {axis: getattr(self, axis) for axis in self.AXES}
    for name, size in sizes.items():
      if size == 0:
        self.fail(name, "must be -1 or at least 1")
    if list(sizes.values()).count(-1) > 1:
      raise ValueError(f"mesh={sizes} must have at most one axis of size -1")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(base.Section):
  """When the run is saved and what is kept.

  Attributes:
    every: steps between checkpoints; the last step is always saved. None is a
      tenth of `train.steps`, from 20 to 1,000.
    keep_last: number of newest checkpoints that are kept.
    keep_every: steps: checkpoints at multiples of this are kept too; itself a
      multiple of `every`, 0 keeps none.
  """

  NAME = "checkpoint"

  every: base.Count | None = None
  keep_last: base.Count = 2
  keep_every: base.Natural = 0

  def check(self) -> None:
    """Only checkpoints that are written can be kept."""
    if self.keep_every and not self.every:
      self.fail("keep_every", "needs checkpoint.every too")
    if self.every and self.keep_every % self.every:
      whole = f"must be a multiple of checkpoint.every={self.every}"
      self.fail("keep_every", whole)


@dataclasses.dataclass(frozen=True)
class EvalConfig(base.Section):
  """Evaluation on the held-out split.

  Attributes:
    every: steps between evaluations; the last step is always evaluated, 0
      evaluates only there, None is a fifth of `train.steps`, from 20 to
      1,000.
    batch_size: examples per batch, over all devices.
    examples: examples at most, spread evenly over the split (text: sequences);
      0 takes all.
    use_ema: whether to evaluate the averaged parameters where the run keeps
      them.
  """

  NAME = "eval"

  every: base.Natural | None = None
  batch_size: base.Count = 128
  examples: base.Natural = 0
  use_ema: bool = True


@dataclasses.dataclass(frozen=True)
class LogConfig(base.Section):
  """What the run writes besides checkpoints.

  Attributes:
    every: steps between records of metrics; None is a 25th of `train.steps`,
      from 1 to 50.
    tensorboard: whether to write tensorboard scalars beside metrics.jsonl.
    profile: (A, B) traces steps A to B - 1 into WORKDIR/profile, for XProf;
      None traces none.
    wandb: project of Weights & Biases that gets the metrics too (the extra
      `wandb`); "" is none.
    heads: steps between records of the load of every head, a row of the split
      "heads" in metrics.jsonl; None is a 10th of `train.steps`, from 1 to 100,
      and 0 records none.
  """

  NAME = "log"

  every: base.Count | None = None
  tensorboard: bool = True
  profile: tuple[base.Count, base.Count] | None = None
  wandb: str = ""
  heads: base.Natural | None = None

  def check(self) -> None:
    """There are steps to trace."""
    if self.profile and self.profile[0] >= self.profile[1]:
      self.fail("profile", "must be (A, B) with A < B")


def section_types(family: str, names: Iterable[str] = ()) -> dict[str, type]:
  """The dataclass of every section of a family's configs, by name.

  Args:
    family: its name.
    names: sections that must be among them.

  Raises:
    ValueError: the family is none, or has not such a section; the message names
      the first of them, and those there are.
  """
  model = imported(get_family(family).model)
  known = {"model": model, "data": model.DATA, **_SHARED, **model.SECTIONS}
  if unknown := sorted(set(names) - set(known)):
    raise ValueError(
      f"unknown config section {unknown[0]!r} for model.family={family!r}"
      f"{base.near(unknown[0], known)}; known: {list(known)}"
    )
  return known


@dataclasses.dataclass(frozen=True, init=False)
class Config:
  """A whole run.

  The sections that only some families have, such as `diffusion` and `sample`
  of diffusion models, are arguments and attributes like the others:
  `Config(model, diffusion=DiffusionConfig(steps=500)).diffusion.steps` is 500.
  Code that serves several families asks `"diffusion" in config.sections`.

  Attributes:
    model: the network; its `family` says which other sections there are.
    data: where examples come from.
    optim: the optimizer and its schedule.
    train: length, seed and losses.
    tune: how a trained model is tuned.
    mesh: devices.
    checkpoint: when the run is saved.
    eval: evaluation on the held-out split.
    log: what is written besides checkpoints.
    sections: by name, the sections that not all families have.
  """

  model: Any
  data: Any
  optim: OptimConfig
  train: TrainConfig
  tune: TuneConfig
  mesh: MeshConfig
  checkpoint: CheckpointConfig
  eval: EvalConfig
  log: LogConfig
  sections: Mapping[str, Any] = dataclasses.field(hash=False)

  def __init__(self, model: Any, *, sections: Any = None, **others: Any):
    """Completes and checks a run.

    Args:
      model: the section of the network.
      sections: those of the family, as the attribute; `dataclasses.replace`
        passes it on.
      **others: any section by its name, before those of `sections`. What is
        left out takes its defaults.

    Raises:
      ValueError: a section that the family does not have or of a wrong type,
        or sections that do not fit together.
    """
    given = {"model": model, **(sections or {}), **others}
    types = section_types(model.family, given)
    for name, section in given.items():
      if not isinstance(section, types[name]):
        raise ValueError(
          f"config section {name!r} must be a {types[name].__name__} for "
          f"model.family={model.family!r}, not a {type(section).__name__}"
        )
    every = {n: given[n] if n in given else cls() for n, cls in types.items()}
    own = {name: every.pop(name) for name in model.SECTIONS}
    for name, value in {**every, "sections": own}.items():
      object.__setattr__(self, name, value)
    self._check()

  def __getattr__(self, name: str) -> Any:
    """A section that not all families have."""
    sections = self.__dict__.get("sections", {})
    if name not in sections:
      known = f"{sorted(self.__dict__)} and {sorted(sections)}"
      raise AttributeError(f"the config has no section {name!r}, only {known}")
    return sections[name]

  @property
  def prefers(self) -> bool:
    """Whether the data are pairs of answers."""
    return get_source(self.data).pairs

  def _check(self) -> None:
    self.model.check_run(self)
    family = f"model.family={self.model.family!r}"
    if self.tune.top_k_values and not self.model.READS_TEXT:
      self.tune.fail("top_k_values", f"must be () for {family}")
    weight = self.tune.distill.weight
    if weight and (self.prefers or not self.model.READS_TEXT):
      raise ValueError(
        f"tune.distill.weight={weight} must be 0 for {family} with "
        f"data.source={self.data.source!r}"
      )
    optim = self.optim
    # The steps of a run of `epochs` are known once its examples are counted.
    steps = 2**31 if self.train.epochs else self.train.steps
    warmup, decay = optim.warmup(steps), optim.decay(steps)
    if warmup > steps:
      optim.fail("warmup_steps", f"must be at most train.steps={steps}")
    if warmup + decay > steps:
      raise ValueError(
        f"optim.decay_steps={decay} must be at most train.steps={steps} less "
        f"the {warmup} steps of the warm-up"
      )

  def scheduled(self) -> "Config":
    """The run with the steps that it leaves to its length."""
    steps, tune, found = self.train.steps, self.tune, {}
    warmup = self.optim.warmup(steps)
    found["optim"] = dataclasses.replace(self.optim, warmup_steps=warmup)
    for key, (parts, least, most) in _INTERVALS.items():
      name, _, field = key.partition(".")
      section = found.get(name, self.by_name().get(name))
      if getattr(section, field, 0) is None:
        every = min(max(steps // parts, least), most)
        found[name] = dataclasses.replace(section, **{field: every})
    if (values := tune.top_k_values) and not tune.top_k_steps:
      gaps = 3 * max(len(values) - 1, 1)
      # In a run of a few steps later values take the place of earlier ones.
      kept = {i * steps // gaps: value for i, value in enumerate(values)}
      found["tune"] = dataclasses.replace(
        tune, top_k_steps=tuple(kept), top_k_values=tuple(kept.values())
      )
    return dataclasses.replace(self, **found)

  def served(self) -> "Config":
    """The run to serve its model with: what only trains has its defaults."""
    return dataclasses.replace(self, tune=TuneConfig())

  def by_name(self) -> dict[str, Any]:
    """Every section of the run, by its name."""
    shared = {name: getattr(self, name) for name in ("model", "data", *_SHARED)}
    return {**shared, **self.sections}


# Of intervals that may be None: the parts of a run, the least and the most
# steps.
_INTERVALS = {
  "checkpoint.every": (10, 20, 1000),
  "eval.every": (5, 20, 1000),
  "sample.every": (5, 20, 1000),
  "log.every": (25, 1, 50),
  "log.heads": (10, 1, 100),
}
# The sections that are the same in all families: the fields of `Config` that
# name a class.
_SHARED = {
  name: kind
  for name, kind in Config.__annotations__.items()
  if dataclasses.is_dataclass(kind)
}
