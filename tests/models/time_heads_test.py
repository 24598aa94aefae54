"""Routers that read the diffusion step; sampling with their heads alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax.traverse_util import flatten_dict, unflatten_dict

from moh_jax.config import LLMConfig, RouterConfig, ViTConfig
from moh_jax.config.registry import register_router
from moh_jax.layers.router import TwoStageRouter
from moh_jax.models import time_heads
from tests.models import small

# The paper's gates, of any value, where those of "timestep" are 0 or 1.
register_router("soft_timestep", TwoStageRouter, reads_time=True)
_TIMES = (0, 37, 500, 999)
_KINDS = ("timestep", "soft_timestep")


def _model(kind="timestep"):
  """Stacks of two, one, and one layer with all heads.

  The first two differ, but have as many active heads.
  """
  return dataclasses.replace(
    small.DIT,
    num_heads=(4,) * 4,
    shared_heads=(1, 1, 0, 4),
    top_k=(1, 1, 2, 0),
    router=RouterConfig(kind),
  )


def _inputs(model, time):
  x, _, labels = small.inputs(model)
  return x, jnp.full(len(x), time), labels


def _recorded(model, time):
  """Gates [L, B, N, H] at one step, by stack."""
  _, found = small.record(model, *_inputs(model, time))
  stacks = {name: found[name]["attn"]["router"] for name in model.stack_names()}
  return {name: router["routing"][0].gates for name, router in stacks.items()}


class TimeHeadsTest(parameterized.TestCase):
  @parameterized.product(kind=_KINDS, time=_TIMES)
  def test_active_heads_alone_give_the_output_of_the_network(self, kind, time):
    model = _model(kind)
    network, variables = small.network(model), small.random_variables(model)
    inputs = _inputs(model, time)

    def both(params):
      few = time_heads.with_active_heads(network, params, _TIMES)
      return few(*inputs), network.apply({"params": params}, *inputs)[0]

    got, expected = jax.jit(both)(variables["params"])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)

  @parameterized.parameters(*_KINDS)
  def test_adapters_and_kernels_in_int8_are_taken_too(self, kind):
    model, rng = _model(kind), np.random.default_rng(0)
    network, inputs = small.network(model), _inputs(model, 500)
    params = flatten_dict(small.random_variables(model)["params"])

    def add(layer, a, b, outputs):
      depth = len(kernel := params[(*layer, "kernel")])
      scale = jnp.abs(kernel).max(outputs, keepdims=True) / 127
      params[(*layer, "kernel")] = jnp.round(kernel / scale).astype(jnp.int8)
      params[(*layer, "kernel_scale")] = scale
      for name, shape in (("lora_a", a), ("lora_b", b), ("lora_scale", ())):
        values = rng.normal(size=(depth, *shape)) / 4
        params[(*layer, name)] = jnp.asarray(values, jnp.float32)

    width, heads, dim = model.width, 4, model.head_dim
    for name in model.stack_names():
      add((name, "attn", "qkv"), (width, 3, 2), (3, 2, heads, dim), 1)
      add((name, "attn", "out"), (heads, dim, 2), (2, width), (1, 2))

    def both(params):
      few = time_heads.with_active_heads(network, params, _TIMES)
      return few(*inputs), network.apply({"params": params}, *inputs)[0]

    got, expected = jax.jit(both)(unflatten_dict(params))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)

  def test_choice_follows_the_step_and_is_that_of_all_tokens(self):
    model = _model()
    params = small.random_variables(model)["params"]
    times = jnp.array(_TIMES)
    plan = jax.jit(lambda p: time_heads.plan_heads(model, p, times))(params)
    seen = set()
    for step, time in enumerate(_TIMES):
      for name, gates in _recorded(model, time).items():
        heads, weights = (np.asarray(part[step]) for part in plan[name])
        self.assertEqual(gates.shape[1:3], (small.B, model.num_tokens))
        np.testing.assert_array_equal(gates, gates[:, :1, :1] + 0 * gates)
        for layer, kept in enumerate(heads):
          marked = np.flatnonzero(gates[layer, 0, 0])
          np.testing.assert_array_equal(kept, marked)
          seen.add((name, layer, tuple(kept)))
        np.testing.assert_array_equal(weights, 1.0)
    self.assertGreater(len(seen), model.depth)  # some layer changes its heads

  def test_smaller_network_has_the_active_heads_and_no_router(self):
    smaller = time_heads.active_model(_model())
    self.assertEqual([b.num_heads for b in smaller.budgets()], [2, 2, 2, 4])
    self.assertFalse(smaller.router.selects)

  @parameterized.parameters(*_KINDS)
  def test_router_learns_from_examples_and_balances_them(self, kind):
    model = _model(kind)
    (_, aux), grads = small.gradient(model)
    self.assertEqual(float(aux.layers["blocks0"].tokens[0]), small.B)
    routers = grads["params"]["blocks0"]["attn"]["router"]
    for leaf in jax.tree.leaves(routers):
      self.assertGreater(float(jnp.abs(leaf).max()), 0.0)

  @parameterized.parameters(LLMConfig, ViTConfig)
  def test_families_without_steps_refuse_it(self, section):
    with self.assertRaisesRegex(ValueError, "'timestep' must not read diffus"):
      section(router=RouterConfig("timestep"))


if __name__ == "__main__":
  absltest.main()
