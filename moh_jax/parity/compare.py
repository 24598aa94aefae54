"""Parity with recorded cases: our numbers against the public releases'.

A case is a directory with `meta.json` (kind, hyper-parameters, the arrays and
their tolerances), `io.npz` (inputs and outputs), `weights.safetensors` under
the public names and, for some, `grads.safetensors`. The model is rebuilt from
meta.json alone and the weights go through the converter that users call.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from moh_jax.convert.tensor_files import read_tensors
from moh_jax.parity import diffusion as parity_diffusion
from moh_jax.parity import dit as parity_dit
from moh_jax.parity import fid as parity_fid
from moh_jax.parity import llama as parity_llama
from moh_jax.parity import vae as parity_vae
from moh_jax.parity import vit as parity_vit
from moh_jax.parity.case import Case
from moh_jax.parity.files import read_arrays, read_meta

# kind -> case -> named results; gradients of the case's objective are under
# "grads/NAME".
KINDS: dict[str, Callable[[Case], dict[str, Any]]] = {
  "vit_pooled_attention": parity_vit.attention,
  "vit_full_attention": parity_vit.attention,
  "moh_vit_model": parity_vit.classifier,
  "transnext_model": parity_vit.classifier,
  "dit_attention": parity_dit.attention,
  "moh_dit_model": parity_dit.network,
  "gaussian_diffusion": parity_diffusion.diffusion,
  "dit_model": parity_dit.network,
  "autoencoder_kl": parity_vae.autoencoder,
  "image_metrics": parity_fid.metrics,
  "inception_fid": parity_fid.inception,
  "moh_llama_model": parity_llama.network,
  "llama_model": parity_llama.network,
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
  directory = pathlib.Path(directory)
  meta = read_meta(directory, KINDS)
  arrays = read_arrays(directory, meta["arrays"])
  weights = {}
  if "weights.safetensors" in meta["files"]:
    weights = read_tensors(directory / "weights.safetensors")
  expected = {
    name: arrays[name]
    for name, entry in meta["arrays"].items()
    if entry.get("role") == "output"
  }
  if "grads.safetensors" in meta["files"]:
    grads = read_tensors(directory / "grads.safetensors")
    expected |= {f"grads/{name}": grad for name, grad in grads.items()}

  case = Case(meta["hyper_parameters"], arrays, weights, meta, directory)
  with jax.default_matmul_precision("highest"):
    try:
      results = KINDS[meta["kind"]](case)
    except KeyError as error:
      raise ValueError(
        f"{directory}: meta.json or io.npz lacks {error}"
      ) from error
    except (TypeError, AttributeError, IndexError, ArithmeticError) as error:
      raise ValueError(
        f"{directory}: meta.json's hyper_parameters and io.npz do not fit "
        f"kind {meta['kind']!r}: {error}"
      ) from error
  tolerances = _tolerances(directory, meta, expected)
  return [
    _compare(directory.name, name, results.get(name), want, tolerances[name])
    for name, want in expected.items()
  ]


def _compare(
  case: str, name: str, got: Any, want: np.ndarray, tolerance: float
) -> Row:
  if got is None or np.shape(got) != want.shape:
    return Row(case, name, None, None, tolerance, ok=False)
  want = want.astype(np.float64)
  error = np.abs(np.asarray(got, np.float64) - want)
  max_abs = float(error.max(initial=0.0))
  scale = float(np.abs(want).max(initial=0.0))
  max_rel = max_abs / scale if scale else max_abs
  return Row(case, name, max_abs, max_rel, tolerance, max_abs <= tolerance)


def _tolerances(
  directory: pathlib.Path, meta: Mapping[str, Any], expected: Mapping
) -> dict[str, float]:
  stated = dict(meta["tolerance"].get("outputs_atol", {}))
  grads = meta["tolerance"].get("grads_atol", {})
  stated |= {f"grads/{name}": atol for name, atol in grads.items()}
  tolerances = {}
  for name, array in expected.items():
    if name in stated:
      tolerances[name] = float(stated[name])
    elif array.dtype.kind in "iub":
      tolerances[name] = 0.0
    elif array.dtype == np.float64:  # tables, recorded without a tolerance
      tolerances[name] = _TABLE_RTOL * float(np.abs(array).max(initial=0.0))
    else:
      raise ValueError(f"{directory}/meta.json: no tolerance for {name!r}")
  return tolerances
