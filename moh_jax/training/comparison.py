"""Trains the runs of a comparison, one after another; run again, it goes on.

WORKDIR/comparison.json has the config that all runs are variants of, and the
results so far; each run has a working directory of its own beside it.
"""

import json
import logging
import math
import re
from collections.abc import Iterator, Sequence

import jax
import msgspec

from moh_jax.config import Config, differing_fields, to_dict
from moh_jax.config.parse import from_config_dict, upgrade
from moh_jax.models.generation import Decode
from moh_jax.runtime.files import write_whole
from moh_jax.runtime.json_files import parse_json
from moh_jax.runtime.peers import ask_first_process
from moh_jax.training.entrance import check_writable
from moh_jax.training.saving import NonFiniteLossError
from moh_jax.training.train import train
from moh_jax.training.variants import ComparedRun

_LOG = logging.getLogger(__name__)
_FILE = "comparison.json"


class Outcome(msgspec.Struct):
  """How a run of a comparison ended.

  Attributes:
    metrics: of its evaluation after the last step; empty if it has none. None
      stands for one that is infinite or not a number.
    fault: what ended the run early, such as a loss that is not finite; "" if
      nothing did.
  """

  metrics: dict[str, float | None] = {}
  fault: str = ""


class _Stored(msgspec.Struct):
  """The file: the config of `to_dict`, and outcomes by `ComparedRun.name`."""

  config: dict[str, dict]
  outcomes: dict[str, Outcome]


class Comparison:
  """A comparison in its working directory."""

  def __init__(self, config: Config, workdir: str):
    """Opens a comparison, or begins one.

    Args:
      config: the run that the compared ones are variants of.
      workdir: local directory or bucket.

    Raises:
      ValueError: it holds a comparison of another config; the message names
        the fields that differ.
      OSError: it cannot be written.
    """
    self._directory = check_writable(workdir)
    self._file = self._directory / _FILE
    self._config = config
    self.outcomes: dict[str, Outcome] = {}
    ask_first_process(self._read)

  def run(
    self,
    runs: Sequence[ComparedRun],
    decode: Decode | None = None,
    verify: bool = True,
  ) -> bool:
    """Trains and scores the runs that have no outcome yet.

    Args:
      runs: in the order in which they are trained.
      decode: see `train`.
      verify: see `train`.

    Returns:
      Whether all are done; False after a request to stop. Then each has an
      entry in `outcomes`, in the first process.
    """
    done = ask_first_process(
      lambda: [run.name in self.outcomes for run in runs], len(runs)
    )
    for number, (run, is_done) in enumerate(zip(runs, done), start=1):
      if is_done:
        continue
      _LOG.info("run %d of %d: %s", number, len(runs), run.name)
      outcome = self._train(run, decode, verify)
      if outcome is None:
        return False
      self.outcomes[run.name] = outcome
      ask_first_process(self._write)
      jax.clear_caches()  # of programs that no other run uses
    return True

  def _train(
    self, run: ComparedRun, decode: Decode | None, verify: bool
  ) -> Outcome | None:
    workdir = self._directory / run.name
    try:
      result = train(run.config, workdir, decode=decode, verify=verify)
    except NonFiniteLossError as error:
      _LOG.warning("%s: %s", run.name, error)
      return Outcome(fault=str(error))
    if not result.finished:
      return None
    found = result.evaluation
    numbers = {n: float(x) for n, x in found.items() if x is not None}
    finite = {n: x if math.isfinite(x) else None for n, x in numbers.items()}
    return Outcome(metrics=finite)

  def _read(self) -> None:
    if not self._file.exists():
      self._write()
      return
    content = self._file.read_bytes()
    # Earlier versions wrote numbers that JSON cannot hold, at ends of lines.
    content = re.sub(rb": (NaN|-?Infinity)(?=,?\n)", b": null", content)
    stored = parse_json(content, _Stored, str(self._file))
    before = from_config_dict(upgrade(stored["config"]))
    if lines := list(self._differences(before)):
      raise ValueError(
        f"{self._file} compares variants of another config, take another "
        f"--workdir ({'; '.join(lines)})"
      )
    for name, outcome in stored["outcomes"].items():
      self.outcomes[name] = Outcome(**outcome)

  def _differences(self, stored: Config) -> Iterator[str]:
    ours, theirs = self._config.by_name(), stored.by_name()
    for name in sorted({*ours, *theirs}):
      if name not in ours or name not in theirs:
        yield f"only one of them has the section {name}"
      else:
        yield from differing_fields(ours[name], theirs[name], name)

  def _write(self) -> None:
    outcomes = msgspec.to_builtins(self.outcomes)
    content = {"config": to_dict(self._config), "outcomes": outcomes}
    write_whole(self._file, f"{json.dumps(content, indent=2)}\n".encode())
