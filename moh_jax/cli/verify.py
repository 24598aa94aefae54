"""`python -m moh_jax verify`."""

import argparse
import pathlib
from typing import Any

from moh_jax.cli import common
from moh_jax.data import shards
from moh_jax.runtime import steps


def run(args: argparse.Namespace) -> int:
  """Prints a line per checkpoint or set of shards; 1 if any is damaged."""
  root = pathlib.Path(args.folder)
  places = (root, *sorted(root.glob("*/")))
  sets = [place for place in places if (place / shards.METADATA).is_file()]
  if sets:
    return _verify_sets(sets, args.json)
  if "://" not in args.folder:
    steps.check_exists(args.folder)
  newest = steps.find_step(args.folder, args.step)
  wanted = [newest] if args.step is not None else steps.list_steps(args.folder)
  damage = {step: steps.find_damage(args.folder, step) for step in wanted}
  if args.json != "-":
    for step, found in damage.items():
      print(steps.describe(step, found))
  common.write_json(args.json, [_listed(*one) for one in damage.items()])
  return 1 if any(damage.values()) else 0


def _listed(step: int, damage: dict[str, str] | None) -> dict[str, Any]:
  if damage is None:
    return {"step": step, "damage": None}
  named = [{"file": name, "what": what} for name, what in damage.items()]
  return {"step": step, "damage": named}


def _damage(folder: pathlib.Path) -> list[str]:
  try:
    return shards.damage(folder)
  except (ValueError, OSError) as error:  # the other sets are compared too
    return [str(error)]


def _verify_sets(folders: list[pathlib.Path], json: str | None) -> int:
  damaged = {str(folder): _damage(folder) for folder in folders}
  if json != "-":
    for folder, lines in damaged.items():
      print(*(lines or [f"{folder}: whole"]), sep="\n")
  common.write_json(json, damaged)
  return 1 if any(damaged.values()) else 0
