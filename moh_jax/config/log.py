"""Config section of what a run writes of itself."""

import dataclasses

from moh_jax.config.checks import at_least, in_range, shown


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """What the run writes besides checkpoints.

  Attributes:
    every: steps between records of metrics.
    tensorboard: whether to write tensorboard scalars beside metrics.jsonl.
    progress: whether to show a progress bar.
    profile: "A:B" traces steps A to B - 1 into WORKDIR/profile, for XProf; ""
      traces none.
    wandb: project of Weights & Biases that gets the metrics too (the extra
      `wandb`); "" is none.
    heads: steps between records of the load of every head: a row of the split
      "heads" in metrics.jsonl, and a picture of each layer in tensorboard and
      wandb; 0 records none.
    collapse_entropy: a router whose load has a smaller entropy has collapsed,
      which is said in the log; 0 says nothing. The entropy is 0 where all
      tokens select the same heads, 1 where all heads are selected as often.
  """

  every: int = 50
  tensorboard: bool = True
  progress: bool = True
  profile: str = ""
  wandb: str = ""
  heads: int = 100
  collapse_entropy: float = 0.1

  def __post_init__(self):
    at_least("log", 1, self, "every")
    at_least("log", 0, self, "heads")
    in_range("log", 0, 1, self, "collapse_entropy")
    _ = self.profiled_steps

  @property
  def profiled_steps(self) -> tuple[int, int] | None:
    """The first step that is traced and the one after the last."""
    if not self.profile:
      return None
    first, _, end = self.profile.partition(":")
    numbers = [x for x in (first, end) if x.isdecimal() and len(x) <= 10]
    if len(numbers) < 2 or not 1 <= int(first) < int(end):
      raise ValueError(
        f"log.profile={shown(self.profile)} must be '' or 'A:B' with steps "
        "1 <= A < B, such as '100:105'"
      )
    return int(first), int(end)
