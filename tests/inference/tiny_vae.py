"""An autoencoder and a folder of images, both small and random."""

import itertools
import json

import jax
import numpy as np
from PIL import Image

from moh_jax.config.dit import VAEConfig
from moh_jax.convert import rules, vae
from tests.convert.stored import save_tensors

CONFIG = VAEConfig(
  block_out_channels=(4, 8),
  layers_per_block=1,
  latent_channels=2,
  norm_groups=2,
)
CLASSES = ("ant", "cat")


def params(seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: 0.3 * rng.standard_normal(x.shape, np.float32),
    vae.abstract_vae(CONFIG),
  )


def save(folder, seed=0):
  """Writes the autoencoder as diffusers does."""
  folder.mkdir(parents=True)
  entries = {
    "block_out_channels": CONFIG.block_out_channels,
    "layers_per_block": CONFIG.layers_per_block,
    "latent_channels": CONFIG.latent_channels,
    "norm_num_groups": CONFIG.norm_groups,
  }
  (folder / "config.json").write_text(json.dumps(entries))
  tensors = rules.dump_params(vae.vae_rules(CONFIG), params(seed))
  save_tensors(folder / vae.VAE_FILES[0], tensors)


def save_images(root, per_class=5, seed=0):
  """Writes root/CLASS/*.png, a little larger than 8 x 8 pixels."""
  rng = np.random.RandomState(seed)
  for name, i in itertools.product(CLASSES, range(per_class)):
    path = root / name / f"{i}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.randint(0, 256, (8 + i, 12 - i % 3, 3), np.uint8)
    Image.fromarray(pixels).save(path)
