"""Variants of a run to compare: other shares of active heads, and ablations."""

import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from moh_jax.config.base import split_items
from moh_jax.config.layers import without_router
from moh_jax.config.parse import from_config_dict, override, to_dict
from moh_jax.config.run import Config

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
    raise ValueError(
      f"variant {name!r} must be config, mha or mohNN (NN % of the heads "
      "active), the first and the last also with -onestage or -sharedNN"
    )
  model = config.model
  if name == "mha":
    return without_router(model).in_run(config)
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
  try:
    if active or shared:
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
  for heads, old_shared, top_k in zip(
    model.num_heads, model.shared_heads, model.top_k
  ):
    if not top_k:
      splits.append((old_shared, top_k))
      continue
    old_active = old_shared + top_k
    count = old_active if active is None else max(1, _nearest(active * heads))
    share = Fraction(old_shared, old_active) if shared is None else shared
    fixed = min(count - 1, _nearest(share * count))
    splits.append((fixed, count - fixed))
  shared_heads, top_k = zip(*splits)
  return dataclasses.replace(model, shared_heads=shared_heads, top_k=top_k)


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
  if config.model.router.kind == "none":
    for name in ("router", "shared_heads", "top_k"):
      sections["model"].pop(name, None)
    del sections["train"]["balance_weight"]
  return repr(sections)


def _file_part(text: str) -> str:
  """Text for the name of a file; a hash stands for what a name cannot hold."""
  safe = re.sub(r"[^A-Za-z0-9_.=+,-]", "_", text)[:80]
  digest = hashlib.sha256(ascii(text).encode()).hexdigest()[:8]
  return safe if safe == text else f"{safe}-{digest}"
