"""The input of the network of FID; tests/parity has the network itself."""

import functools
import json
import pathlib

import jax
import numpy as np
from absl.testing import parameterized

from moh_jax.models.inception import prepare

_CASE = pathlib.Path(__file__).parents[1] / "goldens/inception_fid"


class PrepareTest(parameterized.TestCase):
  # As `fid` runs it; tests/parity runs one operation after the other.
  @parameterized.product(letter=("a", "b", "c"), resize=("tf1", "ptfid"))
  def test_compiled_equals_the_record(self, letter, resize):
    tolerances = json.loads((_CASE / "meta.json").read_text())["tolerance"]
    name = f"{letter}_{resize}_input_grid"
    with np.load(_CASE / "io.npz") as stored:
      images, want = stored[f"images_{letter}"], stored[name]
      grid = stored["input_grid_index"]
    compiled = jax.jit(functools.partial(prepare, resize=resize))
    got = np.asarray(compiled(images))[:, grid][:, :, grid]
    atol = tolerances["outputs_atol"][name]
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
