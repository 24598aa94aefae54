"""MoH-LLM from scratch with the paper's recipe (arXiv:2410.11842).

  python -m moh_jax prepare tokenize --data 'C4/*.json.gz' \
    --tokenizer tokenizer.json --out TOKENS/c4  # and so on for each source
  python train.py --config=configs/llm.py:s75 --workdir=DIR \
    --config.data.path=TOKENS --config.mesh.fsdp=16

Arguments: s75, s50, b75, b50 (MoH) and s, b (multi-head baseline), 100 billion
tokens each; s75_200, b_200 and so on train on 200 billion.
"""

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
ARGUMENTS = (*_MODELS, *(f"{name}_200" for name in _MODELS))


def get_config(arg: str = "s75") -> ml_collections.ConfigDict:
  name, _, billions = arg.partition("_")
  lr, final_lr, warmup_steps = _RATES[name[0]]
  steps = int(billions or 100) * 10**9 // (_BATCH * _SEQUENCE)
  config = lib.Config(
    lib.released_model(_MODELS[name], dtype="bfloat16"),
    data=lib.TextDataConfig(
      source="tokens",
      path="data/tokens",
      mix=tuple(MIX),
      ratios=tuple(MIX.values()),
      sequence_length=_SEQUENCE,
      batch_size=_BATCH,
    ),
    optim=lib.OptimConfig(
      lr=lr,
      final_lr=final_lr,
      warmup_steps=warmup_steps,
      warmup_lr=1e-7,
      b2=0.95,  # ours, the paper does not say
      weight_decay=0.1,
      accumulation=32,  # four sequences a device at a time on 16 devices
    ),
    train=lib.TrainConfig(steps=steps),
    mesh=lib.MeshConfig(gather="step"),  # each device can hold the gradients
    checkpoint=lib.CheckpointConfig(every=1000, keep_every=5000),
    eval=lib.EvalConfig(every=2000, batch_size=256),
    log=lib.LogConfig(every=20),
  )
  return lib.to_config_dict(config)
