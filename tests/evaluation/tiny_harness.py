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

_SPLITS = """
test_split: test
fewshot_split: shots
fewshot_config: {sampler: first_n}
"""
_TASKS = {
  "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
  "tiny_write": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
  "tiny_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
    aggregation: bits_per_byte
    higher_is_better: false
  - metric: word_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
""",
}
_GROUP = """
group: tiny_group
task: [tiny_choice, tiny_second]
aggregate_metric_list:
  - {metric: acc, weight_by_size: true}
"""


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
  "tiny_lost" a task without data, "tiny_beams" one that asks for beams.

  Args:
    folder: of the YAML files and the data.
  """
  folder = pathlib.Path(folder)
  files = {"choices": CHOICES, "shots": SHOTS, "texts": TEXTS}
  for name, rows in files.items():
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{name}.jsonl").write_text(lines)
  tasks = {name: _task(folder, name, text) for name, text in _TASKS.items()}
  choice = tasks["tiny_choice"]
  tasks["tiny_second"] = f"{choice}num_fewshot: 0\n"
  beams = tasks["tiny_write"].replace("max_gen_toks: 5", "num_beams: 4")
  tasks["tiny_beams"] = beams
  tasks["tiny_lost"] = choice.replace("choices.jsonl", "nope.jsonl")
  for name, text in tasks.items():
    (folder / f"{name}.yaml").write_text(f"task: {name}\n{text}")
  (folder / "tiny_group.yaml").write_text(_GROUP)


def _task(folder, name, text):
  is_text = name == "tiny_text"
  files = {"test": str(folder / f"{'texts' if is_text else 'choices'}.jsonl")}
  if not is_text:
    files["shots"] = str(folder / "shots.jsonl")
  splits = "\ntest_split: test\n" if is_text else _SPLITS
  files = json.dumps(files)
  data = f"dataset_path: json\ndataset_kwargs: {{data_files: {files}}}"
  return f"{data}{splits}{text}metadata: {{version: 1.0}}\n"
