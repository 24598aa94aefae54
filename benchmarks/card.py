"""Measures all that is worth measuring on one GPU or TPU.

  python -m benchmarks.card --out card --minutes 8

Each stage is a command whose JSON file lies in the folder, those of the most
value first. A stage begins only if the last one of its kind would have ended in
time: the same command goes on where it stopped, also after a kill. A stage that
fails is one line; the others go on, and the exit status is 1.
"""

import argparse
import contextlib
import gc
import io
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import attention, decode, exact, layer, model, step
from benchmarks.common import attempt, table_of
from benchmarks.rows import Row, failure, machine, read_rows, table_cells
from moh_jax.cli.command import table
from moh_jax.cli.main import report_errors
from moh_jax.ops.attention import kernels_of
from moh_jax.ops.target import target
from moh_jax.runtime.files import read_json

_ORDER = "forward", "causal", "forward_backward", "causal_forward_backward"
# What a training step is timed of, with the options of `benchmarks.step`: the
# examples are for 80 GB.
_VARIANTS = "moh50", "mha", "moh75", "moh75-last"
_STEPS = (
  *(f"moh-llm-b-50 --length 2048 --batch 32 --variant {x}" for x in _VARIANTS),
  *(f"moh-llm-b-50 --length 8192 --batch 8 --variant {x}" for x in _VARIANTS),
  *(
    f"moh-llm-bg-50 --length 8192 --batch 8 --variant {x}"
    for x in ("moh50-per_group", "mha", "moh75-per_group")
  ),
  *(f"moh-llm-b-50 --length 16384 --batch 4 --variant {x}" for x in _VARIANTS),
  *(f"moh-dit-xl2-90 --batch 256 --variant {x}" for x in ("config", "mha")),
  *(f"moh-vit-b50 --batch 128 --variant {x}" for x in ("config", "mha")),
)
# Passes beside those of MHA, with the options of `benchmarks.model`.
_PASSES = (
  "moh-dit-xl2-75 --config.model.router.kind=timestep --config.data."
  "batch_size=32",
  "moh-dit-xl2-75 --config.data.batch_size=32",
  "moh-llm-b-50 --config.model.max_length=8192 --config.data."
  "sequence_length=8192 --config.data.batch_size=2",
)
# The shapes of the stages; of several, those of the most value come first.
SHAPES: dict[str, Any] = {
  "heads": (32, "bfloat16", "50,75,90.625", 5),
  "dims": (64, 128),
  "lengths": (4096, 8192, 16384, 512, 256, 1024, 2048),
  "layers": (512, 4096, 256, 1024),
  "slots": (4096, 1024),
  # Float32 takes other tiles, but no other path at larger head dims.
  "exact": (("bfloat16", (64, 128, 256)), ("float32", (64,))),
  "steps": _STEPS,
  "passes": _PASSES,
  "tokens": 16384,
  "texts": 32,
}
_Stage = tuple[str, Callable[[list[str]], int], list[str]]


def main(argv: Sequence[str] | None = None) -> int:
  """Measures this device; 1 if a stage failed or something is not exact."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", required=True, metavar="DIR")
  parser.add_argument(
    "--minutes",
    type=float,
    default=8.0,
    help="begin no further stage after so many (default: 8)",
  )
  args = parser.parse_args(argv)
  return report_errors(
    lambda: _run(pathlib.Path(args.out), args.minutes), False
  )


def stages(folder: pathlib.Path) -> Iterator[_Stage]:
  """All stages, those of the most value first: name, program, arguments."""
  has, (heads, dtype, shares, rounds) = SHAPES, SHAPES["heads"]
  shape = f"--heads {heads} --dtype {dtype} --rounds {rounds}"

  def stage(name: str, main: Callable, text: str, *more: str) -> _Stage:
    json = str(folder / f"{name}.json")
    return name, main, [*text.split(), "--json", json, *more]

  def cores(modes: Sequence[str], lengths: Sequence[int]) -> Iterator[_Stage]:
    for mode in modes:
      for length in lengths:
        for dim in has["dims"]:
          device = target()
          fast = not kernels_of(device).unable(device, dtype, dim)
          fast = fast and device.platform != "cpu"
          yield stage(
            f"core_{dim}_{mode}_{length}",
            attention.main,
            f"--modes {mode} --lengths {length} --head-dim "
            f"{dim} --batch {max(1, has['tokens'] // length)} {shape} --shares "
            f"{shares} --implementations {'kernel' if fast else 'packed'}",
          )

  def decodes(slots: Sequence[int]) -> Iterator[_Stage]:
    for length in slots:
      for dim in has["dims"]:
        yield stage(
          f"decode_{dim}_{length}",
          decode.main,
          f"--lengths {length} --head-dim {dim} --batch {has['texts']} {shape} "
          f"--shares {shares}",
        )

  def of_models(kind: str, program: Callable, more: str) -> Iterator[_Stage]:
    for number, text in enumerate(has[kind]):
      name = f"{kind}_{number}_{text.split()[0]}"
      yield stage(name, program, f"--model {text} {more}")

  for number, (exact_dtype, dims) in enumerate(has["exact"]):
    for dim in dims:
      # Those of plain XLA are the same at all head dims.
      forms = "" if number or dim != dims[0] else "dense,packed,"
      yield stage(
        f"exact_{exact_dtype}_{dim}",
        exact.main,
        f"--dtype {exact_dtype} --head-dim {dim} --forms {forms}kernel,cudnn "
        f"--tokens {min(512, has['tokens'])}",
      )
  first, others = has["lengths"][:3], has["lengths"][3:]
  yield from cores(_ORDER[:1], first)
  yield from of_models("steps", step.main, f"--dtype {dtype}")
  inputs = f"--config.model.dtype={dtype} --rounds {rounds}"
  yield from of_models("passes", model.main, inputs)
  yield from decodes(has["slots"][:1])
  yield from cores(_ORDER[1:3], first)
  for length in has["layers"]:
    yield stage(
      f"layer_{has['dims'][0]}_forward_{length}",
      layer.main,
      f"--lengths {length} --head-dim {has['dims'][0]} --modes forward "
      f"--batch {max(1, has['tokens'] // length)} {shape} --implementations "
      f"auto --shares {','.join(shares.split(',')[:2])}",
    )
  yield from cores(_ORDER[:3], others)
  yield from decodes(has["slots"][1:])
  yield from cores(_ORDER[3:], has["lengths"])


def _run(folder: pathlib.Path, minutes: float) -> int:
  """Runs the stages that are not done yet, as long as there is time.

  Raises:
    ValueError: the folder holds results of another device.
    OSError: it is none, or cannot be made.
  """
  folder.mkdir(exist_ok=True)
  here, end = machine(), time.perf_counter() + 60 * minutes
  for path in folder.glob("*_*.json"):
    there = _read(path).get("machine", here)["device"]
    if there != here["device"]:
      raise ValueError(
        f"--out {folder} holds results of {there!r}, this is "
        f"{here['device']!r}: give another folder"
      )
  took: dict[str, float] = {}  # seconds of the last stage of each kind
  results, faults, left = {}, [], []
  for name, program, argv in stages(folder):
    path, kind = folder / f"{name}.json", name.partition("_")[0]
    start = time.perf_counter()
    if _read(path).get("machine") != here:
      if start + took.get(kind, 0.0) >= end:
        left.append(name)
        continue
      path.unlink(missing_ok=True)
      said = attempt(_call, program, argv)
      took[kind] = time.perf_counter() - start
      gc.collect()  # arrays that a traceback or a cycle still holds
      if not _read(path):
        why = failure(said) if isinstance(said, Exception) else said.strip()
        faults.append(f"{name}: {why}")
        print(f"{name} failed: {why}", flush=True)
        continue
      print(f"{name}: {took[kind]:.1f} s", flush=True)
    results[name] = _read(path)
    for part in results[name]["rows"]:
      if part.get("fault"):
        what = part.get("case") or part.get("implementation")
        faults.append(f"{name}: {what}: {part['fault']}")
  _report(results)
  for fault in faults:
    print(f"error: {fault}", file=sys.stderr)
  if left:
    print(
      f"{len(left)} stages are left, {left[0]} first: run this command again"
    )
  return 1 if faults else 0


def _call(program: Callable[[list[str]], int], argv: list[str]) -> str:
  """What a program says on stderr; its tables are printed at the end."""
  errors = io.StringIO()
  with contextlib.redirect_stdout(io.StringIO()):
    with contextlib.redirect_stderr(errors):
      program(argv)
  return errors.getvalue()


def _read(path: pathlib.Path) -> dict[str, Any]:
  """A result, empty if it is missing or damaged."""
  found = attempt(read_json, path)
  return {} if isinstance(found, Exception) else found


def _report(results: dict[str, dict[str, Any]]) -> None:
  """Prints all tables."""
  groups: dict[str, list[Row]] = {}
  parts: dict[str, list[dict[str, Any]]] = {
    kind: [] for kind in ("exact", "steps", "passes")
  }
  for name, result in results.items():
    kind, *more = name.split("_")
    if kind in parts:
      parts[kind] += result["rows"]
    else:
      key = f"{kind}_{more[0]}"
      groups.setdefault(key, []).extend(read_rows(result))
  for title, rows in groups.items():
    rows.sort(key=lambda row: (row.mode, row.length))
    print(f"\n{title.replace('_', ', head dim ')}")
    print(table(*table_cells(rows)))
  parts["layer"] = [
    {
      "length": row.length,
      "share": row.share,
      "to MHA": row.to_mha,
      "by law": x,
    }
    for title, rows in groups.items()
    if title.startswith("layer_")
    for row, x in expectations(rows, groups.get(f"core{title[5:]}", []))
  ]
  for title, rows in parts.items():
    if rows:
      print(f"\n{title}")
      print(table_of(rows))


def expectations(
  layers: Sequence[Row], cores: Sequence[Row]
) -> list[tuple[Row, float]]:
  """Applies Amdahl's law to layers: only the time of the core changes.

  A layer should take the time of multi-head attention's layer, less the core of
  multi-head attention, plus the fastest core for its share of heads. The router
  is in neither, so what it takes comes on top.

  Args:
    layers: rows of layers.
    cores: rows of attention with the same batch, heads and head dim.

  Returns:
    Each row of a layer in the form "auto", beside the ratio to multi-head
    attention that is expected of it. Rows whose core was not measured are left
    out.
  """

  def fastest(rows: Sequence[Row], row: Row, share: float) -> float | None:
    here = row.mode, row.length, share
    times = [r.ms for r in rows if (r.mode, r.length, r.share) == here]
    return min((ms for ms in times if ms is not None), default=None)

  found = []
  for row in layers:
    packs = row.computed_share != 1
    if row.implementation != "auto" or row.ms is None or not packs:
      continue
    whole = fastest(layers, row, 1.0)
    every, active = (fastest(cores, row, share) for share in (1.0, row.share))
    if whole and every and active:
      found.append((row, (whole - every + active) / whole))
  return found


if __name__ == "__main__":
  sys.exit(main())
