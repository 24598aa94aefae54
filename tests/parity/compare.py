"""Compares our outputs with recorded ones of the public releases.

A case is a directory with `meta.json` (kind, hyper-parameters, the arrays and
their tolerances), `io.npz` (inputs and outputs), `weights.safetensors` under
the public names and, for some, `grads.safetensors`. The model is rebuilt from
meta.json alone and the weights go through the converter that users call.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

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
  case = read_case(pathlib.Path(directory), KINDS)
  kind, limits = case.meta["kind"], case.meta["tolerance"]
  expected = {
    name: (case.arrays[name], limits.get("outputs_atol", {}).get(name))
    for name, entry in case.meta["arrays"].items()
    if entry.get("role") == "output"
  } | {
    f"grads/{name}": (grad, limits.get("grads_atol", {}).get(name))
    for name, grad in case.grads.items()
  }
  with jax.default_matmul_precision("highest"):
    try:
      results = KINDS[kind](case)
    except KeyError as error:
      raise ValueError(
        f"{directory}: meta.json or io.npz lacks {error}"
      ) from error
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
