"""A sampler of a small diffusion model with random weights."""

import functools

import jax

from moh_jax.inference.restore import Restored
from moh_jax.inference.sample import Sampler
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from tests.training import tiny


@functools.cache
def mesh(devices=1):
  config = tiny.dit_config(mesh={"data": devices})
  return sharding.make_mesh(config.mesh, jax.devices()[:devices])


@functools.cache
def restored(devices=1, **sample):
  config = tiny.dit_config(sample=sample)
  model, _ = make_model(config)
  whole = sharding.replicated(mesh(devices))
  params = jax.device_put(tiny.random_params(config), whole)
  return Restored(config, model, params, 0, ())


@functools.cache
def sampler(devices=1, labels=(), seed=0):
  return Sampler(
    restored(devices), labels=labels, seed=seed, mesh=mesh(devices)
  )
