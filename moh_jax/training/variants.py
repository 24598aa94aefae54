"""Compares variants of a run: other shares of active heads, and ablations.

WORKDIR/comparison.json has the config that all runs are variants of, and the
results so far; each run has a working directory of its own beside it.
"""

import dataclasses
import hashlib
import json
import logging
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import msgspec
from etils import epath

from moh_jax.config import Config, differing_fields, to_dict, without_router
from moh_jax.config.base import split_items
from moh_jax.config.heads import Units
from moh_jax.config.parse import from_config_dict, override, upgrade
from moh_jax.models.generation import Decode
from moh_jax.runtime import steps
from moh_jax.runtime.files import read_bytes, write_whole
from moh_jax.runtime.json_files import MAX_BYTES, json_checksum, parse_json
from moh_jax.runtime.processes import ask_first_process
from moh_jax.training.saving import NonFiniteLossError
from moh_jax.training.train import train

_LOG = logging.getLogger(__name__)
_FILE = "comparison.json"
_NAME = re.compile(
  r"mha((?P<kept>\d{1,3})(?P<wide>-wide)?)?|gate|"
  r"(config|moh(?P<active>\d{1,3}))(?P<onestage>-onestage)?"
  r"(-shared(?P<shared>\d{1,3}))?"
)


def make_variant(config: Config, name: str) -> Config:
  """The same run with another router or other budgets of heads.

  Layers that route no heads in `config` are left as they are. The others get
  the nearest numbers of heads that the structure of their choice allows, some
  of them routed, and keep the share of shared heads among the active ones
  unless the name says otherwise.

  Args:
    config: the run.
    name: "config" (the run itself), "mha" (multi-head attention), "gate" (every
      head, weighed by a sigmoid), "mhaNN" (a smaller network: multi-head
      attention that has NN % of the query heads, arXiv:2510.01817, and
      "mhaNN-wide" with an MLP that is wider by as many parameters) or "mohNN"
      (NN % of the heads active). After "config" and "mohNN": "-onestage" (both
      groups of heads weigh the same) and "-sharedNN" (NN % of the active heads
      are shared), the ablations and the sweep of the paper's Tables 5 and 7;
      "-shared0" has no shared heads.

  Raises:
    ValueError: there is no such variant of this run.
  """
  found = _NAME.fullmatch(name)
  if not found:
    raise ValueError(
      f"variant {name!r} must be config, mha, gate, mhaNN or mhaNN-wide (NN % "
      "of the heads present) or mohNN (NN % active), the first and the last "
      "also with -onestage or -sharedNN"
    )
  model = config.model
  active, shared, kept = found["active"], found["shared"], found["kept"]
  for percent in (active, kept):
    if percent and not 1 <= int(percent) <= 100:
      raise ValueError(f"variant {name!r}: {percent} % must be from 1 to 100")
  if name == "mha":
    return without_router(model).in_run(config)
  if name == "gate":
    gate = dataclasses.replace(model.router, kind="gate")
    return dataclasses.replace(model, router=gate).in_run(config)
  if not kept and name != "config" and not model.router.selects:
    raise ValueError(
      f"variant {name!r} needs a config that routes heads, and "
      f"model.router.kind is {model.router.kind!r}"
    )
  if found["onestage"]:
    if model.router.kind != "two_stage":
      raise ValueError(
        f"variant {name!r} needs model.router.kind='two_stage', not "
        f"{model.router.kind!r}"
      )
    router = dataclasses.replace(model.router, two_stage=False)
    model = dataclasses.replace(model, router=router)
  if shared and int(shared) > 99:
    raise ValueError(f"variant {name!r}: {shared} % must be from 0 to 99")
  try:
    if kept:
      wide = bool(found["wide"])
      model = without_router(_with_fewer_heads(model, _part(kept), wide))
    elif active or shared:
      model = _with_budgets(model, _part(active), _part(shared))
    return model.in_run(config)
  except ValueError as error:
    raise ValueError(f"variant {name!r}: {error}") from error


def _part(percent: str | None) -> Fraction | None:
  # Not a float: 58 % of 25 heads would be a little less than 14.5.
  return None if percent is None else Fraction(int(percent), 100)


def _with_budgets(
  model: Any, active: Fraction | None, shared: Fraction | None
) -> Any:
  """A model whose routed layers have other budgets.

  Args:
    model: the section, with one value for each layer or stage.
    active: share of the heads that are active; None keeps the layer's.
    shared: share of those that are shared; None keeps the layer's.
  """
  if not hasattr(model, "shared_heads"):
    raise ValueError(
      f"model.family={model.family!r} has no num_heads, shared_heads and top_k "
      "for each layer"
    )
  splits = []
  for budget in model.budgets():
    if not budget.top_k:
      splits.append((budget.shared, 0))
      continue
    step = Units.of(budget, model.router, model.num_kv_heads).step
    count = budget.active // step
    if active is not None:
      count = max(1, _nearest(active * (budget.num_heads // step)))
    share = Fraction(budget.shared, budget.active) if shared is None else shared
    fixed = min(count - 1, _nearest(share * count))
    splits.append((fixed * step, (count - fixed) * step))
  shared_heads, top_k = zip(*splits)
  return dataclasses.replace(model, shared_heads=shared_heads, top_k=top_k)


def _with_fewer_heads(model: Any, share: Fraction, widens: bool) -> Any:
  """A model with a share of the query heads of every layer.

  Of key/value heads it has the most, up to those of the model, that divide the
  query heads of all layers.

  Args:
    model: the section; its heads have a width of their own.
    share: of the heads.
    widens: whether the MLP gets as many parameters as attention loses.
  """
  if not hasattr(model, "with_mlp_dim"):
    raise ValueError(
      f"model.family={model.family!r} has no head_dim: fewer heads of a layer "
      "would be wider ones"
    )
  heads = tuple(max(1, _nearest(share * n)) for n in model.num_heads)
  lost = sum(model.num_heads) - sum(heads)
  changes, kv_lost = {"num_heads": heads, "shared_heads": heads}, lost
  if old := model.num_kv_heads:
    kv_heads = max(
      n for n in range(1, old + 1) if all(x % n == 0 for x in heads)
    )
    kv_lost = (old - kv_heads) * model.depth
    changes |= {"num_kv_heads": kv_heads, "head_order": ()}
  smaller = dataclasses.replace(
    model,
    router=dataclasses.replace(model.router, structure="free"),
    top_k=(0,) * model.depth,
    **changes,
  )
  if not widens:
    return smaller
  columns = Fraction(2 * (lost + kv_lost) * model.head_dim, model.depth)
  wider = _nearest(columns / model.MLP_MATRICES)
  return smaller.with_mlp_dim(model.mlp_dim + wider)


def _nearest(x: Fraction) -> int:
  """The nearest whole number; of two, the larger one."""
  return math.floor(x + Fraction(1, 2))


@dataclasses.dataclass(frozen=True)
class ComparedRun:
  """One run of a comparison.

  Attributes:
    variant: name of `make_variant`.
    setting: override of the config that the comparison sweeps, such as
      "optim.lr=0.002"; "" for none.
    seed: of the run, `train.seed`.
    config: the run itself.
  """

  variant: str
  setting: str
  seed: int
  config: Config

  @property
  def row(self) -> str:
    """What runs with other seeds have in common: variant and setting."""
    return f"{self.variant} {self.setting}".rstrip()

  @property
  def name(self) -> str:
    """A name that no other run of the comparison has, and a folder can have."""
    parts = self.variant, _file_part(self.setting), f"seed{self.seed}"
    return "-".join(filter(None, parts))


def compared_runs(
  config: Config, variants: Sequence[str], sweep: str, seeds: int
) -> list[ComparedRun]:
  """The runs of a comparison, every variant with every setting and seed.

  Settings that are the same for a variant are one, which has no name where the
  sweep changes nothing of the variant: multi-head attention has no top_k.

  Args:
    config: the run that they are variants of.
    variants: names for `make_variant`, each once.
    sweep: "SECTION.FIELD=VALUE,VALUE,..." to run the variants of the config
      with each value, such as "model.top_k=(0,1),(0,2)"; "" for none.
    seeds: number of seeds, from the config's `train.seed` on.

  Returns:
    The runs, all of one seed before those of the next.

  Raises:
    ValueError: a variant or a value does not fit or is named twice, or the
      values make no difference.
  """
  key, equals, values = sweep.partition("=")
  if sweep and not (key and equals and values):
    raise ValueError(f"--sweep {sweep!r} must be SECTION.FIELD=VALUE,VALUE,...")
  if key == "train.seed":
    raise ValueError(f"--sweep {sweep!r}: the seeds are those of --seeds")
  settings = [f"{key}={value}" for value in split_items(values)] or [""]
  for option, given in (("variants", variants), ("sweep", settings)):
    if twice := [name for name in given if given.count(name) > 1]:
      raise ValueError(f"--{option}: {twice[0]!r} is named twice")
  swept = {
    setting: from_config_dict(override(to_dict(config), [setting] * bool(key)))
    for setting in settings
  }
  rows = []
  for variant in variants:
    found = {}
    for setting, made in swept.items():
      run = make_variant(made, variant)
      found.setdefault(_decisive(run), (variant, setting, run))
    if len(found) == 1 < len(swept):
      plain = make_variant(config, variant)
      if _decisive(plain) in found:
        found = {"": (variant, "", plain)}
    rows += found.values()
  # Spellings of one value are one setting; other values are to differ.
  if len(rows) == len(variants) and len(set(map(repr, swept.values()))) > 1:
    raise ValueError(f"--sweep {sweep!r} changes nothing that is compared")
  return [
    ComparedRun(
      *(variant, setting, seed),
      dataclasses.replace(run, train=dataclasses.replace(run.train, seed=seed)),
    )
    for seed in range(config.train.seed, config.train.seed + seeds)
    for variant, setting, run in rows
  ]


def _decisive(config: Config) -> str:
  """What a run's results depend on beside the seed, as text."""
  sections = to_dict(config)
  del sections["log"]
  sections["train"] |= {"seed": 0, "compilation_cache": ""}
  if not config.model.router.selects:
    for name in ("shared_heads", "top_k", "head_order"):
      sections["model"].pop(name, None)
    sections["model"]["router"] = config.model.router.kind
    del sections["train"]["balance_weight"]
  return repr(sections)


def _file_part(text: str) -> str:
  """Text for the name of a file; a hash stands for what a name cannot hold."""
  safe = re.sub(r"[^A-Za-z0-9_.=+,-]", "_", text)[:80]
  digest = hashlib.sha256(ascii(text).encode()).hexdigest()[:8]
  return safe if safe == text else f"{safe}-{digest}"


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
  checksum: str  # of the two


def compare(
  config: Config,
  runs: Sequence[ComparedRun],
  workdir: str,
  decode: Decode | None = None,
) -> dict[str, Outcome] | None:
  """Trains and scores the runs that have no outcome in the directory yet.

  Args:
    config: the run that the compared ones are variants of.
    runs: in the order in which they are trained.
    workdir: local directory or bucket of the comparison.
    decode: see `train`.

  Returns:
    Outcomes by `ComparedRun.name`, in the first process; None after a request
    to stop.

  Raises:
    ValueError: the directory holds a comparison of another config; the message
      names the fields that differ.
    OSError: it cannot be written.
  """
  directory, outcomes = steps.absolute(workdir), dict[str, Outcome]()
  file = directory / _FILE

  def read() -> list[bool]:
    directory.mkdir(parents=True, exist_ok=True)
    if file.exists():
      outcomes.update(_read(file, config))
    write()
    return [run.name in outcomes for run in runs]

  def write() -> None:
    known = msgspec.to_builtins(outcomes)
    content = {"config": to_dict(config), "outcomes": known}
    content["checksum"] = json_checksum(content)
    write_whole(file, f"{json.dumps(content, indent=2)}\n".encode())

  done = ask_first_process(read, len(runs))
  for number, (run, is_done) in enumerate(zip(runs, done), start=1):
    if is_done:
      continue
    _LOG.info("run %d of %d: %s", number, len(runs), run.name)
    try:
      result = train(run.config, directory / run.name, decode=decode)
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
  stored = parse_json(read_bytes(file, MAX_BYTES), _Stored, str(file))
  if stored["checksum"] != json_checksum(stored):
    raise ValueError(f"{file}: its content is not what was written")
  ours = config.by_name()
  try:
    theirs = from_config_dict(upgrade(stored["config"])).by_name()
  except (KeyError, ValueError) as error:
    raise ValueError(f"{file}: config: {error}") from error
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
