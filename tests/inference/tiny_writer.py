"""Language models for tests of generation: a random one and one by heart."""

import dataclasses
import functools

import jax
import numpy as np

from moh_jax.config import RouterConfig
from moh_jax.data.tokenizers import BytesTokenizer, write_tokenizer_files
from moh_jax.inference.generate import Generator
from moh_jax.inference.restore import Restored
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint
from moh_jax.runtime.mesh import make_mesh
from moh_jax.runtime.parameters import abstract_on
from tests.data import tiny_words
from tests.training import tiny

WORDS = tiny_words.tokenizer()
BYTES = BytesTokenizer()
# Routed heads, some of equal keys and values.
RANDOM = tiny.llm_config(model={"max_length": 64})
ALPHABET = tiny.llm_config(model={"width": 64, "router": RouterConfig("none")})


def restored(config, params, mesh=None):
  """A model as `restore` returns it, split over a mesh."""
  model, inputs = make_model(config)
  if mesh is not None:
    wanted = abstract_on(model, inputs, mesh)
    params = jax.tree.map(
      lambda x, a: jax.device_put(x, a.sharding), params, wanted
    )
  return Restored(config, model, params, 0, ())


@functools.cache
def random_params(config=RANDOM):
  """Parameters that make the best token a clear one."""
  return jax.tree.map(lambda x: 3 * x, tiny.random_params(config))


@functools.cache
def generator(config=RANDOM, on_mesh=False, size=4):
  """A generator of random parameters; on a mesh of eight devices, or of one."""
  mesh = None
  if on_mesh:
    mesh = make_mesh(tiny.llm_config(mesh=tiny.MESH).mesh)
  return Generator(
    restored(config, random_params(config), mesh),
    WORDS,
    mesh=mesh,
    batch_size=size,
  )


def alphabet_params():
  """After "aA" comes "bB", and so on; after "zZ" the end.

  Layers add nothing, a token's vector is one-hot, and the output layer's
  logits are 8 for the next token and 0 for others.
  """
  params = jax.tree.map(np.zeros_like, tiny.random_params(ALPHABET))
  params["embed"]["embedding"] = np.eye(60, 64, dtype=np.float32)
  params["norm"]["scale"] = np.ones(64, np.float32)
  following = {i: i + 1 for i in range(1, 26)} | {27: 1, 26: WORDS.eos_id}
  for token, after in following.items():
    params["head"]["kernel"][token, after] = 1
  return params


def save_alphabet(directory, **metadata):
  """Writes the alphabet's model as a checkpoint with its tokenizer."""
  metadata = {"tokenizer_sha256": WORDS.sha256} | metadata
  stored = dataclasses.replace(checkpoint.Metadata(ALPHABET), **metadata)
  checkpoint.save_params(directory, alphabet_params(), stored)
  write_tokenizer_files(directory, {WORDS.file_name: WORDS.content})
