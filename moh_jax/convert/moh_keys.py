"""Keys of config.json that our architecture has beside those of a LLaMA.

They are what `transformers_code/configuration_moh.py` reads.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moh_jax.config import LLMConfig

# Key of config.json -> field of `LLMConfig`.
FIELDS = {
  "router": "router",
  "shared_heads": "shared_heads",
  "selected_heads": "top_k",
  "heads_per_layer": "num_heads",
  "head_order": "head_order",
  "qkv_bias": "qkv_bias",
  "out_bias": "out_bias",
  "qk_norm": "qk_norm",
}
_NEEDED = ("shared_heads", "selected_heads")  # beside a router
_AUTO_MAP = {
  "AutoConfig": "configuration_moh.MoHLlamaConfig",
  "AutoModel": "modeling_moh.MoHModel",
  "AutoModelForCausalLM": "modeling_moh.MoHLlamaForCausalLM",
}


def write(model: LLMConfig, balance_weight: float) -> dict[str, Any]:
  """The keys of a model, and where transformers finds its code.

  Args:
    model: the model section.
    balance_weight: weight of the balance loss in the loss.
  """
  keys = {key: getattr(model, field) for key, field in FIELDS.items()}
  keys["router"] = dataclasses.asdict(model.router)
  if len(set(model.num_heads)) == 1:
    keys["heads_per_layer"] = None
  keys["head_order"] = model.head_order or None
  return {
    **keys,
    "router_aux_loss_coef": balance_weight,
    "auto_map": dict(_AUTO_MAP),
  }


def read(stored: Mapping[str, Any]) -> dict[str, Any]:
  """The fields of `LLMConfig` that the keys of a config.json give.

  Args:
    stored: a parsed config.json, without values that are null. Exports of older
      versions have none of the keys.

  Raises:
    ValueError: there is a router, but no numbers of heads.
  """
  for key in _NEEDED:
    if "router" in stored and key not in stored:
      raise ValueError(f"has a router, but no {key!r}")
  return {field: stored[key] for key, field in FIELDS.items() if key in stored}
