"""Seconds per decoded token, ours against transformers on the same machine.

  MOH_JAX_TRANSFORMERS_PYTHON=PYTHON python -m benchmarks.decode_transformers \
    --json benchmarks/results/decode_transformers_cpu.json

A released model with random weights is exported, and both write on greedily
from the same prompts; PYTHON has PyTorch and transformers. The time of a step
is that of many tokens less that of few, so prompts and start-up do not count.
Ours and theirs run in turns.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks.common import finish, make_parser
from moh_jax import get_model, restore
from moh_jax.cli.bench import random_params
from moh_jax.config.llm import Sampling
from moh_jax.convert.checkpoints import export
from moh_jax.convert.llama import released_run
from moh_jax.data.tokenizers import BytesTokenizer
from moh_jax.inference.generate import Generator
from moh_jax.runtime import checkpoint

_TOKENS = (8, 72)  # few and many
_PROMPT_TOKENS = 128
_TORCH = pathlib.Path(__file__).with_name("torch_decode.py")


def main() -> None:
  """Measures and prints a table."""
  parser = make_parser(__doc__, rounds=3)
  parser.add_argument("--model", default="moh-llm-s-75")
  args = parser.parse_args()
  config = released_run(get_model(args.model)[1], {})
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    ours, theirs = f"{folder}/ours", f"{folder}/hf"
    checkpoint.save_params(
      ours, random_params(config), checkpoint.Metadata(config)
    )
    export(ours, theirs)
    for dtype in ("float32", "bfloat16"):
      for batch in (1, 8):
        rng, shape = np.random.default_rng(0), (batch, _PROMPT_TOKENS)
        prompts = rng.integers(300, 1000, shape).tolist()
        rows += _compare(ours, theirs, dtype, prompts, args.rounds)
  finish(args, rows, model=args.model)


def _compare(
  ours: str, theirs: str, dtype: str, prompts: list[list[int]], rounds: int
) -> list[dict]:
  """Rows of one dtype and batch: ours before and after each of theirs."""
  ours_once = _ours(ours, dtype, prompts)
  times = {"moh_jax": [ours_once() for _ in range(rounds)]}
  for attention in ("eager", "sdpa"):
    settings = {
      "attention": attention,
      "dtype": dtype,
      "prompts": prompts,
      "tokens": _TOKENS,
      "rounds": rounds,
      "threads": os.cpu_count(),
    }
    python = os.environ.get("MOH_JAX_TRANSFORMERS_PYTHON", sys.executable)
    done = subprocess.run(
      [python, _TORCH, theirs],
      input=json.dumps(settings),
      capture_output=True,
      text=True,
      check=False,
      env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
      raise RuntimeError(f"{_TORCH.name}: {done.stderr[-2000:]}")
    times[f"transformers, {attention}"] = json.loads(done.stdout)
    times["moh_jax"] += [ours_once() for _ in range(rounds)]
  middle = {name: statistics.median(values) for name, values in times.items()}
  return [
    {
      "dtype": dtype,
      "batch": len(prompts),
      "program": name,
      "ms_per_step": round(1e3 * seconds, 2),
      "over_ours": round(seconds / middle["moh_jax"], 2),
    }
    for name, seconds in middle.items()
  ]


def _ours(directory: str, dtype: str, prompts: list[list[int]]):
  """A function that measures the seconds of one step."""
  restored = restore(directory, dtype=dtype)
  generator = Generator(restored, BytesTokenizer(), batch_size=len(prompts))
  del restored

  def seconds(tokens: int) -> float:
    began = time.perf_counter()
    generator.generate(prompts, Sampling(max_new_tokens=tokens))
    return time.perf_counter() - began

  few, many = _TOKENS
  seconds(few), seconds(many)  # compiles
  return lambda: (seconds(many) - seconds(few)) / (many - few)


if __name__ == "__main__":
  main()
