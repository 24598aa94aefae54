"""What a recorded case gives to the function that runs its kind."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
  """A recorded case, read.

  Attributes:
    hyper: hyper-parameters.
    arrays: inputs and outputs by name.
    weights: by public name; empty where a case has none.
    meta: all of meta.json.
    directory: where the case lies, for further files.
  """

  hyper: Mapping[str, Any]
  arrays: Arrays
  weights: Arrays
  meta: Mapping[str, Any]
  directory: pathlib.Path
