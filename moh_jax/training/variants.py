"""Compares variants of a run: other shares of active heads, and ablations."""

import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax

from moh_jax.config import Config, apply_overrides, without_router
from moh_jax.config.heads import Units
from moh_jax.config.parse import changed
from moh_jax.models.generation import Decode
from moh_jax.training.saving import NonFiniteLossError
from moh_jax.training.train import train

_LOG = logging.getLogger(__name__)
_PERCENT = r"100|[1-9]\d?"
_NAME = re.compile(
  rf"mha((?P<kept>{_PERCENT})(?P<wide>-wide)?)?|gate|"
  rf"(config|moh(?P<active>{_PERCENT}))(?P<double>-double)?"
  r"(?P<onestage>-onestage)?(-shared(?P<shared>\d{1,2}))?"
  r"(-(?P<rich>first|last))?(-(?P<structure>per_group|whole_group))?"
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
      (NN % of the heads active). After "config" and "mohNN", in this order:
      "-double" (twice the heads, and an MLP that is narrower by as many
      parameters), "-onestage" (both groups of heads weigh the same) and
      "-sharedNN" (NN % of the active heads are shared), the ablations and the
      sweep of the paper's Tables 5 and 7, "-shared0" has no shared heads;
      "-first" or "-last" (that half of the layers has more active heads, the
      other as many fewer: 75 % are all and 50 %, 50 % are 75 and 25 %), and
      "-per_group" or "-whole_group" (`RouterConfig.structure`).

  Raises:
    ValueError: there is no such variant of this run.
  """
  found = _NAME.fullmatch(name)
  if not found:
    raise ValueError(
      f"variant {name!r} must be config, mha, gate, mhaNN or mhaNN-wide (1 to "
      "100 % of the heads present) or mohNN (so many active), the first and "
      "the last also with -double, -onestage, -sharedNN (0 to 99 %), -first or "
      "-last, -per_group or -whole_group"
    )
  model = config.model
  # No floats: 58 % of 25 heads would be a little less than 14.5.
  active, shared, kept = (
    percent and Fraction(int(percent), 100)
    for percent in found.group("active", "shared", "kept")
  )
  try:
    if kept:
      model = _with_heads(model, kept, found["wide"])
    elif found["double"]:
      model = _with_heads(model, Fraction(2), True)
    if name.startswith("mha"):
      model = without_router(model)
    elif name == "gate":
      gate = dataclasses.replace(model.router, kind="gate")
      model = dataclasses.replace(model, router=gate)
    elif name != "config" and not model.router.selects:
      raise ValueError(f"model.router.kind={model.router.kind!r} routes none")
    if found["onestage"]:
      if model.router.kind != "two_stage":
        raise ValueError(f"model.router.kind={model.router.kind!r} has one")
      router = dataclasses.replace(model.router, two_stage=False)
      model = dataclasses.replace(model, router=router)
    budgets = active, shared, found["rich"], found["structure"]
    if any(x is not None for x in budgets):
      model = _with_budgets(model, *budgets)
    return dataclasses.replace(config, model=model)
  except ValueError as error:
    raise ValueError(f"variant {name!r}: {error}") from error


def _with_budgets(
  model: Any,
  active: Fraction | None,
  shared: Fraction | None,
  rich: str | None,
  structure: str | None,
) -> Any:
  """A model whose routed layers have other budgets.

  Args:
    model: the section, with one value for each layer or stage.
    active: share of the heads that are active; None keeps the layer's.
    shared: share of those that are shared; None keeps the layer's.
    rich: half of the layers, "first" or "last", that has more active heads than
      this share, as many as the other half has fewer.
    structure: of the choice; None keeps the model's.
  """
  if not hasattr(model, "shared_heads"):
    raise ValueError(
      f"model.family={model.family!r} has no num_heads, shared_heads and top_k "
      "for each layer"
    )
  router = model.router
  if structure:
    router = dataclasses.replace(router, structure=structure)
  splits, budgets = [], model.budgets()
  for index, budget in enumerate(budgets):
    if not budget.top_k:
      splits.append((budget.shared, 0))
      continue
    every = dataclasses.replace(budget, shared=budget.num_heads, top_k=0)
    step = Units.of(every, router, model.num_kv_heads).step
    present, count = budget.num_heads // step, budget.active // step
    if active is not None:
      count = max(1, _nearest(active * present))
    if rich:
      more = min(present - count, count // 2)
      is_rich = (index < len(budgets) // 2) == (rich == "first")
      count += more if is_rich else -more
      if count == present:  # no choice is left
        splits.append((budget.num_heads, 0))
        continue
    share = Fraction(budget.shared, budget.active) if shared is None else shared
    fixed = min(count - 1, _nearest(share * count))
    splits.append((fixed * step, (count - fixed) * step))
  shared_heads, top_k = zip(*splits)
  return dataclasses.replace(
    model, router=router, shared_heads=shared_heads, top_k=top_k
  )


def _with_heads(model: Any, share: Fraction, widens: Any) -> Any:
  """A model with another number of query heads in every layer.

  Of key/value heads it has the most, up to those of the model, that divide the
  query heads of all layers.

  Args:
    model: the section; its heads have a width of their own.
    share: of the heads; below 1 all are active, else as large a share as in
      the model.
    widens: whether the MLP gets as many parameters as attention loses.
  """
  if not hasattr(model, "with_mlp_dim"):
    raise ValueError(
      f"model.family={model.family!r} has no head_dim: fewer heads of a layer "
      "would be wider ones"
    )
  heads = tuple(max(1, _nearest(share * n)) for n in model.num_heads)
  lost = sum(model.num_heads) - sum(heads)
  changes: dict[str, Any] = {"num_heads": heads, "shared_heads": heads}
  changes |= {"top_k": (0,) * model.depth}
  if share > 1:
    for field in "shared_heads", "top_k":
      changes[field] = tuple(int(share * n) for n in getattr(model, field))
  kv_lost = lost
  if old := model.num_kv_heads:
    common = math.gcd(*heads)
    kv_heads = max(n for n in range(1, old + 1) if common % n == 0)
    kv_lost = (old - kv_heads) * model.depth
    changes |= {"num_kv_heads": kv_heads, "head_order": ()}
  if share < 1:  # no head is left to choose
    changes["router"] = dataclasses.replace(model.router, structure="free")
  smaller = dataclasses.replace(model, **changes)
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
  def name(self) -> str:
    """A name that no other run of the comparison has, and a folder can have."""
    setting = re.sub(r"[^A-Za-z0-9_.=+,-]", "_", self.setting)
    return "-".join(filter(None, (self.variant, setting, f"seed{self.seed}")))


def compared_runs(
  config: Config, variants: Sequence[str], sweep: str, seeds: int
) -> list[ComparedRun]:
  """The runs of a comparison, every variant with every setting and seed.

  Args:
    config: the run that they are variants of.
    variants: names for `make_variant`.
    sweep: "SECTION.FIELD=VALUE,VALUE,..." to run the variants of the config
      with each value, such as "model.top_k=(0,1),(0,2)"; "" for none.
    seeds: number of seeds, from the config's `train.seed` on.

  Returns:
    The runs, all of one seed before those of the next.

  Raises:
    ValueError: a variant or a value does not fit.
  """
  key, equals, values = sweep.partition("=")
  if sweep and not (key and equals and values):
    raise ValueError(f"--sweep {sweep!r} must be SECTION.FIELD=VALUE,VALUE,...")
  each = re.findall(r"\([^()]*\)|[^,]+", values)
  settings = [f"{key}={value.strip()}" for value in each] or [""]
  pairs = dict.fromkeys(itertools.product(variants, settings))
  runs = []
  for seed in range(config.train.seed, config.train.seed + seeds):
    seeded = apply_overrides(config, "train", seed=seed)
    for variant, setting in pairs:
      run = make_variant(changed(seeded, [setting] * bool(key)), variant)
      runs.append(ComparedRun(variant, setting, seed, run))
  return runs


def compare(
  runs: Sequence[ComparedRun], workdir: str, decode: Decode | None = None
) -> dict[tuple[str, str], dict[int, dict[str, float]]] | None:
  """Trains and scores runs; those that are done are scored again.

  Args:
    runs: in the order in which they are trained.
    workdir: local directory or bucket, in which each run has its own.
    decode: see `train`.

  Returns:
    Metrics by variant and setting, and by seed, those of a run that diverged
    are {}; None after a request to stop.

  Raises:
    ValueError: a run has no scores; also as `train` does.
  """
  found: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
  for number, run in enumerate(runs, start=1):
    seeds = found.setdefault((run.variant, run.setting), {})
    _LOG.info("run %d of %d: %s", number, len(runs), run.name)
    try:
      result = train(run.config, f"{workdir}/{run.name}", decode=decode)
    except NonFiniteLossError as error:
      _LOG.warning("%s: %s", run.name, error)
      seeds[run.seed] = {}
    else:
      if not result.finished:
        return None
      if not result.evaluation:
        raise ValueError(
          f"{workdir}/{run.name} has no scores: its data are without a "
          "held-out split, or it has more steps than "
          f"train.steps={run.config.train.steps}"
        )
      seeds[run.seed] = result.evaluation
    jax.clear_caches()  # of programs that no other run uses
  return found
