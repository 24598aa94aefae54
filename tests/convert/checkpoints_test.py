"""Whole checkpoints of images there and back again."""

import dataclasses
import functools
import json
import pathlib
import sys
import tempfile
import unittest

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from absl.testing import parameterized

from moh_jax.config import (
  Config,
  DataConfig,
  DiffusionConfig,
  DiTConfig,
  LoraConfig,
  SampleConfig,
  TrainConfig,
  TuneConfig,
  released_model,
)
from moh_jax.config.heads import RouterConfig
from moh_jax.convert import checkpoints, rules
from moh_jax.convert.checkpoints import convert, export
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.data.infer import resolve
from moh_jax.inference.restore import restore
from moh_jax.models.adapters import Adapters
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.sharding import abstract_params, unbox
from tests.convert.stored import save_tensors
from tests.folders import FolderTest
from tests.models import small
from tests.training import tiny

_VIT = resolve(Config(model=small.TWO_STAGES, data=DataConfig(eval_resize=20)))
_DIT = resolve(
  tiny.dit_config(
    model={"channels": 4, "num_heads": (2, 4, 4), "shared_heads": (2, 2, 2),
           "top_k": (0, 1, 1)},
    data={"source": "latents", "path": "some/latents"},
    diffusion={"space": "latent", "prediction": "v"},
    sample={"cfg_scale": 4.0},
  )
)  # fmt: skip
_RUNS = {"moh-vit": _VIT, "moh-dit": _DIT}


@functools.cache
def _made(kind: str):
  """A public file, its tensors, our checkpoint, and what `convert` said."""
  folder = pathlib.Path(tempfile.mkdtemp(dir=_ROOT.name))
  config, source = _RUNS[kind], folder / "public.safetensors"
  table = checkpoints.model_rules(config.model)
  tensors = rules.dump_params(table, tiny.random_params(config))
  save_tensors(source, tensors)
  out = str(folder / "ours")
  return source, tensors, out, convert(kind, str(source), out, config=config)


def setUpModule():
  global _ROOT
  _ROOT = tempfile.TemporaryDirectory()
  unittest.addModuleCleanup(_ROOT.cleanup)


class CheckpointTest(parameterized.TestCase):
  def target(self) -> str:
    return self.create_tempdir().full_path

  @parameterized.parameters(*_RUNS)
  def test_there_and_back(self, kind):
    source, tensors, out, said = _made(kind)
    count = sum(x.size for n, x in tensors.items() if n != "pos_embed")
    self.assertEqual(said, ("the given config", count))
    again = source.with_name("again.safetensors")
    self.assertEqual(export(out, str(again)), count)
    chex.assert_trees_all_equal(read_tensors(again), tensors)
    restored = restore(out)
    self.assertEqual((restored.config, restored.step), (_RUNS[kind], 0))

  @parameterized.parameters(*_RUNS)
  @pytest.mark.integration
  def test_public_weights_include_the_constant_of_the_attention(self, kind):
    _, tensors, plain, _ = _made(kind)
    config = _RUNS[kind]
    model = dataclasses.replace(config.model, attention_out_multiplier=0.5)
    ours, exported = self.target(), f"{self.target()}/exported.safetensors"
    scaled = dataclasses.replace(config, model=model)
    params = tiny.random_params(config)
    checkpoint.save_params(ours, params, checkpoint.Metadata(scaled))
    export(ours, exported)
    halved = {
      name: x * (0.5 if ".attn.proj." in name else 1)
      for name, x in tensors.items()
    }
    chex.assert_trees_all_equal(read_tensors(exported), halved)
    convert(kind, exported, again := self.target(), config=config)
    inputs = [
      jax.random.normal(jax.random.key(i), shape).astype(dtype)
      for i, (shape, dtype) in enumerate(model.example_inputs)
    ]
    outputs = [
      (one := restore(path)).model.apply({"params": one.params}, *inputs)[0]
      for path in (ours, again, plain)
    ]
    np.testing.assert_allclose(*outputs[:2], atol=1e-5)
    self.assertGreater(np.abs(outputs[0] - outputs[2]).max(), 1e-3)

  @pytest.mark.transformers
  def test_averages_of_a_file_of_torch_save(self):
    torch = pytest.importorskip("torch")
    source, tensors, ours, _ = _made("moh-vit")
    entries = {
      entry: {n: torch.tensor(x + add) for n, x in tensors.items()}
      for add, entry in enumerate(("ema", "model"))
    }
    torch.save(entries, source.with_name("public.pth"))
    out = self.target()
    convert("moh-vit", str(source.with_name("public.pth")), out, config=_VIT)
    chex.assert_trees_all_equal(restore(out).params, restore(ours).params)

  @parameterized.parameters(
    ("vit", {}, "'vit' .*moh-vit.*transnext"),
    ("moh-vit", {"model": "moh-vit-s81"}, "'moh-vit-s81' .*moh-vit-s80"),
    ("moh-vit", {}, "shapes of none of .*moh-vit-b50"),
    # Candidates are those of the kind, though others' names start alike.
    ("dit", {}, r"of none of \['dit-s2', ((?!moh-dit).)*\Z"),
    ("moh-vit", {"model": "moh-vit-s80"},
     r"public\.safetensors: .*missing: .*shape: "),
    ("dit", {"config": _VIT}, "makes a model of 'dit'.* 'vit'"),
    ("moh-dit", {"config": _DIT, "image_size": 512},
     "--image-size 512 is not for family 'dit'"),
  )  # fmt: skip
  @pytest.mark.integration
  def test_other_formats_and_models_are_refused(self, kind, options, regex):
    source = _made("moh-dit" if "dit" in kind else "moh-vit")[0]
    with self.assertRaisesRegex(ValueError, regex):
      convert(kind, str(source), self.target(), **options)

  @pytest.mark.integration
  def test_exported_file_says_itself_what_it_is(self):
    params = restore(_made("moh-vit")[2]).params
    names = ("ant", "bee", "cat", "dog", "eel")
    ours, exported = self.target(), f"{self.target()}/exported.safetensors"
    checkpoint.save_params(ours, params, checkpoint.Metadata(_VIT, names))
    export(ours, exported)
    # A config that is given comes before that of the file.
    other = resolve(dataclasses.replace(_VIT, data=DataConfig(eval_resize=24)))
    for given, config, known in ((None, _VIT, names), (other, other, ())):
      out = self.target()
      name, _ = convert("moh-vit", exported, out, config=given)
      self.assertEqual(name == "the exported model", given is None)
      restored = restore(out)
      self.assertEqual((restored.config, restored.class_names), (config, known))
      chex.assert_trees_all_equal(restored.params, params)
    with self.assertRaisesRegex(ValueError, "--from 'dit' makes a.* of 'vit'"):
      convert("dit", exported, self.target())

    text = '{"config": {"model": {"family": "mlp"}}, "class_names": []}'
    save_tensors(exported, _made("moh-vit")[1], {"moh_jax": text})
    with self.assertRaisesRegex(ValueError, "metadata: model.family='mlp'"):
      convert("moh-vit", exported, self.target())
    stored = checkpoint.metadata_to_json(checkpoint.Metadata(_VIT, names[:3]))
    save_tensors(exported, _made("moh-vit")[1], {"moh_jax": json.dumps(stored)})
    with self.assertRaisesRegex(ValueError, "has 3 entries, must have 5"):
      convert("moh-vit", exported, self.target())

  @parameterized.parameters(*_RUNS)
  @pytest.mark.integration
  def test_folder_is_restored_as_the_checkpoint(self, kind):
    config = _RUNS[kind]
    names = tuple("abcdefghij"[: config.model.num_classes])
    params = restore(_made(kind)[2]).params
    ours, folder = self.target(), pathlib.Path(self.target(), "folder")
    metadata = checkpoint.Metadata(config, names)
    checkpoint.save_params(ours, params, metadata)
    count = export(ours, str(folder), to="folder")
    self.assertEqual(
      {path.name for path in folder.iterdir()},
      {"README.md", "config.json", "model.safetensors"},
    )
    restored = restore(str(folder))
    self.assertEqual((restored.config, restored.class_names), (config, names))
    chex.assert_trees_all_equal(restored.params, params)
    card = (folder / "README.md").read_text()
    self.assertIn(f"Mixture-of-Head {config.model.family}, ", card)
    self.assertIn(f"Images of {config.model.input_shape} (rows", card)
    self.assertIn(f"less {config.data.mean}, over\n{config.data.std}.", card)
    self.assertIn(f"{count:,} parameters", card)
    save_tensors(folder / "adapter_model.safetensors", {"w": np.ones(1)})
    restored = restore(str(folder))
    self.assertEqual((restored.config, restored.class_names), (config, names))
    stored = json.loads((folder / "config.json").read_text())
    self.assertEqual(stored["class_names"], list(names))
    stored["class_names"].reverse()
    (folder / "config.json").write_text(json.dumps(stored))
    with self.assertRaisesRegex(ValueError, "config.json: differs from the h"):
      convert(kind, str(folder), self.target())
    with self.assertRaisesRegex(ValueError, "holds 'README.md'; choose"):
      export(ours, str(folder), to="folder")

  @pytest.mark.integration
  def test_exported_adapters_are_a_part_of_the_weights(self):
    base, out = _made("moh-vit")[2], self.target()
    lora, params = LoraConfig(rank=2), restore(base).params
    adapters = Adapters.of(abstract_params(*make_model(_VIT)), lora)
    config = dataclasses.replace(
      _VIT, tune=TuneConfig(lora=lora), train=TrainConfig(init_from=base)
    )
    metadata = checkpoint.Metadata(config, base_mark=steps.mark(base, 0))
    trained = jax.tree.map(
      lambda x: jnp.full_like(x, 0.1), adapters.begin(jax.random.key(0), params)
    )
    checkpoint.save_params(out, trained, metadata)
    exported = f"{self.target()}/exported.safetensors"
    export(out, exported)
    converted = self.target()
    convert("moh-vit", exported, converted)
    again = restore(converted)
    self.assertEqual(again.config.tune, TuneConfig())
    chex.assert_trees_all_equal(again.params, restore(out).params)

  def test_another_folder_with_a_config_holds_no_checkpoint(self):
    folder = pathlib.Path(self.target())
    (folder / "config.json").write_text("{}")
    with self.assertRaisesRegex(FileNotFoundError, "holds no checkpoint"):
      restore(str(folder))


class ReleasedRunTest(parameterized.TestCase):
  """What a released model stands for; shapes only."""

  @parameterized.parameters(
    ("dit", "dit-s2", 64),
    ("dit", "dit-s4", 64),
    ("moh-dit", "moh-dit-s2-75", 16),
  )
  def test_position_table_says_the_input_size(self, kind, name, side):
    model = dataclasses.replace(released_model(name), input_size=(side, side))
    network, inputs = make_model(dataclasses.replace(_DIT, model=model))
    tensors = rules.expected_tensors(
      checkpoints.model_rules(model), unbox(abstract_params(network, inputs))
    )
    run = checkpoints.released_run(released_model(name), tensors)
    self.assertEqual((run.model, run.data.source), (model, "latents"))
    self.assertEqual(run.diffusion, DiffusionConfig(latent_scale=0.18215))
    self.assertEqual(checkpoints._find_model(kind, tensors, "a.pt"), name)

  @parameterized.parameters(
    ("dit-s2", {}),
    ("dit-s2", {"pos_embed": np.zeros((1, 250, 384))}),  # no square
    ("moh-vit-s80", {}),
  )
  def test_otherwise_the_size_is_the_models(self, name, tensors):
    run = checkpoints.released_run(released_model(name), tensors)
    self.assertEqual(run.model, released_model(name))
    if run.model.family == "vit":
      self.assertEqual(run.data.eval_resize, 256)


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


class DiffusersTest(FolderTest):
  """Plain DiT in diffusers' layout and back; diffusers itself was recorded."""

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
  _export_tiny(sys.argv[1])
