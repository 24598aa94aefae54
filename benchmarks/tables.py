"""Writes the measured tables of README.md and docs/ from benchmarks/results.

  python -m benchmarks.tables

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`.
"""

import functools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.rows import Row, read_rows

_ROOT = pathlib.Path(__file__).parent.parent
_PAGES = ("README.md", "docs/benchmarks.md", "docs/results.md")
_MARKED = re.compile(
  r"(<!-- figures: (\w+) -->\n\n)(.*?)(\n\n<!-- end of figures -->)", re.DOTALL
)
# Result, and its model.
_MODELS = {
  "llm": "LLM S-75",
  "vit": "ViT S-80",
  "dit": "DiT S/2-90",
}
# Results of a small language model, by budget.
_PAYS_LLM = "pays_llm_50", "pays_llm_75", "pays_llm_75_last"
_USES = {
  "forward_backward": "training",
  "prefill": "reading a prompt",
  "decode_8": "writing, 8 texts",
}
_CARD_USES = {
  "training": "core_64_causal_forward_backward_4096",
  "reading a prompt": "core_64_causal_4096",
  "writing, 32 texts": "decode_64_4096",
}
_PASSES = {
  "forward": "forward",
  "forward_backward": "forward + backward",
  "causal": "causal forward",
}


def main() -> None:
  """Writes the pages whose tables have changed."""
  for page in _PAGES:
    text = (_ROOT / page).read_text()
    if text != (new := rendered(text)):
      (_ROOT / page).write_text(new)
      print(f"{page} written")


def rendered(text: str) -> str:
  """A page with its tables made again."""
  return _MARKED.sub(lambda m: m[1] + _TABLES[m[2]](m[3]) + m[4], text)


def _load(name: str, device: str = "cpu") -> dict[str, Any]:
  path = _ROOT / "benchmarks" / "results" / f"{name}_{device}.json"
  return json.loads(path.read_text())


def _rows(*names: str) -> list[Row]:
  return [row for name in names for row in read_rows(_load(name))]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _where(*names: str) -> str:
  """The machine and the commits of results."""
  machines = [_load(name)["machine"] for name in names]
  first = machines[0]
  commits = dict.fromkeys(f"`{machine['commit']}`" for machine in machines)
  return (
    f"{first['cores']} cores of {first['cpu']}, jax {first['jax']}, "
    f"commit {', '.join(commits)}"
  )


def _heads(_: str, names: Sequence[str]) -> str:
  """Tables of attention and of layers: times of the form "packed"."""
  found = {
    (row.length, row.share, row.mode): row.to_mha
    for row in _rows(*names)
    if row.implementation == "auto"
    and row.form == "packed"
    and row.share < 1
    and row.length >= 512
  }
  lines = [
    (
      f"{length:,}",
      f"{share:.0%}",
      *(found.get((length, share, mode), "") for mode in _PASSES),
    )
    for length, share in sorted({key[:2] for key in found})
  ]
  header = ("tokens", "active", *_PASSES.values())
  return f"{_where(*names)}:\n\n{markdown(header, lines)}"


def _models(_: str) -> str:
  """The table of whole models: a line for each of their programs."""
  lines = []
  for name, model in _MODELS.items():
    for row in _rows(name):
      if row.implementation != "auto":
        continue
      text = _PASSES.get(row.mode, row.mode.replace("_", ", batch "))
      lines.append((model, text, row.to_mha))
      model = ""
  header = ("", "pass", "time over MHA")
  table = markdown(header, lines)
  return f"{_where(*_MODELS)}:\n\n{table}"


def _pays(_: str) -> str:
  """Where MoH pays: a line for a use, a column for a budget."""
  lines = [
    (f"H100, attention alone: {use}", "4,096", *_card_cells(stage))
    for use, stage in _CARD_USES.items()
  ]
  stages = _load("card", "h100")["stages"]
  [ours], [mha] = (
    stages[f"model_moh-llm-b-50{x}"]["rows"] for x in ("", "-mha")
  )  # fmt: skip
  ratio = f"{ours['step_ms'] / mha['step_ms']:.2f}"
  lines.append(("H100, LLM B: training", "2,048", ratio, "", ""))
  for mode, use in _USES.items():
    cells = (_of_pass(name, mode) for name in _PAYS_LLM)
    lines.append((f"CPU, LLM S: {use}", "4,096", *cells))
  half, most = (
    _of_pass(name, "sampling_step") for name in ("pays_dit_50", "pays_dit_83")
  )
  lines.append(
    ("CPU, DiT-S/2 by the step: sampling", "256", half, f"{most} (83 %)", "")
  )
  header = ("time over MHA's", "tokens", "50 %", "75 %", "75 %, uneven")
  return markdown(header, lines)


def _of_pass(name: str, mode: str) -> str:
  """The time of a model's pass."""
  rows = (row for row in _rows(name) if row.implementation == "auto")
  return next(row.to_mha for row in rows if row.mode == mode)


def _card_cells(stage: str) -> tuple[str, str, str]:
  """Times of kernels on a card: 50 %, 75 %, and half of the layers at 50 %."""
  half, most = (
    row
    for row in read_rows(_load("card", "h100")["stages"][stage])
    if row.implementation == "kernel" and row.share in (0.5, 0.75)
  )
  return half.to_mha, most.to_mha, f"≈ {(half.ratio_to_mha + 1) / 2:.2f}"


def _card(_: str) -> str:
  """The kernels on a card: a line for a pass and a length."""
  result, cells = _load("card", "h100"), {}
  for stage in result["stages"].values():
    dim = stage["settings"].get("head_dim")
    for row in read_rows(stage) if "modes" in stage["settings"] else ():
      if row.implementation == "kernel" and row.share < 0.9:
        cells[row.mode, row.length, dim, row.share] = row.to_mha
  both = "causal_forward_backward"
  names = {**_PASSES, both: "causal forward + backward", "decode": "decode"}
  modes = list(names)
  heads = sorted({key[2:] for key in cells})
  lines = [
    (
      names[mode],
      f"{length:,}",
      *(cells.get((mode, length, *head), "") for head in heads),
    )
    for mode, length in sorted(
      {key[:2] for key in cells}, key=lambda x: (modes.index(x[0]), x[1])
    )
  ]
  header = ("pass", "tokens", *(f"{dim}, {share:.0%}" for dim, share in heads))
  machine = result["machine"]
  return (
    f"{machine['device']}, jax {machine['jax']}, commit `{machine['commit']}`; "
    f"columns are head dim and active heads:\n\n{markdown(header, lines)}"
  )


def _routing(_: str) -> str:
  result = _load("trained_routing")
  has = result["settings"]
  by_name = {row["routing"]: _ratio(row) for row in result["rows"]}
  return (
    f"With a trained router it is {by_name['trained']}, with heads chosen at "
    f"random {by_name['uniformly random']} "
    f"({has['layers']} layers of {has['heads']} heads of {has['head_dim']}, "
    f"{has['share']:.0%} active, {has['tokens']} tokens, causal forward, "
    f"{_where('trained_routing')})."
  )


def _ratio(row: dict[str, Any]) -> str:
  fields = {"ratio_to_mha": row["ratio"], "ratio_spread": row["spread"]}
  return Row("", "", "", None, 1, "", **fields).to_mha


def _costs(before: str, name: str) -> str:
  """Replaces the last column of a table of `compare`, line by line."""
  rows, costs = _load(f"step_costs_{name}")["rows"], {}
  for row in rows:
    ratio = row["seconds"] / rows[0]["seconds"]
    time = _ratio({"ratio": ratio, "spread": row["ratio_spread"]})
    costs[f"`{row['variant']}`"] = time
  lines = []
  for line in before.splitlines():
    cells = [cell.strip() for cell in line[1:-1].split("|")]
    if cells[0] in costs:
      line = f"| {' | '.join([*cells[:-1], costs[cells[0]]])} |"
    lines.append(line)
  return "\n".join(lines)


_TABLES: dict[str, Callable[[str], str]] = {
  "core": functools.partial(_heads, names=("attention", "attention_4096")),
  "layer": functools.partial(_heads, names=("layer",)),
  "models": _models,
  "pays": _pays,
  "card": _card,
  "routing": _routing,
}
for _name in ("vit", "dit", "llm"):
  _TABLES[f"costs_{_name}"] = functools.partial(_costs, name=_name)

if __name__ == "__main__":
  main()
