"""The model card of an exported language model: README.md of its folder."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from moh_jax.config import Config, LayerGroup
from moh_jax.convert.converter import Exported
from moh_jax.json_files import read_json

_PAPER = "https://arxiv.org/abs/2410.11842"
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_CODE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER"{trust})
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```
"""
_RELEASED = """\
The weights and `config.json` are those of a plain LLaMA. With the modeling file
of the MoH-LLaMA3 release (github.com/SkyworkAI/MoH) they are this model; with
transformers' own LLaMA they are a model without routing.
"""


def check_license(name: str) -> None:
  """Checks that a licence's identifier can stand in the card's header.

  Raises:
    ValueError: it is no identifier.
  """
  if name and not _LICENSE.fullmatch(name):
    raise ValueError(
      f"--license {name!r} must be an identifier of lower-case letters, digits "
      "and '.+-', such as apache-2.0, llama3 or other"
    )


def read_scores(path: str, step: int) -> dict[str, float]:
  """Reads what `evaluate --json` or `evaluate-lm --json` wrote.

  Args:
    path: the file.
    step: step of the checkpoint that is exported.

  Returns:
    The numbers by name; those within other objects as "task.metric".

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it holds no numbers, or those of another step.
  """
  try:
    stored = read_json(path)
  except ValueError as error:
    raise ValueError(f"--scores {error}") from error
  found = dict(_numbers("", stored))
  scored = found.pop("step", step)
  if scored != step:
    raise ValueError(
      f"--scores {path}: has the scores of step {scored:g}, the checkpoint is "
      f"of step {step}"
    )
  if not found:
    raise ValueError(f"--scores {path}: holds no numbers")
  return found


def model_card(exported: Exported, *, has_code: bool) -> str:
  """Makes the text of the card.

  Args:
    exported: the model.
    has_code: whether its code lies in the folder.
  """
  model = exported.config.model
  routed = model.router.kind != "none"
  header = {
    "license": exported.license,
    "library_name": "transformers",
    "pipeline_tag": "text-generation",
  }
  lines = [f"{name}: {value}" for name, value in header.items() if value]
  lines += ["tags:", "- mixture-of-head" if routed else "- llama"]
  title = "Mixture-of-Head language model" if routed else "Language model"
  use = _CODE.format(trust=", trust_remote_code=True" if has_code else "")
  if exported.form == "released":
    use = _RELEASED
  parts = [
    "---\n" + "\n".join(lines) + "\n---\n",
    f"# {title}\n",
    f"Layers choose heads for every token: {_PAPER}.\n" if routed else "",
    _table(
      ("", ""),
      [
        ("Parameters", f"{exported.parameters:,}"),
        ("Stored as", exported.dtype),
        ("Active heads", f"{model.activated_share:.1%}"),
        ("Router", _router(model.router)),
        ("Layers, width", f"{model.depth}, {model.width}"),
        ("Key/value heads of a layer", model.num_kv_heads),
        ("Vocabulary", f"{model.vocab_size:,}"),
        ("Longest text", f"{model.max_length:,} tokens"),
        ("License", exported.license or "not stated"),
      ],
    ),
    "## Use\n\n" + use,
    "## Heads of each layer\n\n" + _budgets(model.layer_groups()),
    "## Training\n\n" + _training(exported.config, exported.step),
  ]
  if exported.scores:
    rows = [(name, f"{value:.6g}") for name, value in exported.scores.items()]
    parts.append("## Scores\n\n" + _table(("metric", "value"), rows))
  return "\n".join(part for part in parts if part)


def _numbers(name: str, value: Any):
  """Yields all numbers of a parsed JSON value with their names."""
  if isinstance(value, Mapping):
    items = value.items()
  elif isinstance(value, list):
    items = enumerate(value)
  else:
    if isinstance(value, int | float) and not isinstance(value, bool):
      yield name, value
    return
  for key, inner in items:
    yield from _numbers(f"{name}.{key}" if name else str(key), inner)


def _router(router: Any) -> str:
  if router.kind == "none":
    return "none, all heads are active"
  return f"{router.kind}, gates as in the {router.gate_form} form"


def _budgets(groups: tuple[LayerGroup, ...]) -> str:
  rows, first = [], 0
  for group in groups:
    budget, last = group.budget, first + group.depth - 1
    span = f"{first}-{last}" if last > first else str(first)
    first = last + 1
    heads = budget.num_heads, budget.shared, budget.top_k
    rows.append((span, *heads, f"{budget.share:.1%}"))
  return _table(
    ("layers", "heads", "always active", "chosen by a token", "active"), rows
  )


def _training(config: Config, step: int) -> str:
  """What the run's config says; paths stay out of the card."""
  if not step:
    return "Converted from other weights; not trained further.\n"
  data, optim, train = config.data, config.optim, config.train
  tokens = step * data.batch_size * data.sequence_length
  mix = ", ".join(f"{n} {r:g} %" for n, r in zip(data.mix, data.ratios))
  tune = config.sections["tune"]
  rows = [
    ("Steps", f"{step:,} of {train.steps:,}"),
    ("Batch", f"{data.batch_size:,} texts of {data.sequence_length:,} tokens"),
    ("Tokens", f"{tokens:,}"),
    ("Data", mix or data.source),
    ("Start", "other weights" if train.init_from else "random"),
    ("Seed", train.seed),
    ("Weight of the balance loss", train.balance_weight),
    ("Heads chosen by a token, by step", _schedule(tune)),
    *((f"optim.{n}", v) for n, v in dataclasses.asdict(optim).items()),
  ]
  return _table(("", ""), [row for row in rows if row[1] != ""])


def _schedule(tune: Any) -> str:
  steps = zip(tune.top_k_steps, tune.top_k_values)
  return ", ".join(f"{value} from {step:,}" for step, value in steps)


def _table(names: tuple[str, ...], rows: list[tuple]) -> str:
  lines = [names, ("---",) * len(names), *rows]
  return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
