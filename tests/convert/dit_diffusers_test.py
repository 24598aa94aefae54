"""Plain DiT in diffusers' layout and back; diffusers itself was recorded."""

import dataclasses
import json
import pathlib
import sys
import tempfile

import chex
import jax
import numpy as np
import safetensors.numpy
from absl.testing import absltest, parameterized

from moh_jax.config import Config, DataConfig, DiTConfig, SampleConfig
from moh_jax.config.heads import RouterConfig
from moh_jax.convert.checkpoints import convert, export
from moh_jax.data.infer import resolve
from moh_jax.inference.restore import restore
from moh_jax.runtime import checkpoint
from tests.training import tiny

_FILE = "diffusion_pytorch_model.safetensors"
_GOLDEN = pathlib.Path(__file__).parents[1] / "goldens" / "diffusers_dit.npz"
_MODEL = DiTConfig(
  channels=4,
  input_size=(8, 8),
  num_classes=5,
  width=16,
  num_heads=(2, 2),
  head_dim=8,
  shared_heads=(2, 2),
  top_k=(0, 0),
  router=RouterConfig("none"),
)


def _config(**model) -> Config:
  return resolve(
    Config(
      model=dataclasses.replace(_MODEL, **model),
      data=DataConfig(source="latents", path="some/latents"),
      sample=SampleConfig(cfg_scale=1.0),
    )
  )


def _save(folder: pathlib.Path, config: Config) -> dict:
  params = tiny.random_params(config)
  checkpoint.save_params(str(folder), params, checkpoint.Metadata(config))
  return params


def _export_tiny(out: str) -> None:
  """Writes the folder that tests/tools/record_diffusers.py reads."""
  with tempfile.TemporaryDirectory() as folder:
    _save(pathlib.Path(folder), _config())
    export(folder, out, to="diffusers")


class DiffusersTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.ours, cls.out = f"{folder}/ours", pathlib.Path(folder, "theirs")
    cls.params = _save(pathlib.Path(cls.ours), _config())
    cls.count = export(cls.ours, str(cls.out), to="diffusers")
    cls.tensors = safetensors.numpy.load_file(cls.out / _FILE)
    with np.load(_GOLDEN) as stored:
      cls.golden = dict(stored)

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def test_tensors_are_those_that_diffusers_asks_for(self):
    found = {name: str(tensor.shape) for name, tensor in self.tensors.items()}
    expected = dict(zip(self.golden["names"], self.golden["shapes"]))
    self.assertEqual(found, {str(n): str(s) for n, s in expected.items()})
    self.assertEqual(
      {file.name for file in self.out.iterdir()},
      {"config.json", "README.md", _FILE},
    )

  def test_outputs_are_those_of_diffusers(self):
    restored = restore(self.ours)
    x = self.golden["x"].transpose(0, 2, 3, 1)
    out, _ = jax.jit(restored.model.apply)(
      {"params": restored.params},
      *(x, self.golden["t"], self.golden["labels"].astype(np.int32)),
    )
    expected = self.golden["out"].transpose(0, 2, 3, 1)
    atol = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(out, expected, rtol=0, atol=atol)
    # With other frequencies than those of the class as it is.
    others = self.golden["as_loaded"].transpose(0, 2, 3, 1)
    self.assertGreater(np.abs(others - expected).max(), 1000 * atol)
    readme = (self.out / "README.md").read_text()
    self.assertIn("time_proj.downscale_freq_shift = 0", readme)

  @parameterized.parameters((10**9, 1), (20_000, 5))
  def test_comes_back_with_the_same_parameters(self, shard_size, files):
    folder, out = self.root / "theirs", str(self.root / "again")
    export(self.ours, str(folder), to="diffusers", shard_size=shard_size)
    self.assertLen(list(folder.glob("*.safetensors")), files)
    self.assertEqual((folder / f"{_FILE}.index.json").exists(), files > 1)
    name, count = convert("diffusers", str(folder), out)
    self.assertEqual((name, count), ("the model of config.json", self.count))
    restored = restore(out)
    chex.assert_trees_all_equal(restored.params, self.params)
    self.assertEqual(restored.config.model, _MODEL)

  def test_a_router_that_is_off_may_have_any_options(self):
    _save(self.root / "ours", _config(router=RouterConfig("none", "paper")))
    export(str(self.root / "ours"), str(self.root / "out"), to="diffusers")

  @parameterized.parameters(
    ({"router": RouterConfig(), "top_k": (1, 1), "shared_heads": (1, 1)},
     "model.router.kind='two_stage' must be 'none'; .* without --to"),
    ({"num_heads": (2, 4), "shared_heads": (2, 4)}, r"num_heads=\(2, 4\)"),
    ({"mlp_ratio": 2.0}, "model.mlp_ratio=2.0 must be 4"),
    ({"input_size": (8, 4)}, r"model.input_size=\(8, 4\) must be \(8, 8\)"),
    ({"label_dropout": 0.0}, "model.label_dropout=0 must be above 0"),
  )  # fmt: skip
  def test_other_models_are_refused_by_name(self, model, message):
    _save(self.root / "ours", _config(**model))
    with self.assertRaisesRegex(ValueError, message):
      export(str(self.root / "ours"), str(self.root / "out"), to="diffusers")
    self.assertFalse((self.root / "out").exists())

  @parameterized.parameters(
    ({"norm_type": "ada_norm"}, "config.json: norm_type='ada_norm' must be"),
    ({"num_layers": 10**6}, "num_layers"),
    ({"out_channels": 5}, r"out_channels=5 must be one of \(None, 4, 8\)"),
    ({"attention_head_dim": 3}, "config.json: model.width=6"),
    # A tensor that must be the same in all blocks.
    ("timestep_embedder.linear_2.bias", r"blocks\.1.*linear_2.bias must"),
  )
  def test_other_folders_are_refused_by_name(self, changed, message):
    entries = json.loads((self.out / "config.json").read_text())
    tensors = dict(self.tensors)
    if isinstance(changed, str):
      name = f"transformer_blocks.1.norm1.emb.{changed}"
      tensors[name] = tensors[name] + 1
    else:
      entries |= changed
    (self.root / "config.json").write_text(json.dumps(entries))
    safetensors.numpy.save_file(tensors, self.root / _FILE)
    with self.assertRaisesRegex(ValueError, message):
      convert("diffusers", str(self.root), str(self.root / "ours"))
    self.assertFalse((self.root / "ours").exists())


if __name__ == "__main__":
  if len(sys.argv) == 2:
    _export_tiny(sys.argv[1])
  else:
    absltest.main()
