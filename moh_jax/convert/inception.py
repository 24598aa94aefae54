"""Converts the weights of the FID Inception network.

The public names are those of `pt_inception-2015-12-05-6726825d.pth`, which
pytorch-fid and torch-fidelity distribute.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from moh_jax.convert import rules
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.models.inception import INPUT_SIZE, InceptionV3

_UNIT = {
  "kernel": "conv.weight",
  "scale": "bn.weight",
  "bias": "bn.bias",
  "mean": "bn.running_mean",
  "var": "bn.running_var",
}
_FILE = "pt_inception-2015-12-05-6726825d.pth"
_HOW_TO_GET = (
  f"the FID metrics need the Inception weights {_FILE}: download "
  "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/"
  f"{_FILE} to any place and pass --inception PATH (a safetensors "
  "file of the same tensors will do)"
)


def load_inception(path: str | os.PathLike) -> Any:
  """Reads the parameters of `InceptionV3`.

  Args:
    path: the public .pth file, or its tensors as safetensors.

  Returns:
    The parameter tree of NumPy float32 arrays.

  Raises:
    FileNotFoundError: there is no such file; the message says how to get it.
    ValueError: the file is damaged or holds other tensors.
  """
  if not pathlib.Path(path).exists():
    raise FileNotFoundError(f"{path}: no such file; {_HOW_TO_GET}")
  return convert_inception(read_tensors(path), source=str(path))


def convert_inception(tensors: Mapping[str, np.ndarray], *, source: str) -> Any:
  """Converts public tensors to the parameters of `InceptionV3`.

  Args:
    tensors: tensors by public name; BatchNorm's counters may be missing.
    source: where the tensors come from, for messages.

  Returns:
    The parameter tree of NumPy float32 arrays.

  Raises:
    ValueError: tensors are missing, unexpected or of a wrong shape.
  """
  x = jax.ShapeDtypeStruct((1, INPUT_SIZE, INPUT_SIZE, 3), jnp.float32)
  abstract = jax.eval_shape(InceptionV3().init, jax.random.key(0), x)["params"]
  unused = ".num_batches_tracked", "fc.bias"  # some files lack the counters
  used = {n: x for n, x in tensors.items() if not n.endswith(unused)}
  table = rules.linear("fc", "fc", bias=False)
  for path in traverse_util.flatten_dict(abstract):
    if path[0] != "fc":  # modules have the public names
      theirs = ".".join((*path[:-1], _UNIT[path[-1]]))
      maps = rules.CONV_MAPS if path[-1] == "kernel" else rules.SAME
      table.append(rules.one(theirs, "/".join(path), maps))
  return rules.load_params(table, used, abstract, source=source)
