"""The small multi-head model of `llm_stdlib.py:mha`, continue-tuned into MoH.

  python train.py --config=configs/llm_stdlib.py:mha --workdir=MHA
  python train.py --config=configs/llm_stdlib_tune.py --workdir=DIR \
    --config.train.init_from=MHA

What `llama3_moh.py:stage2` does to LLaMA3, in a minute or two: query-norm
router, half of the heads shared, a quarter chosen by each token. Arguments:
first (default; the first heads are shared), importance:FILE (those that
`python -m moh_jax heads --json FILE` found most important), schedule (all heads
on at first, then fewer step by step), mha (nothing but more steps).
"""

import dataclasses
import json
import pathlib
import runpy

import ml_collections

from moh_jax import config as config_lib

_STEPS = 80
ARGUMENTS = ("first", "importance", "schedule", "mha")


def get_config(arg: str = "first") -> ml_collections.ConfigDict:
  kind, _, order = arg.partition(":")
  if (kind == "importance") != bool(order):
    raise ValueError(f"{arg}: importance:FILE, and it alone, names a file")
  beside = pathlib.Path(__file__).with_name("llm_stdlib.py")
  base = config_lib.from_config_dict(
    runpy.run_path(str(beside))["get_config"]("mha")
  )
  model, tune = base.model, config_lib.TuneConfig()
  if kind != "mha":
    model = dataclasses.replace(
      model,
      router=config_lib.RouterConfig("query_norm"),
      shared_heads=(4,) * model.depth,
      top_k=(2,) * model.depth,
    )
  if order:
    orders = json.loads(pathlib.Path(order).read_text())["head_order"]
    model = dataclasses.replace(model, head_order=orders)
  if kind == "schedule":
    tune = config_lib.TuneConfig(
      top_k_steps=(0, _STEPS // 6, _STEPS // 3), top_k_values=(4, 3, 2)
    )
  return config_lib.to_config_dict(
    dataclasses.replace(
      base,
      model=model,
      tune=tune,
      optim=dataclasses.replace(
        base.optim, lr=5e-4, final_lr=5e-5, warmup_steps=5
      ),
      train=dataclasses.replace(base.train, steps=_STEPS, seed=1),
    )
  )
