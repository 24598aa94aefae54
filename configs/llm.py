"""MoH-LLM from scratch with the paper's recipe (arXiv:2410.11842).

  python -m moh_jax prepare tokenize --data 'C4/*.json.gz' \
    --tokenizer tokenizer.json --out TOKENS/c4  # and so on for each source
  python train.py --config=configs/llm.py:s75 --workdir=DIR \
    --config.data.path=TOKENS --config.mesh.fsdp=16

Arguments: s75, s50, b75, b50 (MoH) and s, b (multi-head baseline), 100 billion
tokens each; s75_200, b_200 and so on train on 200 billion. Beyond the paper,
s50_8k and so on read sequences of 8,192 tokens, as many in a step; s75last and
b75last have all heads in the later half of the layers, half of them before. Of
equal parameters but with 4 key/value heads are sg, bg (baselines), sg75, sg67,
sg50, bg75 and bg50, also as sg67_per_group, bg75_per_group and bg50_per_group
(a token chooses as many heads of each key/value group) and sg75_whole_group,
sg50_whole_group, bg75_whole_group and bg50_whole_group (it chooses groups).
"""

import dataclasses

import ml_collections

from moh_jax import config as lib

# Percent of the sequences: RedPajama's Books, Wikipedia, ArXiv, StackExchange
# and C4, Dolma, and the Pile.
MIX = {
  "books": 4.24,
  "wikipedia": 3.50,
  "arxiv": 4.37,
  "stackexchange": 3.19,
  "c4": 10.94,
  "dolma": 61.28,
  "pile": 12.48,
}
_SEQUENCE = 2048
_BATCH = 2048  # sequences: 4 million tokens
_MODELS = {
  name.partition("llm-")[2].replace("-", ""): name
  for name in lib.released_models()
  if "llm-" in name
}
# Both rates and the warm-up, by the size of the model.
_RATES = {"s": (3e-4, 3e-5, 2000), "b": (5e-4, 5e-5, 500)}
_STRUCTURES = {
  "per_group": ("sg67", "bg75", "bg50"),
  "whole_group": ("sg75", "sg50", "bg75", "bg50"),
}
ARGUMENTS = (
  *_MODELS,
  *(f"{name}_{x}" for name in _MODELS for x in ("200", "8k")),
  *(f"{name}_{x}" for x, names in _STRUCTURES.items() for name in names),
)


def get_config(arg: str = "s75") -> ml_collections.ConfigDict:
  name, _, option = arg.partition("_")
  billions = 200 if option == "200" else 100
  lr, final_lr, warmup_steps = _RATES[name[0]]
  steps = billions * 10**9 // (_BATCH * _SEQUENCE)
  model = lib.released_model(_MODELS[name], dtype="bfloat16")
  sequence, batch = _SEQUENCE, _BATCH
  if option == "8k":
    sequence, batch = 4 * sequence, batch // 4
    rope = lib.RotaryConfig(theta=500_000.0)  # as in LLaMA 3 (arXiv:2407.21783)
    model = dataclasses.replace(model, max_length=sequence, rope=rope)
  if option in _STRUCTURES:
    router = dataclasses.replace(model.router, structure=option)
    model = dataclasses.replace(model, router=router)
  config = lib.Config(
    model,
    data=lib.TextDataConfig(
      source="tokens",
      path="data/tokens",
      mix=tuple(MIX),
      ratios=tuple(MIX.values()),
      sequence_length=sequence,
      batch_size=batch,
    ),
    optim=lib.OptimConfig(
      lr=lr,
      final_lr=final_lr,
      warmup_steps=warmup_steps,
      warmup_lr=1e-7,
      b2=0.95,  # ours, the paper does not say
      weight_decay=0.1,
      accumulation=32,  # 8192 tokens a device at a time on 16 devices
    ),
    train=lib.TrainConfig(steps=steps),
    mesh=lib.MeshConfig(gather="step"),  # each device can hold the gradients
    checkpoint=lib.CheckpointConfig(every=1000, keep_every=5000),
    eval=lib.EvalConfig(every=2000, batch_size=256),
    log=lib.LogConfig(every=20),
  )
  return lib.to_config_dict(config)
