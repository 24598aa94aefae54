"""Feature statistics in files, in the format of ADM's reference batches."""

import os
import pathlib

import numpy as np

from moh_jax.array_files import npz_names, read_npz
from moh_jax.evaluation.statistics import Gaussian
from moh_jax.files import replacing

_KEYS = ("mu", "sigma", "mu_s", "sigma_s")


def has_statistics(path: str | os.PathLike) -> bool:
  """Whether a path is an npz file with statistics: the key "mu" decides.

  Raises:
    FileNotFoundError: there is no such path.
    ValueError: a file that is not an npz archive.
  """
  if pathlib.Path(path).is_dir():
    return False
  return "mu" in npz_names(path)


def read_statistics(
  path: str | os.PathLike, pool_dim: int, spatial_dim: int
) -> tuple[Gaussian, Gaussian]:
  """Reads the statistics of a reference file.

  Args:
    path: npz file with mu, sigma, mu_s and sigma_s of any float type.
    pool_dim: of mu.
    spatial_dim: of mu_s, positions row by row with the channel fastest.

  Returns:
    The distributions of the pool3 and of the spatial features, float64.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: an array is missing, damaged, of another shape or type, or not
      finite.
  """
  names = npz_names(path)
  if missing := [key for key in _KEYS if key not in names]:
    raise ValueError(
      f"{path}: has {[key for key in _KEYS if key in names]} but lacks "
      f"{missing}; statistics are all of {_KEYS}"
    )
  shapes = ((pool_dim,), (pool_dim,) * 2, (spatial_dim,), (spatial_dim,) * 2)
  arrays = read_npz(path, _KEYS).values()
  for key, array, shape in zip(_KEYS, arrays, shapes):
    if array.shape != shape or array.dtype.kind != "f":
      raise ValueError(
        f"{path}: {key} has dtype {array.dtype} and shape {array.shape}; must "
        f"be a float array of shape {shape}"
      )
    if not np.isfinite(array).all():
      raise ValueError(f"{path}: {key} holds NaN or infinity")
  mu, sigma, mu_s, sigma_s = (array.astype(np.float64) for array in arrays)
  return Gaussian(mu, sigma), Gaussian(mu_s, sigma_s)


def write_statistics(
  path: str | os.PathLike, pool3: Gaussian, spatial: Gaussian
) -> None:
  """Writes a reference file that is complete or absent, never partial.

  Args:
    path: file to write or replace.
    pool3: distribution of the pool3 features.
    spatial: distribution of the flattened spatial features.

  Raises:
    FileNotFoundError: the directory of `path` does not exist.
  """
  check_writable(path)
  with replacing(path) as temporary, temporary.open("wb") as file:
    np.savez(file, **dict(zip(_KEYS, (*pool3, *spatial))))


def check_writable(path: str | os.PathLike) -> None:
  """Raises unless a file can be put at `path`, before long work is lost."""
  path = pathlib.Path(path)
  if path.is_dir():
    raise ValueError(f"{path}: is a directory; expected a file name")
  if not path.parent.is_dir():
    raise FileNotFoundError(f"{path}: no directory {path.parent}; create it")
  if not os.access(path.parent, os.W_OK):
    raise PermissionError(f"{path}: directory {path.parent} is read-only")
