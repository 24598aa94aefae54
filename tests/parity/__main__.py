"""Compares our numbers with recorded cases of the public releases.

A case is a directory with `meta.json` (kind, hyper-parameters, the arrays and
their tolerances), `io.npz` (inputs and outputs), `weights.safetensors` under
the public names and, for some, `grads.safetensors`. The model is rebuilt from
meta.json alone and the weights go through the converter that users call.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from moh_jax.cli.command import Output, table
from moh_jax.cli.main import report_errors
from tests.parity import dit, images, llama, vit
from tests.parity.case import Case, read_case

# kind -> case -> named results; gradients of the case's objective are under
# "grads/NAME".
KINDS: dict[str, Callable[[Case], dict[str, Any]]] = {
  "vit_pooled_attention": vit.attention,
  "vit_full_attention": vit.attention,
  "moh_vit_model": vit.classifier,
  "transnext_model": vit.classifier,
  "dit_attention": dit.attention,
  "moh_dit_model": dit.network,
  "gaussian_diffusion": dit.diffusion,
  "dit_model": dit.network,
  "autoencoder_kl": images.autoencoder,
  "image_metrics": images.metrics,
  "inception_fid": images.inception,
  "moh_llama_model": llama.network,
  "llama_model": llama.network,
}
_TABLE_RTOL = 1e-9


@dataclasses.dataclass(frozen=True)
class Row:
  """One compared array.

  Attributes:
    case: name of the case's directory.
    array: its name; gradients are "grads/NAME".
    max_abs: largest absolute error, None if the array was not compared.
    max_rel: `max_abs` over the largest magnitude of the recorded array.
    tolerance: largest absolute error allowed; 0 for integers and masks.
    ok: whether it was compared and is within the tolerance.
  """

  case: str
  array: str
  max_abs: float | None
  max_rel: float | None
  tolerance: float
  ok: bool


def run_case(directory: str | pathlib.Path) -> list[Row]:
  """Runs one case.

  Args:
    directory: where the case lies.

  Returns:
    A row per recorded output and gradient.

  Raises:
    FileNotFoundError: a file of the case is missing.
    ValueError: the case is of an unknown kind, incomplete or damaged.
  """
  try:
    case = read_case(pathlib.Path(directory), KINDS)
    with jax.default_matmul_precision("highest"):
      results = KINDS[case.meta["kind"]](case)
    limits = case.meta["tolerance"]
  except KeyError as error:
    raise ValueError(
      f"{directory}: meta.json or io.npz lacks {error}"
    ) from error
  expected = {
    name: (case.arrays[name], limits.get("outputs_atol", {}).get(name))
    for name, entry in case.meta["arrays"].items()
    if entry.get("role") == "output"
  } | {
    f"grads/{name}": (grad, limits.get("grads_atol", {}).get(name))
    for name, grad in case.grads.items()
  }
  rows = []
  for name, (want, tolerance) in expected.items():
    if tolerance is None:  # as in most cases; others must be stated
      if want.dtype.kind not in "iub" and want.dtype != np.float64:
        raise ValueError(f"{directory}/meta.json: no tolerance for {name!r}")
      scale = np.abs(want).max(initial=0.0)
      tolerance = _TABLE_RTOL * scale if want.dtype == np.float64 else 0.0
    tolerance = float(tolerance)
    errors = _errors(results.get(name), want)
    ok = errors[0] is not None and errors[0] <= tolerance
    rows.append(Row(case.directory.name, name, *errors, tolerance, ok))
  return rows


def _errors(
  got: Any, want: np.ndarray
) -> tuple[float, float] | tuple[None, None]:
  """Largest absolute and relative error, None where nothing is comparable."""
  if got is None or np.shape(got) != want.shape:
    return None, None
  want = want.astype(np.float64)
  error = np.abs(np.asarray(got, np.float64) - want)
  max_abs = float(error.max(initial=0.0))
  scale = float(np.abs(want).max(initial=0.0))
  return max_abs, max_abs / scale if scale else max_abs


def main(argv: Sequence[str] | None = None) -> int:
  """Runs `python -m tests.parity`; 1 if an array is off or not compared."""
  parser = argparse.ArgumentParser(
    prog="python -m tests.parity",
    description=__doc__.partition("\n")[0],
    allow_abbrev=False,
  )
  parser.add_argument("cases", nargs="+", metavar="CASE_DIR")
  parser.add_argument(
    "--failures", action="store_true", help="print only rows that fail"
  )
  parser.add_argument("--json", metavar="FILE", help="'-' is stdout")
  parser.add_argument("--traceback", action="store_true")
  args = parser.parse_args(argv)
  return report_errors(lambda: _run(args), args.traceback)


def _run(args: argparse.Namespace) -> int:
  output = Output(json=args.json)
  output.prepare()
  rows = [row for case in args.cases for row in run_case(case)]
  failed = [row for row in rows if not row.ok]
  shown = failed if args.failures else rows
  header = ("case", "array", "max abs", "max rel", "tolerance", "")
  lines = [table([_cells(row) for row in shown], header)] if shown else []
  lines.append(
    f"{len(args.cases)} case(s), {len(rows)} arrays, {len(failed)} failed"
  )
  output.give([dataclasses.asdict(row) for row in rows], lines)
  return 1 if failed else 0


def _cells(row: Row) -> tuple[str, ...]:
  errors = ("not compared", "")
  if row.max_abs is not None:
    errors = (f"{row.max_abs:.2e}", f"{row.max_rel:.2e}")
  verdict = "ok" if row.ok else "FAILED"
  return row.case, row.array, *errors, f"{row.tolerance:.0e}", verdict


if __name__ == "__main__":
  sys.exit(main())
