"""Autoencoder checkpoints: both ages of names, folders, sizes, errors.

The recorded case goes through the same rules in parity_test.py.
"""

import functools
import json
import pathlib

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.autoencoder import LatentScaling, VAEConfig
from moh_jax.convert import VAE_FILES, rules, vae
from tests.convert.stored import save_tensors

_CONFIG = VAEConfig(
  block_out_channels=(4, 8),
  layers_per_block=1,
  latent_channels=3,
  norm_groups=2,
)
_JSON = {
  "_class_name": "AutoencoderKL",
  "act_fn": "silu",
  "block_out_channels": [4, 8],
  "down_block_types": ["DownEncoderBlock2D"] * 2,
  "in_channels": 3,
  "latent_channels": 3,
  "layers_per_block": 1,
  "norm_num_groups": 2,
  "out_channels": 3,
  "sample_size": 32,
  "up_block_types": ["UpDecoderBlock2D"] * 2,
}
_OLD = {
  "to_q": "query",
  "to_k": "key",
  "to_v": "value",
  "to_out.0": "proj_attn",
}


@functools.cache
def _params(config: VAEConfig = _CONFIG):
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype),
    vae.abstract_vae(config),
  )


def _dump(params, config):
  """Parameters as public tensors."""
  return rules.dump_params(vae.vae_rules(config), params)


def _tensors() -> dict[str, np.ndarray]:
  return dict(_dump(_params(), _CONFIG))


def _old_names(tensors, *, convolutions):
  out = {}
  for name, tensor in tensors.items():
    for new, old in _OLD.items():
      if f".attentions.0.{new}." in name:
        name = name.replace(new, old)
        if convolutions and tensor.ndim == 2:
          tensor = tensor[:, :, None, None]
    out[name] = tensor
  return out


class NamesTest(parameterized.TestCase):
  def test_round_trip_is_exact(self):
    tensors = _tensors()
    params = vae.convert_vae(tensors, _CONFIG, source="some.file")
    chex.assert_trees_all_equal(params, _params())
    chex.assert_trees_all_equal(dict(_dump(params, _CONFIG)), tensors)

  @parameterized.parameters(False, True)
  def test_old_names_give_the_same_parameters(self, convolutions):
    old = _old_names(_tensors(), convolutions=convolutions)
    self.assertIn("decoder.mid_block.attentions.0.proj_attn.weight", old)
    params = vae.convert_vae(old, _CONFIG, source="some.file")
    chex.assert_trees_all_equal(params, _params())

  def test_both_names_of_a_tensor_are_refused(self):
    tensors = _tensors()
    tensors |= _old_names(tensors, convolutions=False)
    with self.assertRaisesRegex(ValueError, r"not expected: .*\.query\.weight"):
      vae.convert_vae(tensors, _CONFIG, source="some.file")

  def test_public_file_has_248_tensors(self):
    table = vae.vae_rules(VAEConfig())
    self.assertLen({name for rule in table for name in rule.theirs}, 248)


class InferTest(parameterized.TestCase):
  @parameterized.parameters(
    VAEConfig(),
    VAEConfig(block_out_channels=(32, 96, 64), layers_per_block=1),
    VAEConfig(
      block_out_channels=(32,),
      layers_per_block=3,
      image_channels=1,
      latent_channels=16,
      use_quant_conv=False,
      use_post_quant_conv=False,
      mid_attention=False,
    ),
  )
  def test_sizes_come_from_the_shapes(self, config):
    shapes = jax.eval_shape(
      functools.partial(_dump, config=config), vae.abstract_vae(config)
    )
    self.assertEqual(vae.infer_config(shapes, source="some.file"), config)

  def test_unknown_groups_ask_for_the_config(self):
    with self.assertRaisesRegex(
      ValueError, r"some\.file: widths \(4, 8\) .* config\.json"
    ):
      vae.infer_config(_tensors(), source="some.file")

  def test_other_networks_are_named(self):
    with self.assertRaisesRegex(ValueError, r"no convolution encoder\.conv_in"):
      vae.infer_config({"wg.weight": np.zeros((3, 3))}, source="some.file")


class LoadTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _write(self, folder, tensors=None, **entries):
    folder.mkdir(exist_ok=True)
    save_tensors(folder / VAE_FILES[0], tensors or _tensors())
    (folder / "config.json").write_text(json.dumps(_JSON | entries))

  @parameterized.parameters("", VAE_FILES[0])
  def test_folder_and_file(self, name):
    self._write(self.folder)
    config, params = vae.load_vae(self.folder / name)
    self.assertEqual(config, _CONFIG)
    chex.assert_trees_all_equal(params, _params())

  def test_scaling_of_latents(self):
    self._write(
      self.folder, scaling_factor=0.25, shift_factor=0.5,
      latents_mean=[1, 2.5, 3], latents_std=[2.0, 1.0, 4.0],
    )  # fmt: skip
    config, _ = vae.load_vae(self.folder)
    expected = LatentScaling(0.25, 0.5, (1, 2.5, 3), (2.0, 1.0, 4.0))
    self.assertEqual(config.scaling, expected)

  @parameterized.parameters(
    ({"latents_mean": [1.0]}, "latent mean=.* must have 3 values"),
    ({"scaling_factor": 0}, "latents.scale=0 must be above 0"),
    ({"shift_factor": "0"}, "config.json.*shift_factor.*must be"),
  )
  def test_wrong_scaling_is_named(self, entries, text):
    self._write(self.folder, **entries)
    with self.assertRaisesRegex(ValueError, text):
      vae.load_vae(self.folder)

  def test_half_precision_variant_of_a_folder(self):
    self._write(self.folder)
    (self.folder / VAE_FILES[0]).rename(
      self.folder / "diffusion_pytorch_model.fp16.safetensors"
    )
    _, params = vae.load_vae(self.folder)
    chex.assert_trees_all_equal(params, _params())

  def test_pipeline_folder(self):
    self._write(self.folder / "vae")
    config, params = vae.load_vae(str(self.folder))
    self.assertEqual(config, _CONFIG)
    chex.assert_trees_all_equal(params, _params())

  def test_file_without_config_and_half_precision(self):
    config = VAEConfig(block_out_channels=(32,), layers_per_block=1)
    tensors = _dump(_params(config), config)
    half = {name: x.astype(np.float16) for name, x in tensors.items()}
    file = self.folder / "vae.safetensors"
    save_tensors(file, half)
    found, params = vae.load_vae(file)
    self.assertEqual(found, config)
    chex.assert_type(jax.tree.leaves(params), np.float32)
    chex.assert_trees_all_close(params, _params(config), rtol=1e-3, atol=1e-6)

  @parameterized.parameters("", "absent.safetensors")
  def test_missing_file_says_what_is_expected(self, name):
    with self.assertRaises(FileNotFoundError) as caught:
      vae.load_vae(self.folder / name)
    message = str(caught.exception)
    for part in (
      str(self.folder),
      "diffusion_pytorch_model.safetensors",
      "stabilityai/sd-vae-ft-mse",
      "stabilityai/sd-vae-ft-ema",
      "--vae PATH",
    ):
      self.assertIn(part, message)

  def test_tensors_that_do_not_fit_are_listed(self):
    tensors = _tensors()
    del tensors["quant_conv.bias"]
    tensors["quant_conv.weight"] = np.zeros((6, 6, 3, 3), np.float32)
    self._write(self.folder, tensors | {"other": np.zeros(1)})
    with self.assertRaisesRegex(
      ValueError,
      r"1 missing: quant_conv\.bias; 1 not expected: other; "
      r"1 shape: quant_conv\.weight",
    ):
      vae.load_vae(self.folder)

  @parameterized.parameters(
    ({"_class_name": "AsymmetricAutoencoderKL"}, "_class_name='Asymmetric"),
    ({"act_fn": "relu"}, "act_fn='relu' must be one of"),
    ({"out_channels": 4}, "out_channels=4"),
    ({"up_block_types": ["AttnUpDecoderBlock2D"] * 2}, "up_block_types="),
  )
  def test_other_architectures_are_refused(self, entries, message):
    self._write(self.folder, **entries)
    with self.assertRaisesRegex(
      NotImplementedError, rf"config\.json: {message}"
    ):
      vae.load_vae(self.folder)

  @parameterized.parameters(
    ("{", "not valid JSON"),
    ("[]", "must be 'object', not array"),
    ("{}", "has no entry 'block_out_channels'"),
    ('{"block_out_channels": "48"}', "block_out_channels='48' must be"),
  )
  def test_damaged_config_is_named(self, text, message):
    self._write(self.folder)
    (self.folder / "config.json").write_text(text)
    with self.assertRaisesRegex(ValueError, rf"config\.json: {message}"):
      vae.load_vae(self.folder)


if __name__ == "__main__":
  absltest.main()
