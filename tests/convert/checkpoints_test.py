"""Whole checkpoints there and back again."""

import pathlib

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config import Config, DataConfig, ViTConfig
from moh_jax.convert import rules, vit
from moh_jax.convert.checkpoints import convert, export
from moh_jax.convert.tensor_files import read_tensors, write_safetensors
from moh_jax.inference.restore import restore
from moh_jax.training.state import abstract_params, unbox
from moh_jax.models.build import make_model

_CONFIG = Config(
  model=ViTConfig(
    image_size=(16, 16),
    num_classes=5,
    embed_dims=(8, 16),
    depths=(2, 1),
    num_heads=(2, 4),
    shared_heads=(1, 2),
    top_k=(1, 1),
    mlp_ratios=(2, 2),
    sr_ratios=(2, 1),
  ),
  data=DataConfig(eval_resize=20),
)


def _tensors() -> dict[str, np.ndarray]:
  """A public checkpoint of the model with random weights."""
  model, inputs = make_model(_CONFIG)
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32),
    unbox(abstract_params(model, inputs)),
  )
  return rules.dump_params(vit.model_rules(_CONFIG.model), params)


class ConvertTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(cls.create_tempdir(cls()).full_path)
    cls.source, cls.out = cls.folder / "public.safetensors", cls.folder / "ours"
    write_safetensors(cls.source, _tensors())
    cls.result = convert(
      "moh-vit", str(cls.source), str(cls.out), config=_CONFIG
    )

  def _target(self) -> str:
    return self.create_tempdir().full_path

  def test_returns_the_name_and_the_number_of_parameters(self):
    total = sum(tensor.size for tensor in _tensors().values())
    self.assertEqual(self.result, ("custom", total))

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

  def test_export_without_a_checkpoint_raises(self):
    with self.assertRaises(FileNotFoundError):
      export(self._target(), str(self.folder / "none.safetensors"))


if __name__ == "__main__":
  absltest.main()
