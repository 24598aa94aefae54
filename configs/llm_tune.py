"""A trained multi-head language model, such as a LLaMA, tuned into MoH.

  python -m moh_jax heads --checkpoint DENSE --data TOKENS --json heads.json
  python train.py --config=configs/llm_tune.py:heads.json --workdir=DIR \
    --config.train.init_from=DENSE --config.data.path=TOKENS

The model is that of the checkpoint. Arguments: FILE (of `heads --json`; the
query-norm router, the most important half of the heads shared, a quarter chosen
by each token, as in the paper's stage 2), dense (no router: the paper's stage
1, and the baseline), lora:FILE and lora (the same by adapters; the model that
they are trained on is their teacher where a router leaves heads out). One of
them must be given.
"""

import json
import pathlib

import ml_collections


def get_config(arg: str = "") -> ml_collections.ConfigDict:
  first, _, rest = arg.partition(":")
  is_lora = first == "lora"
  order = rest if is_lora else arg
  model, lora, distill = {}, {}, {}
  if is_lora:
    lora = {"rank": 16, "alpha": 16.0, "base_dtype": "bfloat16"}
  if order != "dense" and arg != "lora":
    file = pathlib.Path(order)
    if not file.is_file():
      raise ValueError(
        f"{order!r} must be 'dense', 'lora' or a file of `heads --json`"
      )
    orders = json.loads(file.read_text())["head_order"]
    depth, heads = len(orders), len(orders[0])
    model = {
      "router": {"kind": "query_norm"},
      "shared_heads": (heads // 2,) * depth,
      "top_k": (heads // 4,) * depth,
      "head_order": orders,
    }
    distill = {"weight": 1.0} if is_lora else {}
  data = {"source": "tokens", "path": "TOKENS", "sequence_length": 1024}
  return ml_collections.ConfigDict(
    {
      "model": model,
      "data": {**data, "batch_size": 32},
      # The rates and the weights of the paper's stage 2.
      "optim": {
        "lr": 2e-4 if is_lora else 2e-5,  # of adapters all is ours
        "final_lr": 1e-5 if is_lora else 1e-6,
        "b2": 0.95,  # ours, the paper does not say
        "weight_decay": 0.0 if is_lora else 0.1,
      },
      "tune": {"lora": lora, "distill": distill},
      "train": {"steps": 1000, "init_from": ""},
      "mesh": {"data": 1, "fsdp": -1},
      "eval": {"batch_size": 32},
      "log": {"every": 10},
    }
  ).lock()
