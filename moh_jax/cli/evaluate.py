"""`python -m moh_jax evaluate`."""

import argparse

from moh_jax import config as config_lib
from moh_jax.cli import common, distributed, fields
from moh_jax.config import EvalConfig, get_family
from moh_jax.runtime import sharding


def run(args: argparse.Namespace) -> int:
  """Prints the metrics of the checkpoint's task on its held-out split."""
  is_first = distributed.join(args)
  mesh = sharding.make_mesh(args.mesh)
  with sharding.use_mesh(mesh):
    restored = common.restore(args, mesh=mesh)
    config = restored.config
    family = get_family(config.model.family)
    if args.data:
      data = family.data_at(config, args.data)
      config = config_lib.apply_overrides(config, "data", **data)
    given = fields.given_fields(args, EvalConfig, "batch_size", "examples")
    overrides = {"examples": 0, **given}
    config = config_lib.apply_overrides(config, "eval", **overrides)
    sharding.check_batch("eval.batch_size", config.eval.batch_size, mesh)
    evaluate = family.tasks().make_evaluate(restored.model, config, restored)
    metrics = evaluate(restored.params, mesh)
  if is_first:
    common.report(args.json, {**metrics, "step": restored.step})
  return 0
