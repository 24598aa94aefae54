"""What vLLM makes of an exported folder: a program without JAX.

`python vllm_checks.py CASE` serves the folder `hf` of a case that
`transformers_cases.write` wrote, and prints one JSON object: "class", vLLM's
class of the model; "dtypes" of its parameters, by the last parts of their
names; "heads" of the queries that each layer's attention gets; and "equal", for
each of 64 prompts how many of the tokens written are ours, of "count". Beside
adapters (`--lora`) every other prompt is the base's.
"""

import argparse
import json
import os
import pathlib

os.environ |= {
  "HF_HUB_OFFLINE": "1",
  "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # so that `_look` goes to workers
  "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
  "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the model can be looked at
  "VLLM_LOGGING_LEVEL": "WARNING",
  "VLLM_NO_USAGE_STATS": "1",
}

import numpy as np
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

_PROMPT = 8
_COUNT = 32  # tokens that are written after each prompt
_MOST_LATER = 32  # prompts also end up to so many tokens later


def serve(case: pathlib.Path, options: argparse.Namespace) -> dict:
  """Serves prompts of several lengths at the same time."""
  lora = options.lora and LoRARequest("tuned", 1, str(case / options.lora))
  more = {"max_lora_rank": 8, "max_loras": options.max_loras} if lora else {}
  server = LLM(
    str(case / options.model),
    trust_remote_code=options.trust,
    skip_tokenizer_init=True,
    dtype=options.dtype,
    enforce_eager=not options.compile,
    tensor_parallel_size=options.devices,
    enable_lora=bool(lora),
    max_model_len=options.length,
    max_num_seqs=64,
    gpu_memory_utilization=0.3,
    **more,
  )
  stored = np.load(case / "io.npz")
  names = ("greedy", "greedy_base") if lora else ("greedy",)
  prompts, wanted, loras = [], [], []
  later = range(min(_MOST_LATER, options.length - _PROMPT - _COUNT))
  for row, tokens in enumerate(stored["tokens"]):
    for more in later:
      name, end = names[more % len(names)], _PROMPT + more
      text = [*tokens[:_PROMPT].tolist(), *stored[name][row].tolist()]
      prompts.append({"prompt_token_ids": text[:end]})
      wanted.append(text[end : end + _COUNT])
      loras.append(lora if name == "greedy" else None)
  sampling = SamplingParams(
    temperature=0, max_tokens=_COUNT, ignore_eos=True, detokenize=False
  )
  outputs = server.generate(
    prompts, sampling, use_tqdm=False, lora_request=loras
  )
  written = [list(output.outputs[0].token_ids) for output in outputs]
  return {
    **server.apply_model(_look)[0],
    "count": _COUNT,
    "equal": [
      sum(map(int.__eq__, *pair)) for pair in zip(written, wanted, strict=True)
    ],
  }


def _look(model) -> dict:
  dtypes = {
    ".".join(name.split(".")[-3:]): str(parameter.dtype)
    for name, parameter in model.named_parameters()
  }
  heads = [layer.self_attn.attn.num_heads for layer in model.model.layers]
  return {"class": type(model).__name__, "dtypes": dtypes, "heads": heads}


if __name__ == "__main__":
  parser = argparse.ArgumentParser()
  parser.add_argument("case", type=pathlib.Path)
  parser.add_argument("--model", default="hf")
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--lora")
  parser.add_argument("--max-loras", type=int, default=1)
  parser.add_argument("--devices", type=int, default=1)
  parser.add_argument("--length", type=int, default=128)
  parser.add_argument("--compile", action="store_true")
  parser.add_argument("--trust", action="store_true")
  given = parser.parse_args()
  print(json.dumps(serve(given.case, given)))
