"""`python -m moh_jax inspect`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Literal

from moh_jax import config as config_lib
from moh_jax.cli import command
from moh_jax.config import Config, LayerGroup
from moh_jax.config.base import Count
from moh_jax.runtime import steps

_NAMES = 10  # of the classes that are listed
_OF_A_BUDGET = "num_heads", "head_dim", "shared", "routed", "top_k", "active"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.Stored, command.RunConfig, command.Output):
  """Describe a checkpoint or config, check files, or show training examples.

  Without --checksums and --batch: heads, parameters and sizes.

  Attributes:
    checkpoint: workdir of `train` or output of `convert`.
    config: config file, as FILE or FILE:ARG; --config.KEY=VALUE changes a key
      of it, and with --help all keys are listed.
    data: folder of shards, of latents for --batch.
    checksums: compare the files of --checkpoint (without a number
      as --step all that are there) with their checksums; the status is 1 where
      any is damaged.
    batch: draw images into this .png file and print their classes: of --config
      those of a training step as the model gets them; of --data latents,
      decoded. Of text '-' prints the step's sequences, with what is trained in
      [[ ]], or green on a terminal.
    num: images or sequences of --batch at most.
    columns: of the grid of --batch.
    at_step: the step of the run whose batch it is.
    vae: weights of the autoencoder that decodes the latents of --data.
    split: of the latents of --data.
  """

  checkpoint: command.Place | None = None
  config: command.Place | None = None
  data: command.Place | None = None
  checksums: bool = False
  batch: command.OutFile | None = None
  num: Count = 32
  columns: Count | None = None
  at_step: Count = 1
  vae: command.Place | None = None
  split: Literal["train", "val"] = "train"

  def check(self) -> None:
    """There is one thing to look at, and a way to."""
    super().check()
    given = {"checkpoint", "config", "data"}
    given = {name for name in given if getattr(self, name) is not None}
    if len(given) != 1:
      raise ValueError("one of --checkpoint, --config and --data must be given")
    if self.batch not in (None, "-") and not self.batch.endswith(".png"):
      self.fail("batch", "must end in .png, or be - for text")
    if self.batch is not None and self.checkpoint is not None:
      self.fail("batch", "needs --config or --data")
    for name in ("num", "at_step"):
      self.need(name, self.batch, "needs --batch")
    is_grid = self.batch not in (None, "-")
    self.need("columns", is_grid, "needs --batch FILE.png")
    self.need("split", self.data and self.batch, "needs --data and --batch")
    if self.vae is not None and not (self.data and self.batch):
      self.fail("vae", "needs --data and --batch")
    if self.checksums and self.changes:
      raise ValueError("--checksums compares files; no key can be changed")
    if self.checksums and (self.batch or self.config):
      raise ValueError("--checksums needs --checkpoint alone")
    if self.data is not None and (self.checksums or not self.batch):
      self.fail("data", "needs --batch")
    if self.batch == "-" and self.config is None:
      self.fail("batch", "needs --config")
    if self.data is not None and self.batch and self.vae is None:
      self.fail("batch", "needs --vae, which decodes the latents of --data")


def run(options: Options) -> int:
  """Prints what was asked for; 1 if --checksums found any damage."""
  if options.checksums:
    return _compare_checksums(options)
  if options.batch:
    return _draw(options)
  from moh_jax.data.infer import resolve
  from moh_jax.models.registry import make_model
  from moh_jax.runtime.sharding import abstract_params, unbox

  if options.checkpoint:
    metadata, step = options.stored()
    config, names = metadata.config, metadata.class_names
  else:
    config, step, names = resolve(options.loaded), None, ()
  # Parameters are those of any form; this one may be impossible here.
  anywhere = config_lib.apply_overrides(config, "model", attention_impl="auto")
  boxed = abstract_params(*make_model(anywhere))
  counts = _by_module(unbox(boxed))
  report = {
    "step": step,
    "class_names": list(names),
    "config": config_lib.to_dict(config),
    "layers": layer_rows(config),
    "activated_share": config.model.activated_share,
    "parameters": sum(counts.values()),
    "parameters_by_module": counts,
  }
  options.give(report, _lines(report, config))
  return 0


def _draw(options: Options) -> int:
  from moh_jax.cli import batch_picture
  from moh_jax.data.infer import resolve

  if options.batch == "-":
    config = resolve(options.loaded)
    marks = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
    where = options.at_step, options.num
    lines = list(batch_picture.text_lines(config, *where, marks))
    options.give(lines, lines, is_styled=True)
    return 0
  out = pathlib.Path(options.batch)
  out.parent.mkdir(parents=True, exist_ok=True)
  grid = options.num, options.columns
  if options.data:
    lines = batch_picture.write_latents(
      out, options.data, options.split, options.vae, *grid
    )
  else:
    config, step = resolve(options.loaded), options.at_step
    lines = batch_picture.write_batch(out, config, step, *grid)
  lines = list(lines)
  options.give(lines, lines)
  return 0


def _compare_checksums(options: Options) -> int:
  """A line for each checkpoint."""
  folder, number = options.checkpoint, options.step_number
  wanted = steps.list_steps(folder)
  if number is not None:
    wanted = [steps.find_step(folder, number)]
  damage = {step: steps.find_damage(folder, step) for step in wanted}
  values = [
    {
      "step": step,
      "damage": None
      if files is None  # the checkpoint is without checksums
      else [{"file": name, "what": what} for name, what in files.items()],
    }
    for step, files in damage.items()
  ]
  options.give(values, itertools.starmap(steps.describe, damage.items()))
  return 1 if any(damage.values()) else 0


def layer_rows(config: Config) -> list[dict]:
  """One row per layer."""
  model, rows = config.model, []
  mesh = [max(1, getattr(config.mesh, axis)) for axis in ("tensor", "sequence")]
  for index, group in enumerate(model.layer_groups()):
    row = {
      "stage": index + 1,
      "tokens": group.tokens,
      **{name: getattr(group.budget, name) for name in _OF_A_BUDGET},
    }
    for order in group.order_of_each:
      rows.append({"layer": len(rows), **row})
      if max(mesh) > 1:
        rows[-1] |= _on_devices(config, group, mesh, order)
  return rows


def _on_devices(
  config: Config, group: LayerGroup, mesh: Sequence[int], order: Sequence[int]
) -> dict[str, float | None]:
  """Expected active heads of a token on the busiest device, and over the mean.

  None where the axes tensor and sequence cannot split the heads.
  """
  from moh_jax.ops.placement import head_placement, works_equally

  placement, budget = head_placement(group, *mesh), group.budget
  if placement is None:
    return {"per_device": None, "imbalance": None}
  if works_equally(config.model, group):
    return {"per_device": group.attended / math.prod(mesh), "imbalance": 1.0}
  most = max(placement.expected_active(budget, order))
  return {
    "per_device": round(most, 2),
    "imbalance": round(placement.imbalance(budget, order), 3),
  }


def _by_module(params: dict) -> dict[str, int]:
  """Parameters of each part of a stage."""
  from flax import traverse_util

  counts: dict[str, int] = {}
  for path, leaf in traverse_util.flatten_dict(params).items():
    depth = 3 if "blocks" in path else 2
    name = "/".join(path[: min(depth, max(1, len(path) - 1))])
    counts[name] = counts.get(name, 0) + leaf.size
  return counts


def _lines(report: dict, config: Config) -> Iterator[str]:
  """The report for people: equal layers share a row."""
  rows = []
  equal = itertools.groupby(report["layers"], lambda row: {**row, "layer": 0})
  for values, group in equal:
    numbers = [row["layer"] for row in group]
    span = "-".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
    rows.append((span, len(numbers), *list(values.values())[1:]))
  yield command.table(rows, ("layers", "count", *list(values)[1:]))
  counts = [(n, f"{c:,}") for n, c in report["parameters_by_module"].items()]
  yield f"\n{command.table(counts, ('module', 'parameters'))}\n"
  yield f"family: {config.model.family}"
  if report["step"] is not None:
    yield f"step: {report['step']}"
  router = config.model.router
  # Other routers have gates of their own.
  form = f"{router.gate_form}, " * (router.kind == "two_stage")
  form = f" ({form}{router.structure})" * router.selects
  yield f"router: {router.kind}{form}"
  yield f"activated share: {report['activated_share']:.4f}"
  yield f"parameters: {report['parameters']:,}"
  if names := report["class_names"]:
    more = ", ..." if len(names) > _NAMES else ""
    yield f"classes: {len(names)} ({', '.join(names[:_NAMES])}{more})"
