"""Trains the runs of a comparison, one after another; run again, it goes on.

WORKDIR/comparison.json has the config that all runs are variants of, and the
results so far; each run has a working directory of its own beside it.
"""

import json
import logging
import math
import re
from collections.abc import Sequence

import jax
import msgspec
from etils import epath

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


def compare(
  config: Config,
  runs: Sequence[ComparedRun],
  workdir: str,
  decode: Decode | None = None,
  verify: bool = True,
) -> dict[str, Outcome] | None:
  """Trains and scores the runs that have no outcome in the directory yet.

  Args:
    config: the run that the compared ones are variants of.
    runs: in the order in which they are trained.
    workdir: local directory or bucket of the comparison.
    decode: see `train`.
    verify: see `train`.

  Returns:
    Outcomes by `ComparedRun.name`, in the first process; None after a request
    to stop.

  Raises:
    ValueError: the directory holds a comparison of another config; the message
      names the fields that differ.
    OSError: it cannot be written.
  """
  directory, outcomes = check_writable(workdir), dict[str, Outcome]()
  file = directory / _FILE

  def read() -> list[bool]:
    if file.exists():
      outcomes.update(_read(file, config))
    write()
    return [run.name in outcomes for run in runs]

  def write() -> None:
    known = msgspec.to_builtins(outcomes)
    content = {"config": to_dict(config), "outcomes": known}
    write_whole(file, f"{json.dumps(content, indent=2)}\n".encode())

  done = ask_first_process(read, len(runs))
  for number, (run, is_done) in enumerate(zip(runs, done), start=1):
    if is_done:
      continue
    _LOG.info("run %d of %d: %s", number, len(runs), run.name)
    try:
      result = train(
        run.config, directory / run.name, decode=decode, verify=verify
      )
    except NonFiniteLossError as error:
      _LOG.warning("%s: %s", run.name, error)
      outcomes[run.name] = Outcome(fault=str(error))
    else:
      if not result.finished:
        return None
      found = result.evaluation
      numbers = {n: float(x) for n, x in found.items() if x is not None}
      outcomes[run.name] = Outcome(
        {n: x if math.isfinite(x) else None for n, x in numbers.items()}
      )
    ask_first_process(write)
    jax.clear_caches()  # of programs that no other run uses
  return outcomes


def _read(file: epath.Path, config: Config) -> dict[str, Outcome]:
  """The outcomes of an earlier call, which had the same config."""
  # Earlier versions wrote numbers that JSON cannot hold, at ends of lines.
  content = re.sub(rb": (NaN|-?Infinity)(?=,?\n)", b": null", file.read_bytes())
  stored = parse_json(content, _Stored, str(file))
  ours = config.by_name()
  theirs = from_config_dict(upgrade(stored["config"])).by_name()
  lines = []
  for name in sorted({*ours, *theirs}):
    if name in ours and name in theirs:
      lines += differing_fields(ours[name], theirs[name], name)
    else:
      lines.append(f"only one of them has the section {name}")
  if lines:
    raise ValueError(
      f"{file} compares variants of another config, take another --workdir "
      f"({'; '.join(lines)})"
    )
  return {name: Outcome(**one) for name, one in stored["outcomes"].items()}
