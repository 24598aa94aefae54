"""What vLLM makes of an exported folder: a program without JAX.

`python vllm_checks.py CASE [DTYPE] [--compile]` serves a case of
`transformers_cases.write` and prints one JSON object: "class", vLLM's class of
the model; "dtypes" of its parameters, by the last parts of their names; and
"equal", for each prompt how many of the tokens written are ours, of "count".
"""

import json
import os
import pathlib
import sys

os.environ |= {
  "HF_HUB_OFFLINE": "1",
  "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
  "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the model can be looked at
  "VLLM_LOGGING_LEVEL": "WARNING",
  "VLLM_NO_USAGE_STATS": "1",
}

import numpy as np
from vllm import LLM, SamplingParams

_PROMPT = 8
_COUNT = 32  # tokens that are written after each prompt
_LATER = (0, 5, 17)  # prompts also end so many tokens later


def serve(case: pathlib.Path, dtype: str, compiles: bool) -> dict:
  """Serves prompts of several lengths at the same time."""
  server = LLM(
    str(case / "hf"),
    trust_remote_code=True,
    skip_tokenizer_init=True,
    dtype=dtype,
    enforce_eager=not compiles,
    max_model_len=128,
    max_num_seqs=4,
    gpu_memory_utilization=0.3,
  )
  stored = np.load(case / "io.npz")
  prompts, wanted = [], []
  for tokens, greedy in zip(stored["tokens"], stored["greedy"]):
    text = [*tokens[:_PROMPT].tolist(), *greedy.tolist()]
    for more in _LATER:
      end = _PROMPT + more
      prompts.append({"prompt_token_ids": text[:end]})
      wanted.append(text[end : end + _COUNT])
  options = SamplingParams(
    temperature=0, max_tokens=_COUNT, ignore_eos=True, detokenize=False
  )
  outputs = server.generate(prompts, options, use_tqdm=False)
  written = [list(output.outputs[0].token_ids) for output in outputs]
  (look,) = server.apply_model(_look)
  return {
    **look,
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
  return {"class": type(model).__name__, "dtypes": dtypes}


if __name__ == "__main__":
  options = [x for x in sys.argv[2:] if x != "--compile"]
  found = serve(
    pathlib.Path(sys.argv[1]),
    options[0] if options else "float32",
    "--compile" in sys.argv,
  )
  print(json.dumps(found))
