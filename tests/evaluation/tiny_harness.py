"""Tasks of the harness that need no network.

Importing this sets what the harness's libraries read when they are imported:
nothing is downloaded, and what they write is thrown away.
"""

import atexit
import json
import os
import pathlib
import shutil
import tempfile
import types

_HOME = tempfile.mkdtemp(prefix="moh_jax_tests_hf_")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ |= {
  "HF_HOME": _HOME,
  "HF_HUB_OFFLINE": "1",
  "HF_DATASETS_OFFLINE": "1",
  "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}

# More than the right answers, so that accuracies differ from 0 and 1.
CHOICES = [
  {"question": "2+2=", "choices": ["4", "5", "6"], "answer": 0},
  {"question": "The sky is", "choices": ["green", "blue"], "answer": 1},
  {"question": "A cat says", "choices": ["moo", "meow", "quack"], "answer": 1},
  {"question": "ab", "choices": ["c", "d"], "answer": 0},
  {"question": "Ice is ", "choices": ["hot", "cold"], "answer": 1},
]
SHOTS = [
  {"question": "1+1=", "choices": ["2", "3"], "answer": 0},
  {"question": "3+1=", "choices": ["3", "4"], "answer": 1},
]
TEXTS = [
  {"text": "It was a bright cold day in April, and the clocks were striking."},
  {"text": "caf\u00e9 au lait"},
]


_TASKS = {
  "tiny_choice": {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
  },
  "tiny_write": {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5},
    "metric_list": [{"metric": "exact_match"}],
  },
  "tiny_text": {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
  },
}
_GROUP = {
  "group": "tiny_group",
  "task": ["tiny_choice", "tiny_second"],
  "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
}


class CountingScorer:
  """Scores by the number of tokens, in windows of two; keeps what it scores."""

  max_length = 40

  def __init__(self, nats=1.0):
    self.nats, self.calls = nats, []

  def log_likelihoods(self, pairs, progress):
    del progress
    self.calls.append(list(pairs))
    return [
      types.SimpleNamespace(
        log_likelihood=-self.nats * len(scored), greedy=True
      )
      for _, scored in self.calls[-1]
    ]

  def rolling(self, tokens, prefix_id):
    every = [prefix_id, *tokens]
    return [
      (every[i : i + 1], every[i + 1 : i + 3]) for i in range(0, len(tokens), 2)
    ]


def write_tasks(folder):
  """Writes the tasks "tiny_choice", "tiny_write", "tiny_text" and others.

  "tiny_second" is "tiny_choice" without examples, "tiny_group" both of them,
  "tiny_lost" a task without data.

  Args:
    folder: of the YAML files and the data.
  """
  folder = pathlib.Path(folder)
  for name, rows in (("choices", CHOICES), ("shots", SHOTS), ("texts", TEXTS)):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(lines)

  def write(name, of="", data="choices", **changes):
    files = {"test": str(folder / f"{data}.jsonl")}
    task = _TASKS[of or name] | {"task": name, "test_split": "test"}
    if data != "texts":
      files["shots"] = str(folder / "shots.jsonl")
      task["fewshot_split"] = "shots"
      task["fewshot_config"] = {"sampler": "first_n"}
    task |= {"dataset_path": "json", "dataset_kwargs": {"data_files": files}}
    task |= {"metadata": {"version": 1.0}, **changes}
    (folder / f"{name}.yaml").write_text(json.dumps(task))

  write("tiny_choice")
  write("tiny_write")
  write("tiny_text", data="texts")
  write("tiny_second", "tiny_choice", num_fewshot=0)
  write("tiny_lost", "tiny_choice", data="nope")
  (folder / "tiny_group.yaml").write_text(json.dumps(_GROUP))
