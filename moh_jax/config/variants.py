"""Variants of a run to compare: other shares of active heads, and ablations."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from moh_jax.config.layers import without_router
from moh_jax.config.load import override
from moh_jax.config.parse import from_config_dict, to_dict
from moh_jax.config.run import Config

FORMS = (
  "config, mha or mohNN (NN % of the heads active); config and mohNN also with "
  "-onestage (the groups of heads weigh the same) or -sharedNN (NN % of the "
  "active heads are shared), as in moh50-shared0"
)
_NAME = re.compile(
  r"mha|(config|moh(?P<active>\d{1,3}))(?P<onestage>-onestage)?"
  r"(-shared(?P<shared>\d{1,3}))?"
)


def make_variant(config: Config, name: str) -> Config:
  """The same run with another router or other budgets of heads.

  Layers that route no heads in `config` are left as they are. The others get
  the nearest whole numbers of heads, at least one of them routed, and keep the
  share of shared heads among the active ones unless the name says otherwise.

  Args:
    config: the run.
    name: "config" (the run itself), "mha" (multi-head attention) or "mohNN"
      (NN % of the heads active). After "config" and "mohNN": "-onestage" (both
      groups of heads weigh the same) and "-sharedNN" (NN % of the active heads
      are shared), the ablations and the sweep of the paper's Tables 5 and 7;
      "-shared0" has no shared heads.

  Raises:
    ValueError: there is no such variant of this run.
  """
  found = _NAME.fullmatch(name)
  if not found:
    raise ValueError(f"variant {name!r} must be {FORMS}")
  model = config.model
  if name == "mha":
    return dataclasses.replace(config, model=without_router(model))
  if name != "config" and model.router.kind == "none":
    raise ValueError(
      f"variant {name!r} needs a config that routes heads, and "
      "model.router.kind is 'none'"
    )
  if found["onestage"]:
    if model.router.kind != "two_stage":
      raise ValueError(
        f"variant {name!r} needs model.router.kind='two_stage', not "
        f"{model.router.kind!r}"
      )
    router = dataclasses.replace(model.router, two_stage=False)
    model = dataclasses.replace(model, router=router)
  active, shared = found["active"], found["shared"]
  if active and not 1 <= int(active) <= 100:
    raise ValueError(f"variant {name!r}: {active} % must be from 1 to 100")
  if shared and int(shared) > 99:
    raise ValueError(f"variant {name!r}: {shared} % must be from 0 to 99")
  if active or shared:
    try:
      model = _with_budgets(model, _part(active), _part(shared))
    except ValueError as error:
      raise ValueError(f"variant {name!r}: {error}") from error
  return dataclasses.replace(config, model=model)


def _part(percent: str | None) -> float | None:
  return None if percent is None else int(percent) / 100


def _with_budgets(
  model: Any, active: float | None, shared: float | None
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
  for heads, old_shared, top_k in zip(
    model.num_heads, model.shared_heads, model.top_k
  ):
    if not top_k:
      splits.append((old_shared, top_k))
      continue
    old_active = old_shared + top_k
    count = old_active if active is None else max(1, _nearest(active * heads))
    share = old_shared / old_active if shared is None else shared
    fixed = min(count - 1, _nearest(share * count))
    splits.append((fixed, count - fixed))
  shared_heads, top_k = zip(*splits)
  return dataclasses.replace(model, shared_heads=shared_heads, top_k=top_k)


def _nearest(x: float) -> int:
  """The nearest whole number; of two, the larger one."""
  return math.floor(x + 0.5)


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
    return "-".join((*self.row.split(), f"seed{self.seed}"))


def compared_runs(
  config: Config, variants: Sequence[str], sweep: str, seeds: int
) -> list[ComparedRun]:
  """The runs of a comparison, every variant with every setting and seed.

  Args:
    config: the run that they are variants of.
    variants: names for `make_variant`, each once.
    sweep: "SECTION.FIELD=VALUE,VALUE,..." to run each variant with each value;
      "" for none.
    seeds: number of seeds, from the config's `train.seed` on.

  Returns:
    The runs, all of one seed before those of the next.

  Raises:
    ValueError: a variant or a value does not fit, or is named twice.
  """
  key, equals, values = sweep.partition("=")
  if sweep and not (equals and values):
    raise ValueError(f"--sweep {sweep!r} must be SECTION.FIELD=VALUE,VALUE,...")
  settings = (
    [f"{key}={value}" for value in values.split(",")] if sweep else [""]
  )
  for option, given in (("variants", variants), ("sweep", settings)):
    if twice := [name for name in given if given.count(name) > 1]:
      raise ValueError(f"--{option}: {twice[0]!r} is named twice")
  runs = []
  for seed in range(config.train.seed, config.train.seed + seeds):
    for variant in variants:
      for setting in settings:
        made = make_variant(config, variant)
        changes = [setting] * bool(setting) + [f"train.seed={seed}"]
        made = from_config_dict(override(to_dict(made), changes))
        runs.append(ComparedRun(variant, setting, seed, made))
  return runs
