"""MoH-DiT on scikit-learn's handwritten digits: minutes on a laptop's CPU.

  python train.py --config=configs/dit_digits.py --workdir=DIR
  python -m moh_jax sample --checkpoint DIR --labels 3,3,7 --out grid.png

Arguments: moh (default; 67 % of the heads), mha (the multi-head baseline),
long and mha_long (4,000 steps instead of 1,500), flow (moh by flow matching),
timestep (the step of diffusion alone chooses the heads).
"""

import ml_collections

from moh_jax import config as lib

ARGUMENTS = ("moh", "mha", "long", "mha_long", "flow", "timestep")
# Schedule, prediction and sampler. Few steps and few pixels: v is learned much
# faster than the noise.
_DIFFUSION = ("linear", "v", "dpm")
_FLOW = ("flow", "velocity", "heun")


def get_config(arg: str = "moh") -> ml_collections.ConfigDict:
  depth, long = 4, arg.endswith("long")
  schedule, prediction, method = _FLOW if arg == "flow" else _DIFFUSION
  model = lib.DiTConfig(
    input_size=(8, 8),
    width=96,
    num_heads=(6,) * depth,
    head_dim=16,
    shared_heads=(2,) * depth,
    top_k=(2,) * depth,
    learn_sigma=arg != "flow",
    router=lib.RouterConfig("timestep" if arg == "timestep" else "two_stage"),
  )
  config = lib.Config(
    lib.without_router(model) if arg.startswith("mha") else model,
    data=lib.DataConfig("digits", batch_size=128, num_threads=1),
    optim=lib.OptimConfig(
      lr=1e-3,
      final_lr=1e-5,
      warmup_share=0.025 if long else 0.067,
      weight_decay=0.0,
      ema_decay=0.999 if long else 0.99,
    ),
    train=lib.TrainConfig(steps=4000 if long else 1500),
    eval=lib.EvalConfig(batch_size=120),
    diffusion=lib.DiffusionConfig(
      space="pixel", schedule=schedule, prediction=prediction
    ),
    sample=lib.SampleConfig(
      every=None, num=100, method=method, steps="20", cfg_scale=2.0
    ),
  )
  return lib.to_config_dict(config)
