"""Prefill time of vLLM with our plug-in, over that of a dense model.

  OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind python vllm_prefill.py

needs vLLM's build for CPUs and moh_jax, no JAX. It serves models of random
weights in turns and prints the median processor seconds for a prompt of 4,096
tokens.
"""

import json
import os
import pathlib
import random
import statistics
import tempfile
import time

os.environ |= {
  "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
  "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that its time is this process's
  "VLLM_LOGGING_LEVEL": "ERROR",
}

from vllm import LLM, SamplingParams

_TOKENS, _LAYERS, _ROUNDS = 4096, 3, 7
_DENSE = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_size": 512,
  "intermediate_size": 512,
  "num_hidden_layers": _LAYERS,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "head_dim": 64,
  "vocab_size": 1024,
  "max_position_embeddings": 8192,
}
_HALF = {
  "architectures": ["MoHLlamaForCausalLM"],
  "model_type": "moh_llama",
  "shared_heads": [8] * _LAYERS,
  "selected_heads": [8] * _LAYERS,
}
_MODELS = {"dense": _DENSE} | {
  name: _DENSE | _HALF | {"router": {"kind": "two_stage", "structure": name}}
  for name in ("per_group", "free")
}


def _server(folder: pathlib.Path, config: dict) -> LLM:
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config))
  return LLM(
    str(folder),
    load_format="dummy",
    skip_tokenizer_init=True,
    dtype="float32",
    max_model_len=_TOKENS + 64,
    max_num_batched_tokens=_TOKENS + 64,
    max_num_seqs=1,
    enable_prefix_caching=False,
    gpu_memory_utilization=0.3,
  )


def main() -> None:
  """Prints a line for each model."""
  with tempfile.TemporaryDirectory() as root:
    servers = {
      name: _server(pathlib.Path(root, name), config)
      for name, config in _MODELS.items()
    }
  sampling = SamplingParams(max_tokens=1, detokenize=False)
  seconds: dict[str, list[float]] = {name: [] for name in servers}
  for turn in range(2 + _ROUNDS):
    tokens = random.choices(range(1, 1024), k=_TOKENS)
    for name, server in servers.items():
      start = time.process_time()
      server.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)
      if turn > 1:  # the first ones warm up
        seconds[name].append(time.process_time() - start)
  medians = {name: statistics.median(x) for name, x in seconds.items()}
  for name, median in medians.items():
    print(f"{name}: {median:.3f} s, {median / medians['dense']:.2f} of dense")


if __name__ == "__main__":
  main()
