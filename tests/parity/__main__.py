"""Compares our numbers with recorded cases of the public releases.

A case is a directory with `meta.json` (kind, hyper-parameters, the arrays and
their tolerances), `io.npz` (inputs and outputs), `weights.safetensors` under
the public names and, for some, `grads.safetensors`. The model is rebuilt from
meta.json alone and the weights go through the converter that users call.

`python -m tests.parity CASE_DIR ...` prints a row per array, and ends with 1 if
one is off or was not compared.
"""

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moh_jax.cli.command import table
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


class Row(NamedTuple):
  """One compared array.

  Attributes:
    case: name of the case's directory.
    array: its name; gradients are "grads/NAME".
    max_abs: largest absolute error, None if the array was not compared.
    tolerance: largest absolute error allowed; 0 for integers and masks.
    ok: whether it was compared and is within the tolerance.
  """

  case: str
  array: str
  max_abs: float | None
  tolerance: float
  ok: bool


def run_case(directory: str | pathlib.Path) -> list[Row]:
  """Runs the case in a directory: a row per recorded output and gradient."""
  case = read_case(pathlib.Path(directory))
  with jax.default_matmul_precision("highest"):
    results = KINDS[case.meta["kind"]](case)
  limits = case.meta["tolerance"]
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
      assert want.dtype.kind in "iub" or want.dtype == np.float64, name
      scale = np.abs(want).max(initial=0.0)
      tolerance = _TABLE_RTOL * scale if want.dtype == np.float64 else 0.0
    got, error = results.get(name), None
    if got is not None and np.shape(got) == want.shape:
      error = np.abs(np.float64(got) - np.float64(want)).max(initial=0.0)
    ok = error is not None and bool(error <= tolerance)
    rows.append(Row(case.directory.name, name, error, tolerance, ok))
  return rows


def main(directories: Sequence[str]) -> int:
  """Prints the rows of cases; returns 1 if one failed."""
  rows = [row for directory in directories for row in run_case(directory)]
  failed = sum(not row.ok for row in rows)
  print(table(rows, Row._fields))
  print(f"{len(directories)} case(s), {len(rows)} arrays, {failed} failed")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
