"""`python -m moh_jax bench card`."""

import argparse
import importlib.util
import itertools
import sys
from typing import Any

import jax

from moh_jax.cli import common
from moh_jax.files import replacing
from moh_jax.ops.attention_forms import has_kernels, kernel_options
from moh_jax.ops.target import target
from moh_jax.speed import report
from moh_jax.speed.card import session
from moh_jax.speed.card.amdahl import expectations
from moh_jax.speed.card.crossing import Measured, crossovers, lines
from moh_jax.speed.card.scale import scale_for
from moh_jax.speed.card.store import Store, rows_of
from moh_jax.speed.report import Row

_MODEL_COLUMNS = {
  "model": str,
  "batch": str,
  "step_ms": "{:.1f}".format,
  "units_per_second": "{:,.1f}".format,
  "unit": str,
  "flops": "{:.3e}".format,
  "peak_share": "{:.1%}".format,
  "mfu": "{:.1%}".format,
  "temporary_bytes": "{:.2e}".format,
  "compile_seconds": "{:.1f}".format,
}


def run(args: argparse.Namespace) -> int:
  """Measures this device; 1 if a stage failed or something is not exact."""
  scale = scale_for(jax.default_backend())
  store = session.open_store(args.out, scale)
  outcome = session.run(
    store, scale, args.minutes, lambda line: print(line, flush=True)
  )
  _print_tables(outcome.results)
  entries = lines(
    entry
    for part in _cores(outcome.results)
    for entry in crossovers([part], _backends(part))
  )
  if entries:
    print(
      "\nfor CROSSOVERS of moh_jax/ops/crossovers.py, before the others of the "
      "device:"
    )
    print("\n".join(entries))
  _write_entries(store, entries)
  if importlib.util.find_spec("matplotlib"):
    _draw(store, outcome.results)
  for fault in outcome.faults:
    print(f"error: {fault}", file=sys.stderr)
  if outcome.left:
    print(
      f"{len(outcome.left)} stages are left, {outcome.left[0]} first: run the "
      "same command again"
    )
  return 1 if outcome.faults else 0


def _backends(part: Measured) -> dict[str, str]:
  """What packs, as `Crossover` calls it, by form."""
  device, of_part = target(), (part.dtype, part.head_dim)
  names = {"packed": "xla", "cudnn": "cudnn"}
  if has_kernels(device, *of_part):
    names["kernel"] = kernel_options(device, *of_part)["backend"]
  return names


def _cores(results: dict[str, dict[str, Any]]) -> list[Measured]:
  """The rows of the core, by head dim."""
  cores = [r for name, r in results.items() if name.startswith("core_")]

  def kind(result: dict[str, Any]) -> tuple[int, str]:
    return result["settings"]["head_dim"], result["settings"]["dtype"]

  cores.sort(key=kind)
  return [
    Measured(*key, [row for result in group for row in rows_of(result)])
    for key, group in itertools.groupby(cores, key=kind)
  ]


def _groups(results: dict[str, dict[str, Any]]) -> dict[str, list[Row]]:
  """Rows by what they measure and the head dim: "core, head dim 64"."""
  groups: dict[str, list[Row]] = {}
  for name, result in results.items():
    if result.get("rows"):
      title = f"{name.split('_')[0]}_{result['settings']['head_dim']}"
      groups.setdefault(title, []).extend(rows_of(result))
  for rows in groups.values():
    rows.sort(key=lambda row: (row.mode, row.length))
  return groups


def _print_tables(results: dict[str, dict[str, Any]]) -> None:
  if peaks := results.get("peaks"):
    print(f"matrix peak: {peaks['matrix_peak'] / 1e12:,.1f} TFLOP/s")
    if peaks["memory_peak"]:
      print(f"memory peak: {peaks['memory_peak'] / 1e9:,.1f} GB/s")
  checks = [
    (name, check["case"], check["form"], _text(check["max_error"], "{:.1e}"))
    for name, result in results.items()
    for check in result.get("checks", ())
  ]
  if checks:
    header = ("exactness", "case", "form", "max error")
    print("", common.table(checks, header), sep="\n")
  for title, rows in _groups(results).items():
    print(f"\n{title.replace('_', ', head dim ')}")
    print(common.table(*report.table_cells(rows)))
  _print_layers(results)
  models = [r for name, r in results.items() if name.startswith("model_")]
  if models:
    cells = [
      [
        "" if result[name] is None else write(result[name])
        for name, write in _MODEL_COLUMNS.items()
      ]
      for result in models
    ]
    print("", common.table(cells, list(_MODEL_COLUMNS)), sep="\n")


def _print_layers(results: dict[str, dict[str, Any]]) -> None:
  """Layers beside what Amdahl's law gives for their core's share."""
  groups = _groups(results)
  cells = [
    (row.length, f"{row.share:.1%}", row.to_mha, f"{law:.2f}")
    for title, rows in groups.items()
    if title.startswith("layer_")
    for row, law in expectations(rows, groups.get(f"core{title[5:]}", []))
  ]
  if cells:
    header = ("layer: length", "share", "to MHA", "by Amdahl's law")
    print("", common.table(cells, header), sep="\n")


def _text(value: float | None, form: str) -> str:
  return "" if value is None else form.format(value)


def _write_entries(store: Store, entries: list[str]) -> None:
  with replacing(store.folder / "crossovers.txt") as temporary:
    temporary.write_text("\n".join(entries) + "\n")


def _draw(store: Store, results: dict[str, dict[str, Any]]) -> None:
  """A picture of each table, in place of an older one."""
  for title, rows in _groups(results).items():
    if any(row.ratio_to_mha is not None for row in rows):
      path = store.folder / f"{title}.png"
      report.plot(rows, str(path))
