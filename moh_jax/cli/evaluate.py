"""`python -m moh_jax evaluate`."""

import argparse

from moh_jax import config as config_lib
from moh_jax.cli import common
from moh_jax.config import get_family
from moh_jax.inference.restore import restore
from moh_jax.runtime import sharding


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declares the command's arguments."""
  common.add_checkpoint(parser)
  common.add_mesh(parser)
  parser.add_argument(
    "--data",
    metavar="DIR",
    help="directory of images, shards, latents or tokens, instead of the run's",
  )
  parser.add_argument(
    "--batch-size", type=int, help="examples per batch, instead of the run's"
  )
  parser.add_argument(
    "--examples",
    type=int,
    default=0,
    metavar="N",
    help="examples at most, spread evenly over the split (default: all)",
  )
  common.add_json(parser)


def run(args: argparse.Namespace) -> int:
  """Prints the figures of the checkpoint's task on its held-out split."""
  is_first = common.join(args)
  mesh = sharding.make_mesh(args.mesh)
  with sharding.use_mesh(mesh):
    restored = restore(
      args.checkpoint, mesh=mesh, **common.restore_options(args)
    )
    config = restored.config
    family = get_family(config.model.family)
    if args.data:
      data = family.data_at(config, args.data)
      config = config_lib.apply_overrides(config, "data", **data)
    overrides = {"examples": args.examples}
    if args.batch_size is not None:
      overrides["batch_size"] = args.batch_size
    config = config_lib.apply_overrides(config, "eval", **overrides)
    sharding.check_batch("eval.batch_size", config.eval.batch_size, mesh)
    evaluate = family.tasks().make_evaluate(restored.model, config, restored)
    figures = evaluate(restored.params, mesh)
  figures = {**figures, "step": restored.step}
  if not is_first:
    return 0
  if args.json != "-":
    for name, value in figures.items():
      print(
        f"{name}: {value:.4f}"
        if isinstance(value, float)
        else f"{name}: {value}"
      )
  common.write_json(args.json, figures)
  return 0
