"""Whole checkpoints there and back again."""

import dataclasses
import functools
import pathlib

import chex
import jax
import numpy as np
import safetensors.numpy
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
from moh_jax.runtime.params import abstract_params, unbox
from tests.convert.stored import save_tensors
from tests.models import small_vit

_CONFIG = resolve(
  Config(
    model=small_vit.TWO_STAGES,
    data=DataConfig(eval_resize=20),
  )
)
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


def _tensors(config: Config = _CONFIG) -> dict[str, np.ndarray]:
  """A public checkpoint of the model with random weights."""
  model, inputs = make_model(config)
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32),
    unbox(abstract_params(model, inputs)),
  )
  return rules.dump_params(checkpoints.model_rules(config.model), params)


class ConvertTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(cls.create_tempdir(cls()).full_path)
    cls.source, cls.out = cls.folder / "public.safetensors", cls.folder / "ours"
    save_tensors(cls.source, _tensors())
    cls.result = convert(
      "moh-vit", str(cls.source), str(cls.out), config=_CONFIG
    )

  def _target(self) -> str:
    return self.create_tempdir().full_path

  def test_returns_the_name_and_the_number_of_parameters(self):
    total = sum(tensor.size for tensor in _tensors().values())
    self.assertEqual(self.result, ("the given config", total))

  def test_export_returns_the_source_tensors(self):
    exported = self.folder / "again.safetensors"
    total = export(str(self.out), str(exported))
    self.assertEqual(total, self.result[1])
    chex.assert_trees_all_equal(read_tensors(exported), _tensors())

  def test_converted_checkpoint_restores_with_its_config(self):
    restored = restore(str(self.out))
    self.assertEqual(restored.config.model, _CONFIG.model)
    self.assertEqual(restored.step, 0)
    images = np.ones((1, 16, 16, 3), np.float32)
    logits, _ = jax.jit(restored.model.apply)(
      {"params": restored.params}, images
    )
    chex.assert_shape(logits, (1, 5))
    chex.assert_tree_all_finite(logits)

  def test_other_image_size_keeps_the_pretraining_size_and_crop(self):
    out = self._target()
    convert("moh-vit", str(self.source), out, config=_CONFIG, image_size=32)
    config = restore(out).config
    self.assertEqual(config.model.image_size, (32, 32))
    self.assertEqual(config.model.pretrain_image_size, 16)
    self.assertEqual(config.data.eval_resize, 40)

  def test_refuses_a_directory_that_holds_checkpoints(self):
    with self.assertRaisesRegex(ValueError, "ours"):
      convert("moh-vit", str(self.source), str(self.out), config=_CONFIG)
    # What was there is untouched.
    self.assertEqual(restore(str(self.out)).config.model, _CONFIG.model)

  def test_unknown_format_lists_the_known(self):
    with self.assertRaisesRegex(ValueError, "'vit' .*moh-vit.*transnext"):
      convert("vit", str(self.source), self._target())

  def test_unknown_model_lists_the_known(self):
    with self.assertRaisesRegex(ValueError, "'moh-vit-s81' .*moh-vit-s80"):
      convert("moh-vit", str(self.source), self._target(), model="moh-vit-s81")

  @parameterized.parameters(
    ("moh-vit", "moh-vit-b50"), ("transnext", "transnext-micro")
  )
  def test_shapes_of_no_released_model_list_the_candidates(self, kind, known):
    with self.assertRaisesRegex(ValueError, f"shapes of none of .*{known}"):
      convert(kind, str(self.source), self._target())

  def test_tensors_that_do_not_fit_the_named_model_are_listed(self):
    with self.assertRaisesRegex(
      ValueError, r"public\.safetensors: .*missing: .*shape: "
    ):
      convert("moh-vit", str(self.source), self._target(), model="moh-vit-s80")

  def test_missing_source_is_named(self):
    with self.assertRaisesRegex(FileNotFoundError, "nowhere"):
      convert("moh-vit", str(self.folder / "nowhere"), self._target())

  def _exported(self, metadata: checkpoint.Metadata) -> str:
    """The file that a checkpoint with this metadata becomes."""
    directory = self._target()
    params = restore(str(self.out)).params
    checkpoint.save_params(directory, params, metadata)
    export(directory, f"{directory}/exported.safetensors")
    return f"{directory}/exported.safetensors"

  def test_exported_file_says_itself_what_it_is(self):
    names = ("ant", "bee", "cat", "dog", "eel")
    exported = self._exported(checkpoint.Metadata(_CONFIG, names))
    out = self._target()
    result = convert("moh-vit", exported, out)
    self.assertEqual(result, ("the exported model", self.result[1]))
    restored = restore(out)
    self.assertEqual(restored.config, _CONFIG)
    self.assertEqual(restored.class_names, names)
    chex.assert_trees_all_equal(restored.params, restore(str(self.out)).params)

  def test_named_config_comes_before_that_of_the_file(self):
    exported = self._exported(checkpoint.Metadata(_CONFIG, tuple("abcde")))
    other = resolve(
      dataclasses.replace(_CONFIG, data=DataConfig(eval_resize=24))
    )
    out = self._target()
    convert("moh-vit", exported, out, config=other)
    restored = restore(out)
    self.assertEqual(restored.config, other)
    self.assertEqual(restored.class_names, ())

  def test_exported_file_of_another_family_is_refused(self):
    exported = self._exported(checkpoint.Metadata(_CONFIG))
    with self.assertRaisesRegex(ValueError, "--from 'dit': .* of 'vit'"):
      convert("dit", exported, self._target())

  def test_config_of_another_family_is_refused(self):
    with self.assertRaisesRegex(ValueError, "makes a model of 'dit'.* 'vit'"):
      convert("dit", str(self.source), self._target(), config=_CONFIG)

  def test_exported_file_of_another_version_is_refused(self):
    source = self.folder / "other.safetensors"
    text = {
      "moh_jax": '{"config": {"model": {"family": "mlp"}}, "class_names": []}'
    }
    safetensors.numpy.save_file(_tensors(), source, text)
    with self.assertRaisesRegex(ValueError, "its metadata: model.family='mlp'"):
      convert("moh-vit", str(source), self._target())

  def test_export_without_a_checkpoint_raises(self):
    with self.assertRaises(FileNotFoundError):
      export(self._target(), str(self.folder / "none.safetensors"))


class ConvertDiTTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(cls.create_tempdir(cls()).full_path)
    cls.source, cls.out = cls.folder / "public.safetensors", cls.folder / "ours"
    cls.tensors = _tensors(_DIT)
    save_tensors(cls.source, cls.tensors)
    cls.result = convert("moh-dit", str(cls.source), str(cls.out), config=_DIT)

  def test_restores_with_its_process_and_sampling(self):
    restored = restore(str(self.out))
    self.assertEqual(restored.config.model, _DIT.model)
    self.assertEqual(restored.config.diffusion, _DIT.diffusion)
    self.assertEqual(restored.config.sample, _DIT.sample)
    kernel = restored.params["blocks1"]["mlp"]["up"]["kernel"][1]
    np.testing.assert_array_equal(
      kernel.T, self.tensors["blocks.2.mlp.fc1.weight"]
    )

  def test_counts_parameters_without_the_fixed_table(self):
    sizes = {name: tensor.size for name, tensor in self.tensors.items()}
    total = sum(sizes.values()) - sizes["pos_embed"]
    self.assertEqual(self.result, ("the given config", total))

  def test_export_returns_the_source_tensors(self):
    exported = self.folder / "again.safetensors"
    export(str(self.out), str(exported))
    chex.assert_trees_all_equal(read_tensors(exported), self.tensors)

  def test_export_counts_as_convert_does(self):
    exported = self.folder / "counted.safetensors"
    self.assertEqual(export(str(self.out), str(exported)), self.result[1])

  def test_image_size_is_refused(self):
    out = self.create_tempdir().full_path
    with self.assertRaisesRegex(
      ValueError, "--image-size 512: only image classifiers .*family='dit'"
    ):
      convert("moh-dit", str(self.source), out, config=_DIT, image_size=512)

  def test_shapes_of_no_released_model_list_the_candidates(self):
    # Of its own kind only: those of the others start alike.
    with self.assertRaises(ValueError) as caught:
      convert("dit", str(self.source), self.create_tempdir().full_path)
    message = str(caught.exception)
    self.assertIn("shapes of none of ['dit-s2', ", message)
    self.assertNotIn("moh-dit", message)


@functools.cache
def _shapes(name: str, side: int) -> dict[str, jax.ShapeDtypeStruct]:
  """The public tensors of a released model for inputs of this size."""
  model = dataclasses.replace(released_model(name), input_size=(side, side))
  network, inputs = make_model(dataclasses.replace(_DIT, model=model))
  params = unbox(abstract_params(network, inputs))
  table = checkpoints.model_rules(model)
  return jax.eval_shape(functools.partial(rules.dump_params, table), params)


class ReleasedRunTest(parameterized.TestCase):
  """What a released model stands for; shapes only."""

  @parameterized.product(name=("dit-s2", "moh-dit-s2-75"), side=(32, 64, 16))
  def test_input_size_is_that_of_the_position_table(self, name, side):
    run = checkpoints._released_run(released_model(name), _shapes(name, side))
    self.assertEqual(run.model.input_size, (side, side))
    same = dataclasses.replace(released_model(name), input_size=(side, side))
    self.assertEqual(run.model, same)
    self.assertEqual(run.data.source, "latents")
    self.assertEqual(run.diffusion, DiffusionConfig(latent_scale=0.18215))

  @parameterized.parameters(
    ("dit", "dit-s4", 64),
    ("dit", "dit-s8", 32),
    ("moh-dit", "moh-dit-s2-90", 64),
  )
  def test_model_is_found_by_its_shapes(self, kind, name, side):
    found = checkpoints._find_model(kind, _shapes(name, side), "a.pt")
    self.assertEqual(found, name)

  @parameterized.parameters(({},), ({"pos_embed": np.zeros((1, 250, 384))},))
  def test_without_a_square_table_the_size_is_the_models(self, tensors):
    run = checkpoints._released_run(released_model("dit-s2"), tensors)
    self.assertEqual(run.model, released_model("dit-s2"))

  def test_classifier_keeps_its_size(self):
    run = checkpoints._released_run(released_model("moh-vit-s80"), {})
    self.assertEqual(run.model, released_model("moh-vit-s80"))
    self.assertEqual(run.data.eval_resize, 256)


if __name__ == "__main__":
  absltest.main()
