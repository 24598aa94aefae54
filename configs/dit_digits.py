"""MoH-DiT on scikit-learn's handwritten digits: minutes on a laptop's CPU.

  python train.py --config=configs/dit_digits.py --workdir=DIR
  python -m moh_jax sample --checkpoint DIR --labels 3,3,7 --out grid.png

Arguments: moh (default; 67 % of the heads), mha (the multi-head baseline),
long and mha_long (4,000 steps instead of 1,500), flow (moh by flow matching).
"""

import ml_collections

from moh_jax import config as config_lib

ARGUMENTS = ("moh", "mha", "long", "mha_long", "flow")
_DIFFUSION = {
  # Few steps and few pixels: v is learned much faster than the noise.
  "v": config_lib.DiffusionConfig(space="pixel", prediction="v"),
  "flow": config_lib.DiffusionConfig(
    space="pixel", schedule="flow", prediction="velocity"
  ),
}


def get_config(arg: str = "moh") -> ml_collections.ConfigDict:
  depth = 4
  model = config_lib.DiTConfig(
    input_size=(8, 8),
    patch_size=2,
    width=96,
    num_heads=(6,) * depth,
    head_dim=16,
    shared_heads=(2,) * depth,
    top_k=(2,) * depth,
    learn_sigma=arg != "flow",
  )
  if arg.startswith("mha"):
    model = config_lib.without_router(model)
  long = arg.endswith("long")
  return config_lib.to_config_dict(
    config_lib.Config(
      model=model,
      data=config_lib.DataConfig(
        source="digits", batch_size=128, num_threads=1
      ),
      optim=config_lib.OptimConfig(
        lr=1e-3,
        schedule="cosine",
        final_lr=1e-5,
        warmup_steps=100,
        weight_decay=0.0,
        clip_norm=1.0,
        ema_decay=0.999 if long else 0.99,
      ),
      train=config_lib.TrainConfig(steps=4000 if long else 1500),
      checkpoint=config_lib.CheckpointConfig(every=250),
      eval=config_lib.EvalConfig(every=500, batch_size=120),
      log=config_lib.LogConfig(every=50),
      diffusion=_DIFFUSION["flow" if arg == "flow" else "v"],
      sample=config_lib.SampleConfig(
        every=500,
        num=100,
        method="heun" if arg == "flow" else "dpm",
        steps="20",
        cfg_scale=2.0,
      ),
    )
  )
