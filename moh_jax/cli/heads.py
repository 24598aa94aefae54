"""`python -m moh_jax heads`."""

import argparse
import itertools

from moh_jax import config as config_lib
from moh_jax.analysis.importance import head_importance, order_by_importance
from moh_jax.cli import common, distributed
from moh_jax.data.text import sequences
from moh_jax.runtime import sharding
from moh_jax.training.task import stream


def run(args: argparse.Namespace) -> int:
  """Prints what every head of a language model is worth.

  The JSON's "head_order" is what `model.head_order` takes to share the most
  important heads in place of the first.
  """
  is_first = distributed.join(args)
  common.read_metadata(args, "heads")
  mesh = sharding.make_mesh(args.mesh)
  with sharding.use_mesh(mesh):
    restored = common.restore(args, mesh=mesh)
    config = restored.config
    # Nothing is accumulated here, so any batch will do.
    config = config_lib.apply_overrides(config, "optim", accumulation=1)
    config = config_lib.apply_overrides(
      config, "data", batch_size=args.batch_size
    )
    sharding.check_batch("--batch-size", args.batch_size, mesh)
    text = sequences.train_sequences(
      config.data, config.model.vocab_size, config.train.seed
    )
    batches = itertools.islice(stream(config, text, mesh), args.batches)
    importance = head_importance(
      restored.model,
      config.model,
      restored.params,
      (sharding.shard_batch(batch, mesh) for batch in batches),
    )
  if not is_first:
    return 0
  if args.json != "-":
    rows = [
      (layer, *(f"{value:.3f}" for value in values))
      for layer, values in enumerate(importance)
    ]
    heads = (f"head {head}" for head in range(importance.shape[1]))
    print(common.table(rows, ("layer", *heads)))
  report = {
    "importance": importance.tolist(),
    "head_order": order_by_importance(importance),
    "step": restored.step,
  }
  common.write_json(args.json, report)
  return 0
