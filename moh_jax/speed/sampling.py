"""Benchmark of a diffusion model's sampler."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.config import Config, SampleConfig
from moh_jax.models.generation import make_sampler
from moh_jax.models.registry import make_model
from moh_jax.speed import timing
from moh_jax.speed.model_programs import random_params
from moh_jax.speed.programs import compile_program


def measure(options: Any, run: Config) -> dict[str, float]:
  """Times a guided sampler beside the network evaluations that it consists of.

  Args:
    options: `model.ModelOptions`, of which batch, sampler_steps and rounds
      count.
    run: run of a diffusion model.

  Returns:
    {"steps", "ms": of the sampler, "forward_ms": of one network evaluation,
    "ratio_to_forwards": sampler time / (steps * forward time), of one turn}.
  """
  steps = options.sampler_steps
  sample = SampleConfig(method="ddpm", steps=str(steps), cfg_scale=1.5)
  run = dataclasses.replace(run, sample=sample)
  network, _ = make_model(run)
  params = random_params(run)
  index = jnp.arange(options.batch, dtype=jnp.int32)
  twice = jnp.tile(index, 2)  # guidance evaluates every image twice
  x = jax.random.normal(jax.random.key(0), (len(twice), *run.model.input_shape))

  def forward(params: Any, *inputs: Any) -> jax.Array:
    return network.apply({"params": params}, *inputs)[0]

  programs = {
    "sampler": compile_program(
      make_sampler(network, run), params, 0, index, index
    ),
    "forward": compile_program(forward, params, x, twice, twice),
  }
  times = timing.interleaved(
    {name: program.run for name, program in programs.items()}, options.rounds
  )
  sampler, one = times["sampler"], times["forward"]
  return {
    "steps": steps,
    "ms": sampler.median * 1e3,
    "forward_ms": one.median * 1e3,
    "ratio_to_forwards": sampler.over(one).median / steps,
  }
