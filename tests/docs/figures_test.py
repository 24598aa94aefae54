"""The measured tables of README.md and docs/ are those of the results."""

import json
import pathlib

import pytest

from benchmarks import tables

ROOT = pathlib.Path(tables.__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize(
  "page", ("README.md", "docs/benchmarks.md", "docs/results.md")
)
def test_tables_are_those_of_the_results(page):
  text = (ROOT / page).read_text()
  assert "<!-- figures: " in text
  assert tables.rendered(text) == text, "python -m benchmarks.tables"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_name_their_commit(path):
  result = json.loads(path.read_text())
  machine = result.get("machine", result)
  assert machine["commit"]
  assert all((row.get("peak_share") or 0) <= 1 for row in result["rows"]), (
    "above the peak"
  )
