"""Times greedy decoding in transformers: a program without JAX.

  python benchmarks/torch_decode.py FOLDER < SETTINGS.json

Started by `benchmarks.decode_transformers`, which says what the settings are;
prints seconds per step as JSON.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
  """Reads settings, measures, prints."""
  settings = json.load(sys.stdin)
  torch.set_num_threads(settings["threads"])
  model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1],
    trust_remote_code=True,
    attn_implementation=settings["attention"],
    dtype=getattr(torch, settings["dtype"]),
  ).eval()
  prompts = torch.tensor(settings["prompts"])

  def seconds(tokens: int) -> float:
    began = time.perf_counter()
    model.generate(
      prompts,
      attention_mask=torch.ones_like(prompts),
      min_new_tokens=tokens,
      max_new_tokens=tokens,
      do_sample=False,
      pad_token_id=0,
    )
    return time.perf_counter() - began

  few, many = settings["tokens"]
  seconds(few)
  times = []
  with torch.inference_mode():
    for _ in range(settings["rounds"]):
      times.append((seconds(many) - seconds(few)) / (many - few))
  print(json.dumps(times))


if __name__ == "__main__":
  main()
