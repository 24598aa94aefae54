"""Whole checkpoints of images there and back again."""

import dataclasses
import functools
import pathlib

import chex
import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax.config import (
  Config,
  DataConfig,
  DiffusionConfig,
  DiTConfig,
  SampleConfig,
  released_model,
)
from moh_jax.convert import checkpoints, rules
from moh_jax.convert.checkpoints import convert, export
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.data.infer import resolve
from moh_jax.inference.restore import restore
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint
from moh_jax.runtime.sharding import abstract_params, unbox
from tests.convert.stored import save_tensors
from tests.models import small

_VIT = resolve(Config(model=small.TWO_STAGES, data=DataConfig(eval_resize=20)))
_DIT = resolve(
  Config(
    model=DiTConfig(
      channels=4,
      input_size=(8, 8),
      num_classes=5,
      width=16,
      num_heads=(2, 4, 4),
      head_dim=4,
      shared_heads=(2, 2, 2),
      top_k=(0, 1, 1),
    ),
    data=DataConfig(source="latents", path="some/latents"),
    diffusion=DiffusionConfig(prediction="v"),
    sample=SampleConfig(cfg_scale=4.0),
  )
)


def _tensors(config: Config) -> dict[str, np.ndarray]:
  """A public checkpoint of the model with random weights."""
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32),
    unbox(abstract_params(*make_model(config))),
  )
  return rules.dump_params(checkpoints.model_rules(config.model), params)


class _Case(parameterized.TestCase):
  """A public checkpoint, and what `convert` makes of it."""

  kind: str
  config: Config

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(cls.create_tempdir(cls()).full_path)
    cls.source, cls.out = cls.folder / "public.safetensors", cls.folder / "ours"
    cls.tensors = _tensors(cls.config)
    save_tensors(cls.source, cls.tensors)
    cls.result = convert(
      cls.kind, str(cls.source), str(cls.out), config=cls.config
    )

  def target(self) -> str:
    return self.create_tempdir().full_path

  def check_there_and_back(self, count):
    self.assertEqual(self.result, ("the given config", count))
    exported = self.folder / "again.safetensors"
    self.assertEqual(export(str(self.out), str(exported)), count)
    chex.assert_trees_all_equal(read_tensors(exported), self.tensors)

  def assert_refused(self, regex, kind, source=None, **options):
    source = str(source or self.source)
    with self.assertRaisesRegex(ValueError, regex):
      convert(kind, source, self.target(), **options)


class ViTTest(_Case):
  kind, config = "moh-vit", _VIT

  def test_there_and_back(self):
    self.check_there_and_back(sum(x.size for x in self.tensors.values()))
    restored = restore(str(self.out))
    self.assertEqual(restored.config.model, _VIT.model)
    self.assertEqual(restored.step, 0)

  @pytest.mark.transformers
  def test_averages_of_a_file_of_torch_save(self):
    torch = pytest.importorskip("torch")
    entries = {
      entry: {n: torch.tensor(x + add) for n, x in self.tensors.items()}
      for add, entry in enumerate(("ema", "model"))
    }
    torch.save(entries, self.folder / "public.pth")
    out = self.target()
    convert("moh-vit", str(self.folder / "public.pth"), out, config=_VIT)
    chex.assert_trees_all_equal(
      restore(out).params, restore(str(self.out)).params
    )

  @parameterized.parameters(
    ("vit", {}, "'vit' .*moh-vit.*transnext"),
    ("moh-vit", {"model": "moh-vit-s81"}, "'moh-vit-s81' .*moh-vit-s80"),
    ("moh-vit", {}, "shapes of none of .*moh-vit-b50"),
    (
      "moh-vit",
      {"model": "moh-vit-s80"},
      r"public\.safetensors: .*missing: .*shape: ",
    ),
    ("dit", {"config": _VIT}, "makes a model of 'dit'.* 'vit'"),
  )
  def test_other_formats_and_models_are_refused(self, kind, options, regex):
    self.assert_refused(regex, kind, **options)

  def test_missing_files_are_named(self):
    with self.assertRaisesRegex(FileNotFoundError, "nowhere"):
      convert("moh-vit", str(self.folder / "nowhere"), self.target())
    with self.assertRaises(FileNotFoundError):
      export(self.target(), str(self.folder / "none.safetensors"))

  def _exported(self, metadata: checkpoint.Metadata) -> str:
    """The file that a checkpoint with this metadata becomes."""
    directory = self.target()
    params = restore(str(self.out)).params
    checkpoint.save_params(directory, params, metadata)
    export(directory, f"{directory}/exported.safetensors")
    return f"{directory}/exported.safetensors"

  def test_exported_file_says_itself_what_it_is(self):
    names = ("ant", "bee", "cat", "dog", "eel")
    exported = self._exported(checkpoint.Metadata(_VIT, names))
    out = self.target()
    result = convert("moh-vit", exported, out)
    self.assertEqual(result, ("the exported model", self.result[1]))
    restored = restore(out)
    self.assertEqual(restored.config, _VIT)
    self.assertEqual(restored.class_names, names)
    chex.assert_trees_all_equal(restored.params, restore(str(self.out)).params)
    # A config that is given comes before that of the file.
    other = resolve(dataclasses.replace(_VIT, data=DataConfig(eval_resize=24)))
    out = self.target()
    convert("moh-vit", exported, out, config=other)
    self.assertEqual(restore(out).config, other)
    self.assertEqual(restore(out).class_names, ())
    self.assert_refused("--from 'dit' makes a.* of 'vit'", "dit", exported)

  def test_exported_file_of_another_version_is_refused(self):
    source = self.folder / "other.safetensors"
    text = '{"config": {"model": {"family": "mlp"}}, "class_names": []}'
    save_tensors(source, self.tensors, {"moh_jax": text})
    self.assert_refused("its metadata: model.family='mlp'", "moh-vit", source)


class DiTTest(_Case):
  kind, config = "moh-dit", _DIT

  def test_there_and_back(self):
    count = sum(x.size for x in self.tensors.values())
    # The position table is fixed, so no parameter.
    self.check_there_and_back(count - self.tensors["pos_embed"].size)
    restored = restore(str(self.out))
    self.assertEqual(restored.config.model, _DIT.model)
    self.assertEqual(restored.config.diffusion, _DIT.diffusion)
    self.assertEqual(restored.config.sample, _DIT.sample)

  def test_refusals(self):
    self.assert_refused(
      "--image-size 512 is not for family 'dit'",
      "moh-dit", config=_DIT, image_size=512,
    )  # fmt: skip
    # Candidates are those of the kind, though others' names start alike.
    self.assert_refused(r"of none of \['dit-s2', ((?!moh-dit).)*\Z", "dit")


@functools.cache
def _shapes(name: str, side: int) -> dict[str, jax.ShapeDtypeStruct]:
  """The public tensors of a released model for inputs of this size."""
  model = dataclasses.replace(released_model(name), input_size=(side, side))
  network, inputs = make_model(dataclasses.replace(_DIT, model=model))
  params = unbox(abstract_params(network, inputs))
  return rules.expected_tensors(checkpoints.model_rules(model), params)


class ReleasedRunTest(parameterized.TestCase):
  """What a released model stands for; shapes only."""

  @parameterized.parameters(("dit-s2", 64), ("moh-dit-s2-75", 16))
  def test_input_size_is_that_of_the_position_table(self, name, side):
    run = checkpoints.released_run(released_model(name), _shapes(name, side))
    same = dataclasses.replace(released_model(name), input_size=(side, side))
    self.assertEqual(run.model, same)
    self.assertEqual(run.data.source, "latents")
    self.assertEqual(run.diffusion, DiffusionConfig(latent_scale=0.18215))

  @parameterized.parameters(
    ("dit", "dit-s4", 64),
    ("moh-dit", "moh-dit-s2-90", 64),
  )
  def test_model_is_found_by_its_shapes(self, kind, name, side):
    found = checkpoints._find_model(kind, _shapes(name, side), "a.pt")
    self.assertEqual(found, name)

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


if __name__ == "__main__":
  absltest.main()
