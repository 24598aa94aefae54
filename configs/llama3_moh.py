"""LLaMA3 into MoH-LLaMA3: 8B in two stages (arXiv:2410.11842), and 70B.

  python -m moh_jax convert --from llama --source Meta-Llama-3-8B --out LLAMA3
  python train.py --config=configs/llama3_moh.py:stage1 --workdir=STAGE1 \
    --config.train.init_from=LLAMA3 --config.data.path=TOKENS
  python train.py --config=configs/llama3_moh.py:stage2 --workdir=STAGE2 \
    --config.train.init_from=STAGE1 --config.data.path=TOKENS

Arguments: stage1 (300 billion tokens, multi-head, the vocabulary grows to
160,896), stage2 (100 billion tokens, the first 16 heads of a layer shared, 8 of
the other 16 routed). Beyond the paper: stage2_schedule starts stage 2 with all
heads on and lowers the routed ones step by step; stage2_per_group and
stage2_whole_group choose heads by key/value group (2 of 4 shared and 1 of the
others in each; 4 of 8 groups shared and 2 of the others), so that stock
attention and smaller caches serve the model; stage2:FILE shares the heads
that `python -m moh_jax heads --json FILE` found most important in place of the
first; 70b_stage2 makes LLaMA3-70B an MoH as stage 2 does 8B, with its own
vocabulary and no stage 1; lora and qlora do so with 8B by adapters, on one GPU
of 80 GB or eight TPUs v5e, with a base in bfloat16 or int8:

  python train.py --config=configs/llama3_moh.py:lora --workdir=LORA \
    --config.train.init_from=LLAMA3 --config.data.path=TOKENS

All devices split the parameters (mesh.fsdp). optim.accumulation is for 64 of
them, of 70b_stage2 for 512, of lora and qlora for one, one sequence a device at
a time; for another number of devices choose data.batch_size over that number.
"""

import dataclasses
import json
import pathlib

import ml_collections

from moh_jax import config as lib

_SEQUENCE = 8192
_BATCH = 2048  # sequences: 16 million tokens
# Model, billions of tokens and both rates. The rates, the warm-up and the
# batch are the paper's. That a schedule lowers the routed heads from 16 to 8
# over the first fifth of the run is ours.
_LORA = ("llama3-8b", 0.25, 1e-4, 1e-5)  # ours: 1,907 steps
_STAGES = {
  "stage1": ("llama3-8b-expanded", 300, 6e-5, 6e-6),
  "stage2": ("moh-llama3-8b", 100, 2e-5, 1e-6),
  "stage2_schedule": ("moh-llama3-8b", 100, 2e-5, 1e-6),
  "stage2_per_group": ("moh-llama3-8b", 100, 2e-5, 1e-6),
  "stage2_whole_group": ("moh-llama3-8b", 100, 2e-5, 1e-6),
  "70b_stage2": ("llama3-70b", 100, 2e-5, 1e-6),
  "lora": _LORA,
  "qlora": _LORA,
}
_LORA_BATCH = 16
ARGUMENTS = tuple(_STAGES)


def get_config(arg: str = "stage2") -> ml_collections.ConfigDict:
  stage, _, order = arg.partition(":")
  if order and stage == "stage1":
    raise ValueError(f"{arg}: an order of heads is for stage 2")
  name, billions, lr, final_lr = _STAGES[stage]
  is_lora, is_large = stage.endswith("lora"), name == "llama3-70b"
  batch = _LORA_BATCH if is_lora else _BATCH
  steps = int(billions * 1e9) // (batch * _SEQUENCE)
  model = lib.released_model(name, dtype="bfloat16", remat="full")
  if is_large or is_lora:
    heads = model.num_heads[0]
    model = dataclasses.replace(
      model,
      router=lib.RouterConfig("query_norm"),
      shared_heads=(heads // 2,) * model.depth,
      top_k=(heads // 4,) * model.depth,
    )
  structure = stage.removeprefix("stage2_")
  if structure in ("per_group", "whole_group"):
    router = dataclasses.replace(model.router, structure=structure)
    model = dataclasses.replace(model, router=router)
  if order:
    orders = json.loads(pathlib.Path(order).read_text())["head_order"]
    model = dataclasses.replace(model, head_order=orders)
  tune = lib.TuneConfig()
  if stage == "stage2_schedule" or is_lora:
    begins = tuple(steps // 20 * i for i in range(5))
    tune = lib.TuneConfig(begins, (16, 14, 12, 10, 8))
  if is_lora:
    dtype = "int8" if stage == "qlora" else "bfloat16"
    lora = lib.LoraConfig(rank=64, alpha=128.0, base_dtype=dtype)
    tune = dataclasses.replace(tune, lora=lora)
  config = lib.Config(
    model,
    data=lib.TextDataConfig(
      source="tokens",
      path="data/tokens",
      sequence_length=_SEQUENCE,
      batch_size=batch,
    ),
    optim=lib.OptimConfig(
      lr=lr,
      warmup_steps=50,
      final_lr=final_lr,
      b2=0.95,  # ours, the paper does not say
      weight_decay=0.0 if is_lora else 0.1,
      accumulation=4 if is_large else 16 if is_lora else 32,
    ),
    train=lib.TrainConfig(steps=steps),
    tune=tune,
    mesh=lib.MeshConfig(data=1, fsdp=-1),
    checkpoint=lib.CheckpointConfig(every=500),
    # One sequence a device at least.
    eval=lib.EvalConfig(
      every=1000, batch_size=512 if is_large else 8 if is_lora else 256
    ),
    log=lib.LogConfig(every=10),
  )
  return lib.to_config_dict(config)
