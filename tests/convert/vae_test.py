"""Autoencoder checkpoints: both ages of names, folders, errors.

The recorded case goes through the same rules in the parity tests.
"""

import functools
import json
import pathlib

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.config.dit import LatentScaling, VAEConfig
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
def _params():
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(x.dtype),
    vae.abstract_vae(_CONFIG),
  )


def _tensors() -> dict[str, np.ndarray]:
  return dict(rules.dump_params(vae.vae_rules(_CONFIG), _params()))


def _old_names(*, convolutions):
  out = {}
  for name, tensor in _tensors().items():
    for new, old in _OLD.items():
      if f".attentions.0.{new}." in name:
        name = name.replace(new, old)
        if convolutions and tensor.ndim == 2:
          tensor = tensor[:, :, None, None]
    out[name] = tensor
  return out


class NamesTest(parameterized.TestCase):
  def _convert(self, tensors):
    return vae.convert_vae(tensors, _CONFIG, source="some.file")

  @parameterized.parameters(False, True)
  def test_old_names_give_the_same_parameters(self, convolutions):
    self.assertLen(
      rules.expected_tensors(
        vae.vae_rules(VAEConfig()), vae.abstract_vae(VAEConfig())
      ),
      248,
    )
    chex.assert_trees_all_equal(self._convert(_tensors()), _params())
    old = _old_names(convolutions=convolutions)
    self.assertIn("decoder.mid_block.attentions.0.proj_attn.weight", old)
    chex.assert_trees_all_equal(self._convert(old), _params())

  def test_both_names_of_a_tensor_are_refused(self):
    tensors = _tensors() | _old_names(convolutions=False)
    with self.assertRaisesRegex(ValueError, r"not expected: .*\.query\.weight"):
      self._convert(tensors)


class LoadTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)

  def _write(self, name="", tensors=None, **entries):
    file = self.folder / (name or VAE_FILES[0])
    file.parent.mkdir(exist_ok=True)
    save_tensors(file, tensors or _tensors())
    file.with_name("config.json").write_text(json.dumps(_JSON | entries))

  @parameterized.parameters(
    ("", ""),
    ("", VAE_FILES[0]),
    (f"vae/{VAE_FILES[0]}", ""),  # folder of a pipeline
    ("diffusion_pytorch_model.fp16.safetensors", ""),
    ("vae.st", "vae.st"),
  )
  def test_folder_or_file(self, name, given):
    self._write(name)
    config, params = vae.load_vae(str(self.folder / given))
    self.assertEqual(config, _CONFIG)
    chex.assert_trees_all_equal(params, _params())

  def test_scaling_of_latents(self):
    self._write(
      scaling_factor=0.25, shift_factor=0.5,
      latents_mean=[1, 2.5, 3], latents_std=[2.0, 1.0, 4.0],
    )  # fmt: skip
    config, _ = vae.load_vae(self.folder)
    expected = LatentScaling(0.25, 0.5, (1, 2.5, 3), (2.0, 1.0, 4.0))
    self.assertEqual(config.scaling, expected)

  @parameterized.parameters("", "absent.safetensors", "config.json")
  def test_missing_file_says_what_is_expected(self, name):
    if name == "config.json":
      self._write()
      (self.folder / name).unlink()
    given = self.folder if name == "config.json" else self.folder / name
    with self.assertRaises(FileNotFoundError) as caught:
      vae.load_vae(given)
    for part in (
      str(self.folder / name),
      "diffusion_pytorch_model.safetensors",
      "config.json",
      "stabilityai/sd-vae-ft-mse",
      "stabilityai/sd-vae-ft-ema",
      "--vae PATH",
    ):
      self.assertIn(part, str(caught.exception))

  @parameterized.parameters(
    ({"latents_mean": [1.0]}, ValueError, "latents.mean=.* must have 3 values"),
    ({"scaling_factor": 0}, ValueError, "latents.scale=0.0 must be above 0"),
    ({"shift_factor": "0"}, ValueError, ".*shift_factor.*must be"),
    (
      {"_class_name": "AsymmetricAutoencoderKL"},
      *(NotImplementedError, "_class_name='Asymmetric"),
    ),
    ({"out_channels": 4}, NotImplementedError, "out_channels=4"),
    (
      {"up_block_types": ["AttnUpDecoderBlock2D"] * 2},
      *(NotImplementedError, "up_block_types="),
    ),
    ({"block_out_channels": "48"}, ValueError, "block_out_channels='48' must"),
  )
  def test_other_configs_are_refused(self, entries, error, message):
    self._write(**entries)
    with self.assertRaisesRegex(error, rf"config\.json: {message}"):
      vae.load_vae(self.folder)

  @parameterized.parameters(
    ("{", "not valid JSON"),
    ("[]", "must be 'object', not array"),
    ("{}", "has no entry 'block_out_channels'"),
  )
  def test_damaged_config_is_named(self, text, message):
    self._write()
    (self.folder / "config.json").write_text(text)
    with self.assertRaisesRegex(ValueError, rf"config\.json: {message}"):
      vae.load_vae(self.folder)


if __name__ == "__main__":
  absltest.main()
