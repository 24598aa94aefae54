"""Autoencoders: names, folders, errors, and in use.

The recorded cases go through the same rules in the parity tests.
"""

import json

import chex
import jax
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.config.dit import LatentScaling
from moh_jax.convert import rules, vae
from moh_jax.convert.vae import VAE_FILES
from moh_jax.models.vae import encoder_sha256
from moh_jax.runtime.mesh import make_mesh
from tests.convert.stored import save_tensors
from tests.folders import FolderTest
from tests.inference import tiny_vae
from tests.training import tiny

_CONFIG = tiny_vae.CONFIG
_OLD = {"to_q": "query", "to_k": "key", "to_v": "value"}
_OLD |= {"to_out.0": "proj_attn"}


def _tensors() -> dict[str, np.ndarray]:
  return rules.dump_params(vae.vae_rules(_CONFIG), tiny_vae.params())


class NamesTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_old_names_of_attention_give_the_same_parameters(self, convolutions):
    tensors = {}
    for name, tensor in _tensors().items():
      layer, _, leaf = name.partition("attentions.0.")[2].rpartition(".")
      if layer in _OLD:
        name = name.replace(f"{layer}.{leaf}", f"{_OLD[layer]}.{leaf}")
        if convolutions and leaf == "weight":
          tensor = tensor[:, :, None, None]
      tensors[name] = tensor
    self.assertIn("decoder.mid_block.attentions.0.proj_attn.weight", tensors)
    params = vae.convert_vae(tensors, _CONFIG, source="some.file")
    chex.assert_trees_all_equal(params, tiny_vae.params())


class LoadTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.folder = self.root / "new"
    tiny_vae.save(self.folder)
    self.config = self.folder / "config.json"

  def _change(self, **entries):
    self.config.write_text(
      json.dumps(json.loads(self.config.read_text()) | entries)
    )

  @parameterized.parameters(
    ("", ""),
    ("", VAE_FILES[0]),
    (f"vae/{VAE_FILES[0]}", ""),  # folder of a pipeline
    (VAE_FILES[2], ""),
    ("vae.st", "vae.st"),
  )
  @pytest.mark.integration
  def test_folder_or_file(self, name, given):
    file = self.folder / (name or VAE_FILES[0])
    file.parent.mkdir(exist_ok=True)
    (self.folder / VAE_FILES[0]).rename(file)
    self.config.rename(file.with_name("config.json"))
    config, params = vae.load_vae(str(self.folder / given))
    self.assertEqual(config, _CONFIG)
    chex.assert_trees_all_equal(params, tiny_vae.params())

  def test_scaling_of_latents_and_halves(self):
    shifts = {"shift_factor": 0.5, "latents_mean": [1, 2.5]}
    self._change(scaling_factor=0.25, latents_std=[2.0, 4.0], **shifts)
    halves = {n: x.astype(np.float16) for n, x in _tensors().items()}
    save_tensors(self.folder / VAE_FILES[0], halves)
    config, params = vae.load_vae(self.folder)
    expected = LatentScaling(0.25, 0.5, (1, 2.5), (2.0, 4.0))
    self.assertEqual(config.scaling, expected)
    chex.assert_type(jax.tree.leaves(params), np.float32)

  @parameterized.parameters(VAE_FILES[0], "config.json")
  def test_missing_file_says_what_is_expected(self, name):
    (self.folder / name).unlink()
    hint = f"{self.folder}.*: .*{VAE_FILES[0]}.*sd-vae-ft-mse.*--vae PATH"
    with self.assertRaisesRegex(FileNotFoundError, hint):
      vae.load_vae(self.folder)

  @parameterized.parameters(
    ({"latents_mean": [1.0]}, "latents.mean=.* must have 2 values"),
    ({"_class_name": "AsymmetricAutoencoderKL"}, "_class_name='Asymmetric"),
    ({"up_block_types": ["AttnUpDecoderBlock2D"] * 2}, "up_block_types="),
    ({"block_out_channels": "48"}, ".*got `str` - at .*block_out_channels"),
  )
  def test_other_configs_are_refused(self, entries, message):
    self._change(**entries)
    errors = ValueError, NotImplementedError
    with self.assertRaisesRegex(errors, rf"config\.json: {message}"):
      vae.load_vae(self.folder)


class AutoencoderTest(FolderTest):
  """Beside a diffusion model: scaling, and other autoencoders than its own."""

  def setUp(self):
    super().setUp()
    self.folder = self.root / "vae"
    tiny_vae.save(self.folder)

  def _load(self, encoder="", channels=2, **diffusion):
    config = tiny.dit_config(
      model={"channels": channels},
      data={"source": "fake"},
      diffusion={"space": "latent", "latent_scale": 0.18215, **diffusion},
    )
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    return vae.load_autoencoder(str(self.folder), config, mesh, encoder=encoder)

  @parameterized.parameters(
    ({"encoder": encoder_sha256(_CONFIG, tiny_vae.params())}, ""),
    ({"encoder": "0" * 64}, "its encoder is another one"),
    ({"latent_scale": 0.5, "latent_shift": 1.0},
     "0.5 here, 0.18215 there; latent.shift: 1.0 here, 0.0 there"),
  )  # fmt: skip
  def test_other_encoders_and_scalings_are_said(self, options, message):
    check = self.assertLogs if message else self.assertNoLogs
    with check("moh_jax", "WARNING") as logs:
      self._load(**options)
    if message:
      self.assertIn(message, logs.output[0])
    with self.assertRaisesRegex(ValueError, "2 latent channels must be"):
      self._load(channels=3)
