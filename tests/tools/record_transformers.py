"""Records what transformers computes for tiny models of the LLaMA family.

Needs torch and transformers, and nothing of this project. The results stand
beside the other recorded cases, one file per version of transformers:

  HF_HUB_OFFLINE=1 python tests/tools/record_transformers.py tests/goldens

Weights are not stored: `weight` makes each from its name and shape.
"""

import json
import pathlib
import sys
import tempfile
import zlib

import numpy as np

VOCAB, PROMPT, NEW = 61, 8, 64
PLACES = slice(2, None, 3)  # tokens whose logits are kept
_TINY = dict(
  vocab_size=VOCAB, hidden_size=32, intermediate_size=40,
  num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
  max_position_embeddings=128,
  bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
_SCALED = {"factor": 4.0, "original_max_position_embeddings": 32}
_YARN = _SCALED | {"rope_type": "yarn"}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0}
_LLAMA3 |= _SCALED | {"high_freq_factor": 4.0}


def _yarn(**more):
  return {"rope_scaling": _YARN | more, "rope_theta": 100.0}


_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 90}
_QWEN_WINDOW |= {"max_window_layers": 1}
# Name of a case: architecture and what differs from `_TINY`.
CASES = {
  "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
  "llama_llama3": ("Llama", {"rope_scaling": _LLAMA3, "rope_theta": 100.0}),
  "mistral": ("Mistral", {"sliding_window": None, "num_key_value_heads": 4}),
  "mistral_window": ("Mistral", {"sliding_window": 100}),
  "qwen2_window": ("Qwen2", _QWEN_WINDOW),
  "qwen3_tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
  "qwen3_biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
  "qwen3_yarn": ("Qwen3", {"head_dim": 16, **_yarn()}),
  "yarn_factor": ("Llama", _yarn(attention_factor=1.3)),
  "yarn_half_mscale": ("Llama", _yarn(mscale=0.7)),
}


def _long(positions: int, **more):
  return _YARN | {"original_max_position_embeddings": positions} | more


# Rotations of published sizes: width of a head, theta, scaling.
_DEEPSEEK = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
_DEEPSEEK |= {"mscale_all_dim": 0.8, "factor": 40.0}
_EQUAL = {"beta_fast": 2.0, "beta_slow": 2.0}
ROTATIONS = {
  "qwen": (128, 1e6, _long(32768)),
  "deepseek": (64, 1e4, _long(4096, **_DEEPSEEK)),
  "untruncated": (64, 150000.0, _long(4096, factor=32.0, truncate=False)),
  "short": (16, 100.0, _long(4)),
  "equal_betas": (32, 1e4, _long(2048, truncate=False, **_EQUAL)),
}


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """Random weights of a tensor, float32, by its public name."""
  rng = np.random.default_rng(zlib.crc32(name.encode()))
  values = rng.normal(size=shape)
  scaled = values * 0.3 + 1 if "norm" in name else values * 0.3
  return scaled.astype(np.float32)


def tokens(count: int = 24) -> np.ndarray:
  """Two texts [2, count] int64."""
  return np.random.default_rng(5).integers(0, VOCAB, (2, count))


def main(folder: str) -> None:
  """Runs all cases and writes one file."""
  import torch
  import transformers

  recorded = {}
  for name, (kind, changes) in CASES.items():
    config = getattr(transformers, f"{kind}Config")(**_TINY | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    shapes = {n: tuple(x.shape) for n, x in model.state_dict().items()}
    if config.tie_word_embeddings:
      del shapes["lm_head.weight"]
    made = {n: torch.tensor(weight(n, shape)) for n, shape in shapes.items()}
    model.load_state_dict(made, strict=False)
    model.tie_weights()
    ids = torch.tensor(tokens())
    with torch.no_grad():
      recorded[f"{name}/logits"] = model(ids).logits[:, PLACES].numpy()
      written = model.generate(
        ids[:, :PROMPT],
        attention_mask=torch.ones_like(ids[:, :PROMPT]),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
      )
    recorded[f"{name}/written"] = written[:, PROMPT:].numpy().astype(np.int16)
    with tempfile.TemporaryDirectory() as saved:
      model.save_pretrained(saved)
      text = (pathlib.Path(saved) / "config.json").read_text()
    stored = {"config": json.loads(text), "shapes": shapes}
    recorded[f"{name}/meta"] = np.array(json.dumps(stored))
  for name, (dim, theta, scaling) in ROTATIONS.items():
    config = transformers.LlamaConfig(
      head_dim=dim,
      rope_theta=theta,
      rope_scaling=dict(scaling),
      max_position_embeddings=scaling["original_max_position_embeddings"],
    )
    function = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    frequencies, factor = function(config, "cpu")
    recorded[f"rotation/{name}"] = np.array([*frequencies.tolist(), factor])
  path = pathlib.Path(folder) / f"transformers_{transformers.__version__}.npz"
  np.savez_compressed(path, **recorded)


if __name__ == "__main__":
  main(sys.argv[1])
