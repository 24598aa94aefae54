"""`python -m moh_jax evaluate`."""

import argparse
from typing import Any

from moh_jax import config as config_lib
from moh_jax.cli import common
from moh_jax.config import Config
from moh_jax.inference.restore import restore
from moh_jax.runtime import sharding
from moh_jax.training.tasks import make_evaluate


def run(args: argparse.Namespace) -> int:
  """Prints the metrics of the checkpoint's task on its held-out split."""
  is_first = common.join(args)
  mesh = sharding.make_mesh(args.mesh)
  with sharding.use_mesh(mesh):
    restored = restore(
      args.checkpoint, mesh=mesh, **common.restore_options(args)
    )
    config = restored.config
    if args.data:
      data = _other_data(config, args.data)
      config = config_lib.apply_overrides(config, "data", **data)
    overrides = {"examples": args.examples}
    if args.batch_size is not None:
      overrides["batch_size"] = args.batch_size
    config = config_lib.apply_overrides(config, "eval", **overrides)
    sharding.check_batch("eval.batch_size", config.eval.batch_size, mesh)
    evaluate = make_evaluate(
      restored.model, config, restored.class_names, restored.tokenizer_sha256
    )
    metrics = evaluate(restored.params, mesh)
  if is_first:
    common.report(args.json, {**metrics, "step": restored.step})
  return 0


def _other_data(config: Config, path: str) -> dict[str, Any]:
  """What reads another directory as the run read its own."""
  if config.model.family == "llm":
    return {"source": "tokens", "path": path, "mix": (), "ratios": ()}
  stored = config.data.source in ("latents", "array_record")
  source = config.data.source if stored else "image_folder"
  return {"source": source, "path": path}
