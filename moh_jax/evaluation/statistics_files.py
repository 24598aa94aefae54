"""Feature statistics in files, in the format of ADM's reference batches."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from moh_jax.evaluation.statistics import Gaussian
from moh_jax.runtime.files import npz_names, read_npz, replacing
from moh_jax.runtime.json_files import parse_json

_KEYS = ("mu", "sigma", "mu_s", "sigma_s")
_MADE_WITH = "made_with"  # JSON as bytes; files of other programs have none


@dataclasses.dataclass(frozen=True)
class Statistics:
  """Distributions of the features of a set of images.

  Attributes:
    pool3: of the pool3 features.
    spatial: of the spatial features; None in files of pytorch-fid, which serve
      FID alone.
    made_with: "resize" and "inception" (SHA-256 of the network's parameters),
      where the file says so.
  """

  pool3: Gaussian
  spatial: Gaussian | None
  made_with: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def check_made_with(self, ours: Mapping[str, str], path: str) -> None:
    """Raises ValueError where the file says that it was made with others."""
    for name, value in ours.items():
      stored = self.made_with.get(name, value)
      if stored != value:
        raise ValueError(
          f"{path}: its statistics were made with {name}={stored[:16]!r}, not "
          f"{value[:16]!r}; distances would mean nothing"
        )


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
) -> Statistics:
  """Reads the statistics of a reference file.

  Args:
    path: npz file with mu, sigma, mu_s and sigma_s of any float type, or the
      first two alone.
    pool_dim: of mu.
    spatial_dim: of mu_s, positions row by row with the channel fastest.

  Returns:
    The distributions, float64.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: an array is missing, damaged, of another shape or type, or not
      finite.
  """
  names = npz_names(path)
  keys = [key for key in _KEYS if key in names]
  if keys not in (list(_KEYS), list(_KEYS[:2])):
    missing = [key for key in _KEYS if key not in names]
    raise ValueError(
      f"{path}: has {keys} but lacks {missing}; statistics are all of {_KEYS}, "
      "or mu and sigma alone"
    )
  shapes = ((pool_dim,), (pool_dim,) * 2, (spatial_dim,), (spatial_dim,) * 2)
  arrays = []
  for (key, array), shape in zip(read_npz(path, keys).items(), shapes):
    if array.shape != shape or array.dtype.kind != "f":
      raise ValueError(
        f"{path}: {key} has dtype {array.dtype} and shape {array.shape}; must "
        f"be a float array of shape {shape}"
      )
    if not np.isfinite(array).all():
      raise ValueError(f"{path}: {key} holds NaN or infinity")
    arrays.append(array.astype(np.float64))
  made_with = {}
  if _MADE_WITH in names:
    content = read_npz(path, [_MADE_WITH])[_MADE_WITH].tobytes()
    made_with = parse_json(content, dict[str, str], f"{path}: {_MADE_WITH}")
  spatial = Gaussian(*arrays[2:]) if len(arrays) > 2 else None
  return Statistics(Gaussian(*arrays[:2]), spatial, made_with)


def write_statistics(path: str | os.PathLike, statistics: Statistics) -> None:
  """Writes a reference file that is complete or absent, never partial.

  Args:
    path: file to write or replace.
    statistics: both distributions.

  Raises:
    FileNotFoundError: the directory of `path` does not exist.
  """
  check_writable(path)
  arrays = dict(zip(_KEYS, (*statistics.pool3, *statistics.spatial)))
  made_with = json.dumps(dict(statistics.made_with)).encode()
  arrays[_MADE_WITH] = np.frombuffer(made_with, np.uint8)
  with replacing(path) as temporary, temporary.open("wb") as file:
    np.savez(file, **arrays)


def check_writable(path: str | os.PathLike) -> None:
  """Raises unless a file can be put at `path`, before long work is lost."""
  path = pathlib.Path(path)
  if path.is_dir():
    raise ValueError(f"{path}: is a directory; expected a file name")
  if not path.parent.is_dir():
    raise FileNotFoundError(f"{path}: no directory {path.parent}; create it")
  if not os.access(path.parent, os.W_OK):
    raise PermissionError(f"{path}: directory {path.parent} is read-only")
