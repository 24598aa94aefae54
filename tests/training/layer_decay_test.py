"""Learning rates that fall from the output to the input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from flax.traverse_util import flatten_dict

from moh_jax.models.registry import make_model
from moh_jax.runtime.sharding import abstract_params, unbox
from moh_jax.training import optim
from tests.models import small_vit
from tests.training import tiny


def _shapes(config):
  return unbox(abstract_params(*make_model(config)))


class FactorsTest(parameterized.TestCase):
  def test_of_a_vit(self):
    config = tiny.config()
    model = dataclasses.replace(small_vit.TWO_STAGES, num_classes=10)
    config = dataclasses.replace(
      config, model=dataclasses.replace(model, channels=1)
    )
    factors = optim.layer_factors(_shapes(config), 0.5, config.model)
    found = {
      "/".join(path): np.ravel(leaf).tolist()
      for path, leaf in flatten_dict(factors).items()
    }
    expected = {  # two blocks, then one; the output has 1
      "stage1/patch_embed/proj/kernel": [1 / 16],
      "stage1/blocks/norm1/scale": [1 / 8, 1 / 4],
      "stage1/norm/scale": [1 / 4],
      "stage2/patch_embed/proj/kernel": [1 / 4],
      "stage2/blocks/norm1/scale": [1 / 2],
      "stage2/norm/scale": [1 / 2],
      "head/kernel": [1],
    }
    self.assertEqual({name: found[name] for name in expected}, expected)

  def test_of_a_dit(self):
    config = tiny.dit_config()
    factors = optim.layer_factors(_shapes(config), 0.5, config.model)
    depth = config.model.depth
    self.assertAlmostEqual(factors["patch"]["kernel"], 0.5 ** (depth + 1))
    self.assertAlmostEqual(
      factors["embed"]["label"]["embedding"], 0.5 ** (depth + 1)
    )
    self.assertEqual(factors["final"]["kernel"], 1)
    stacks = [factors[name]["mlp"]["up"] for name in config.model.stack_names()]
    rates = np.concatenate([np.ravel(stack["kernel"]) for stack in stacks])
    np.testing.assert_allclose(rates, 0.5 ** np.arange(depth, 0, -1))

  @parameterized.parameters("config", "dit_config", "llm_config")
  def test_broadcast_to_the_parameters(self, name):
    config = getattr(tiny, name)()
    if name == "config":
      model = dataclasses.replace(config.model, channels=1, num_classes=10)
      config = dataclasses.replace(config, model=model)
    shapes = _shapes(config)
    factors = optim.layer_factors(shapes, 0.8, config.model)
    jax.tree.map(lambda x, f: np.broadcast_to(f, x.shape), shapes, factors)
    top = [leaf for leaf in jax.tree.leaves(factors) if (leaf == 1).all()]
    self.assertNotEmpty(top)


class ScaleTest(absltest.TestCase):
  def test_multiplies_the_updates_and_keeps_the_state(self):
    config = tiny.dit_config()
    params = tiny.random_params(config)
    plain = optax.sgd(0.1)
    scaled = optim.decay_by_layer(plain, 0.5, config.model)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = scaled.update(grads, scaled.init(params), params)
    factors = optim.layer_factors(params, 0.5, config.model)
    jax.tree.map(
      lambda u, f: np.testing.assert_allclose(
        u, np.broadcast_to(-0.1 * f, u.shape), rtol=1e-6
      ),
      updates,
      factors,
    )
    self.assertEqual(
      jax.tree.structure(state), jax.tree.structure(plain.init(params))
    )

  def test_one_changes_nothing(self):
    plain = optax.sgd(0.1)
    self.assertIs(optim.decay_by_layer(plain, 1.0, tiny.DIT), plain)


if __name__ == "__main__":
  absltest.main()
