"""Every released classifier and diffusion model: torch to ours and back.

The models have all layers and head budgets of the released ones, so the same
tensors, of a few columns each. Names and shapes of the full sizes are compared
with the recorded tables in tests/models/registry_test.py.
"""

import dataclasses
import gzip
import json
import math
import pathlib
import tempfile

import chex
import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax.config import Config, released_model
from moh_jax.convert import rules
from moh_jax.convert.checkpoints import convert, export, model_rules
from moh_jax.convert.converter import converter_of
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.data.infer import resolve
from moh_jax.models.registry import make_model
from moh_jax.runtime.params import abstract_params, unbox
from tests.convert.torch_archive import save_archive, tensor

_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
# Of every release: format, our name, name of the recorded table.
_VITS = (
  ("moh-vit", "moh-vit-s80", "moh_transnext_small_80"),
  ("moh-vit", "moh-vit-s75", "moh_transnext_small_75"),
  ("moh-vit", "moh-vit-b75", "moh_transnext_base_75"),
  ("moh-vit", "moh-vit-b50", "moh_transnext_base_50"),
  *(
    ("transnext", f"transnext-{size}", f"transnext_{size}")
    for size in ("micro", "tiny", "small", "base")
  ),
)
_DITS = tuple(
  ("moh-dit", f"moh-dit-{size}2-{share}", f"MoH-DiT-{size.upper()}/2-{share}")
  for size in ("s", "b", "l", "xl")
  for share in (90, 75)
)
_DEFAULT = ("moh-vit-b50", "moh-dit-s2-75")


def _small(name: str) -> Config:
  """A released model with few columns in every matrix."""
  model = released_model(name)
  fields = {"num_classes": 3}
  if model.family == "vit":
    fields["embed_dims"] = tuple(2 * heads for heads in model.num_heads)
  else:
    fields |= {"width": 12, "head_dim": 2, "input_size": (4, 4)}
  model = dataclasses.replace(model, **fields)
  return resolve(converter_of(model).released_run(model, {}))


def _params(config: Config, seed: int):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32),
    unbox(abstract_params(*make_model(config))),
  )


def _save_torch(path: pathlib.Path, entries: dict[str, dict]) -> None:
  """Writes entries of tensors as `torch.save` does."""
  tree, records = {}, {}
  for entry, tensors in entries.items():
    tree[entry] = {}
    for name, array in tensors.items():
      array = np.asarray(array, order="C")
      key = str(len(records))
      strides = tuple(stride // array.itemsize for stride in array.strides)
      size = math.prod(array.shape)
      tree[entry][name] = tensor(key, array.shape, strides, size=size)
      records[key] = array.tobytes()
  save_archive(path, tree, records)


def _table(name: str, family: str) -> dict[str, list[int]]:
  with gzip.open(_GOLDENS / f"param_tables_{family}.json.gz") as stream:
    return json.load(stream)[name]["params"]


class ReleasedTest(parameterized.TestCase):
  def _check_round_trip(self, kind, name, table):
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    config = _small(name)
    names = model_rules(config.model)
    tensors = {
      entry: rules.dump_params(names, _params(config, seed))
      for seed, entry in enumerate(("model", "ema"))
    }
    self.assertEqual(
      set(tensors["ema"]), set(_table(table, config.model.family))
    )
    _save_torch(root / "released.pth", tensors)
    convert(kind, str(root / "released.pth"), str(root / "ours"), config=config)
    export(str(root / "ours"), str(root / "again.safetensors"))
    chex.assert_trees_all_equal(
      read_tensors(root / "again.safetensors"), tensors["ema"]
    )

  @parameterized.parameters(
    *(case for case in (*_VITS, *_DITS) if case[1] in _DEFAULT)
  )
  def test_tensors_come_back_identical(self, kind, name, table):
    self._check_round_trip(kind, name, table)

  @parameterized.parameters(
    *(case for case in (*_VITS, *_DITS) if case[1] not in _DEFAULT)
  )
  @pytest.mark.slow
  def test_tensors_of_every_release_come_back_identical(
    self, kind, name, table
  ):
    self._check_round_trip(kind, name, table)


if __name__ == "__main__":
  absltest.main()
