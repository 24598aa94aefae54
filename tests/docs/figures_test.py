"""The measured tables of README.md and docs/ are those of the results."""

import dataclasses
import json
import pathlib

import pytest

from benchmarks import tables
from moh_jax.speed.report import Row

ROOT = pathlib.Path(tables.__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize(
  "page", ("README.md", "docs/benchmarks.md", "docs/results.md")
)
def test_tables_are_those_of_the_results(page):
  text = (ROOT / page).read_text()
  assert "<!-- figures: " in text
  assert tables.rendered(text) == text, "python -m benchmarks.tables"


def test_slower_forms_of_multi_head_attention_have_no_column(monkeypatch):
  rows = [
    Row("cpu", "attention", "causal", 256, *row[:2], ratio_to_mha=row[2],
        form=row[3], computed_share=row[0])
    for row in (
      (1.0, "dense", 1.25, "dense"),
      (1.0, "mha", 1.0, "blocked"),
      (0.5, "auto", 0.75, "packed"),
    )
  ]  # fmt: skip
  machine = dict.fromkeys(("cores", "cpu", "jax", "commit"), "?")
  result = {"machine": machine, "rows": list(map(dataclasses.asdict, rows))}
  monkeypatch.setattr(tables, "_load", lambda name: result)
  *_, line = tables._heads("attention")("").splitlines()
  cells = "| 256 | causal forward | blocked | packed, 50% | 0.75 |"
  assert line == cells


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_name_their_commit(path):
  result = json.loads(path.read_text())
  machine = result.get("machine", result)
  assert machine["commit"]
  assert all((row.get("peak_share") or 0) <= 1 for row in result["rows"]), (
    "above the peak"
  )
