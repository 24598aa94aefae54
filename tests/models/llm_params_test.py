"""Layouts of a language model's parameters, and new tokens."""

import dataclasses

import chex
import jax
import numpy as np
from absl.testing import parameterized

from moh_jax.models.llm import LLM, output_kernel, unroll
from moh_jax.models.registry import fit_params, grow_vocabulary, restack
from tests.models import small
from tests.training import tiny


def _rounded_elsewhere(variables, seed):
  """Every parameter moved to the next float32 above or below it."""
  rng = np.random.default_rng(seed)
  ends = np.array([-np.inf, np.inf], np.float32)
  return jax.tree.map(
    lambda x: np.nextafter(x, rng.choice(ends, x.shape)),
    jax.device_get(variables),
  )


class LayoutTest(parameterized.TestCase):
  def test_unrolled_layers_give_equal_logits(self):
    whole = small.random_variables(small.BIASED)
    params = unroll(whole["params"], small.BIASED)
    names = ["blocks0_0", "blocks0_1"]
    self.assertCountEqual(params, ["embed", "head", "norm", *names])
    apply = jax.jit(LLM(small.BIASED, unrolled=True).apply)
    logits, aux = apply({"params": params}, small.random_tokens())
    expected, expected_aux = small.forward(small.BIASED)
    # Sums in another order may change the logits about as much as it does to
    # round the parameters in another way.
    rounding = 0.0
    for seed in range(4):
      moved = _rounded_elsewhere(whole, seed)
      other, _ = small.forward(small.BIASED, variables=moved)
      rounding = max(rounding, float(np.abs(other - expected).max()))
    self.assertLess(rounding, 1e-4)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2 * rounding)
    chex.assert_trees_all_close(aux, expected_aux, rtol=1e-5)

  def test_unrolled_layers_of_several_runs_are_counted_in_each(self):
    config = small.changed(
      num_heads=(4,) * 3, shared_heads=(1, 1, 2), top_k=(2, 2, 1)
    )
    variables = small.random_variables(config)["params"]
    params = unroll(variables, config)
    for run, layer in (("blocks0", 0), ("blocks0", 1), ("blocks1", 0)):
      block = params[f"{run}_{layer}"]
      ours = block["mlp_norm"], block["attn"]["router"]
      theirs = variables[run]["mlp_norm"], variables[run]["attn"]["router"]
      chex.assert_trees_all_equal(
        ours,
        jax.tree.map(lambda x: x[layer], theirs),  # noqa: B023
      )

  def test_unrolled_kernels_have_their_outputs_first(self):
    whole = small.random_variables(small.BIASED)["params"]
    params = unroll(whole, small.BIASED)
    ours, theirs = params["blocks0_1"], whole["blocks0"]
    for module, leaf, inputs in (
      ("attn", "q", 1),
      ("attn", "kv", 1),
      ("attn", "out", 2),
      ("mlp", "gate", 1),
      ("mlp", "up", 1),
      ("mlp", "down", 1),
    ):
      kernel = np.asarray(theirs[module][leaf]["kernel"][1])
      last = range(kernel.ndim - inputs, kernel.ndim)
      expected = np.moveaxis(kernel, range(inputs), last)
      np.testing.assert_array_equal(ours[module][leaf]["kernel"], expected)
      bias = theirs[module][leaf]["bias"][1]
      np.testing.assert_array_equal(ours[module][leaf]["bias"], bias)
    np.testing.assert_array_equal(
      params["head"]["kernel"].T, output_kernel(whole, small.BIASED)
    )

  def test_restack_groups_the_same_layers_in_other_runs(self):
    params = small.random_variables(small.CONFIG)["params"]
    split = restack(params, small.CONFIG, small.UNEQUAL)
    chex.assert_trees_all_equal_shapes(
      split, small.random_variables(small.UNEQUAL)["params"]
    )
    for layer in range(2):
      chex.assert_trees_all_equal(
        jax.tree.map(lambda x: x[0], split[f"blocks{layer}"]),
        jax.tree.map(lambda x: x[layer], params["blocks0"]),  # noqa: B023
      )
    chex.assert_trees_all_equal(
      restack(split, small.UNEQUAL, small.CONFIG), params
    )

  @parameterized.parameters(small.CONFIG, small.TIED)
  def test_new_tokens_are_the_mean_of_the_old(self, config):
    params = small.random_variables(config)["params"]
    grown = grow_vocabulary(params, 70)
    wanted = dataclasses.replace(config, vocab_size=70)
    chex.assert_trees_all_equal_shapes(
      grown, small.random_variables(wanted)["params"]
    )
    table = grown["embed"]["embedding"]
    np.testing.assert_array_equal(table[:60], params["embed"]["embedding"])
    mean = np.asarray(params["embed"]["embedding"], np.float64).mean(0)
    np.testing.assert_allclose(table[60:], np.stack([mean] * 10), atol=1e-6)
    if not config.tie_embeddings:
      kernel, old = (p["head"]["kernel"] for p in (grown, params))
      np.testing.assert_array_equal(kernel[:, :60], old)
      mean = np.asarray(old, np.float64).mean(1, keepdims=True)
      np.testing.assert_allclose(kernel[:, 60:], mean.repeat(10, 1), atol=1e-6)

  def test_fit_params_grows_the_vocabulary_and_regroups(self):
    trained = tiny.llm_config()
    wanted = tiny.llm_config(model={"vocab_size": 64, "top_k": (1, 3)})
    params = small.random_variables(small.CONFIG)["params"]
    fitted = fit_params(params, trained.model, wanted.model)
    chex.assert_trees_all_equal_shapes(
      fitted, small.random_variables(wanted.model)["params"]
    )
    grown = grow_vocabulary(params, 64)
    chex.assert_trees_all_equal(
      fitted, restack(grown, trained.model, wanted.model)
    )
    self.assertIs(fit_params(params, trained.model, trained.model), params)
