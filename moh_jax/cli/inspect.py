"""`python -m moh_jax inspect`."""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
from flax import traverse_util

from moh_jax import config as config_lib
from moh_jax.cli import common
from moh_jax.config import Config, LayerGroup
from moh_jax.data.infer import resolve
from moh_jax.models.registry import make_model
from moh_jax.ops.head_layout import computes_all_heads, head_placement
from moh_jax.ops.target import target
from moh_jax.runtime.sharding import abstract_params, unbox, unsplit_params
from moh_jax.training.flops import attention_form

_NAMES = 10  # of the classes that are listed


def run(args: argparse.Namespace) -> int:
  """Prints the head budget of each layer and the parameters."""
  if args.checkpoint:
    metadata, step = common.read_metadata(args)
    config, names = metadata.config, metadata.class_names
  else:
    config, step, names = resolve(args.config), None, ()
  model, inputs = make_model(config)
  boxed = abstract_params(model, inputs)
  params = unbox(boxed)
  layers = _layers(config)
  report = {
    "step": step,
    "class_names": list(names),
    "config": config_lib.to_dict(config),
    "layers": layers,
    "activated_share": config.model.activated_share,
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    "parameters_by_module": _by_module(params),
    "unsplit": _unsplit(boxed, config),
  }
  if args.json != "-":
    _print(report, config)
  common.write_json(args.json, report)
  return 0


def _layers(config: Config) -> list[dict]:
  """One row per layer."""
  model, rows = config.model, []
  mesh = [max(1, getattr(config.mesh, axis)) for axis in ("tensor", "sequence")]
  for index, group in enumerate(model.layer_groups()):
    budget = group.budget
    row = {
      "stage": index + 1,
      "tokens": group.tokens,
      "num_heads": budget.num_heads,
      "head_dim": budget.head_dim,
      "shared": budget.shared,
      "routed": budget.routed,
      "top_k": budget.top_k,
      "active": budget.active,
      "attention": _attention(config, group, mesh),
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
  placement, budget = head_placement(group, *mesh), group.budget
  if placement is None:
    return {"per_device": None, "imbalance": None}
  if computes_all_heads(config.model, group):
    return {"per_device": budget.num_heads / math.prod(mesh), "imbalance": 1.0}
  most = max(placement.expected_active(budget, order))
  return {
    "per_device": round(most, 2),
    "imbalance": round(placement.imbalance(budget, order), 3),
  }


def _attention(config: Config, group: LayerGroup, mesh: Sequence[int]) -> str:
  """The form that a layer has in training, for one example.

  On a device like those of this machine, with its part of the heads.
  """
  try:
    return attention_form(config, group, mesh).name
  except ValueError:  # what was trained elsewhere can be looked at anywhere
    form, platform = config.model.attention_impl, target().platform
    return f"{form} (impossible on this {platform})"


def _unsplit(boxed: Any, config: Config) -> list[dict]:
  """Parameters that the axes fsdp and tensor do not split, as far as known."""
  mesh = config.mesh
  sizes = {axis: max(1, getattr(mesh, axis)) for axis in mesh.AXES}
  return [dataclasses.asdict(one) for one in unsplit_params(boxed, sizes)]


def _by_module(params: dict) -> dict[str, int]:
  """Parameters of each part of a stage."""
  counts: dict[str, int] = {}
  for path, leaf in traverse_util.flatten_dict(params).items():
    depth = 3 if "blocks" in path else 2
    name = "/".join(path[: min(depth, max(1, len(path) - 1))])
    counts[name] = counts.get(name, 0) + leaf.size
  return counts


def _print(report: dict, config: Config) -> None:
  rows = []
  equal = itertools.groupby(report["layers"], lambda row: {**row, "layer": 0})
  for values, group in equal:
    layers = [row["layer"] for row in group]
    rows.append((_span(layers), len(layers), *list(values.values())[1:]))
  print(common.table(rows, ("layers", "count", *list(values)[1:])))
  counts = [(n, f"{c:,}") for n, c in report["parameters_by_module"].items()]
  print("\n" + common.table(counts, ("module", "parameters")) + "\n")
  if unsplit := report["unsplit"]:
    columns = ("name", "shape", "bytes", "why")
    rows = [tuple(map(str, map(one.get, columns))) for one in unsplit]
    print(common.table(rows, ("not split", *columns[1:])) + "\n")
  print(f"family: {config.model.family}")
  if report["step"] is not None:
    print(f"step: {report['step']}")
  router = config.model.router
  form = f" ({router.gate_form})" * (router.kind != "none")
  print(f"router: {router.kind}{form}")
  print(f"activated share: {report['activated_share']:.4f}")
  print(f"parameters: {report['parameters']:,}")
  if names := report["class_names"]:
    more = ", ..." if len(names) > _NAMES else ""
    print(f"classes: {len(names)} ({', '.join(names[:_NAMES])}{more})")


def _span(layers: list[int]) -> str:
  """The numbers of consecutive layers, "2-5"."""
  first, last = layers[0], layers[-1]
  return f"{first}-{last}" if last > first else f"{first}"
