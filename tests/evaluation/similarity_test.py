"""Similarity between heads, where it is known."""

import dataclasses
import functools

import chex
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import traverse_util

from moh_jax import config as config_lib
from moh_jax.evaluation import similarity
from moh_jax.ops.attention_forms import Visible
from tests.evaluation import labelled
from tests.training import tiny

_HEADS = {  # axis of the heads, by a parameter's last names
  **{f"{name}/kernel": -2 for name in ("qkv", "q", "kv")},
  **{f"{name}/bias": -2 for name in ("qkv", "q", "kv")},
  "out/kernel": 1,
  **{"query_scale/temperature": -1, "query_scale/query_embedding": -2},
  **{"fc2/kernel": -1, "fc2/bias": -1},  # of the position bias
  **{"attn/relative_pos_bias_local": -2, "attn/learnable_bias": -2},
  "attn/learnable_tokens": -3,
}


def _twins(config):
  """Parameters in which the first two heads of each layer are the same."""

  def alike(path, x):
    name = "/".join(path[-2:])
    if name not in _HEADS or "mlp" in path:
      return x
    x = np.moveaxis(np.array(x), _HEADS[name], 0)
    x[1] = x[0]
    return np.moveaxis(x, 0, _HEADS[name])

  flat = traverse_util.flatten_dict(tiny.random_params(config))
  return traverse_util.unflatten_dict({p: alike(p, x) for p, x in flat.items()})


@functools.cache
def _measured(family="dit", router=True, data=1, tensor=1):
  makers = {"dit": tiny.dit_config, "llm": tiny.llm_config}
  config = makers.get(family, tiny.config)()
  params = _twins(config)
  if not router:
    model = config_lib.without_router(config.model)
    config = dataclasses.replace(config, model=model)
  parts = labelled.batches(family, count=1, padded=2)
  axes = {"data": data, "tensor": tensor}
  return labelled.measure(
    similarity.head_similarity, config, params, parts, **axes
  )


class SimilarityTest(parameterized.TestCase):
  @parameterized.parameters(("dit", 2), ("llm", 2), ("vit", 3))
  def test_identical_heads_give_1_and_others_less(self, family, layers):
    found = _measured(family)
    for cosines in (found.patterns, found.features):
      self.assertLen(cosines, layers)
      for values in cosines.values():
        np.testing.assert_allclose(np.diag(values), 1, atol=1e-5)
        np.testing.assert_allclose(values[0, 1], 1, atol=1e-5)
        np.testing.assert_allclose(values, values.T, atol=1e-5)
        if len(values) > 2:  # heads 2 and 3 of the LLM read other keys
          self.assertLess(values[0, 2], 1 - 1e-4)

  def test_a_router_changes_nothing_in_its_own_layer(self):
    # Heads that no token selects are compared too.
    moh, mha = _measured(), _measured(router=False)
    for name in ("patterns", "features"):
      ours, theirs = (getattr(x, name)["blocks0.0"] for x in (moh, mha))
      np.testing.assert_allclose(ours, theirs, atol=1e-5)

  def test_eight_devices_measure_the_same(self):
    # Devices that share heads compute them in another order.
    one, eight = _measured(), _measured(data=4, tensor=2)
    for name in ("patterns", "features"):
      ours, theirs = getattr(one, name), getattr(eight, name)
      chex.assert_trees_all_close(ours, theirs, atol=1e-5)

  def test_mean_is_over_pairs_of_different_heads(self):
    cosines = np.array([[1, 0.5, 0], [0.5, 1, 0.1], [0, 0.1, 1]])
    self.assertAlmostEqual(similarity.mean_similarity(cosines), 0.2)
    self.assertTrue(np.isnan(similarity.mean_similarity(np.ones((1, 1)))))


class CosinesTest(absltest.TestCase):
  def test_patterns_are_those_of_softmax(self):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 5, 2, 3))
    bias = rng.normal(size=(2, 5, 5))
    found = similarity.pattern_cosines(
      *map(jnp.asarray, (q, k)),
      visible=Visible(causal=True),
      scale=0.5,
      bias=jnp.asarray(bias),
    )
    logits = np.einsum("nhd,mhd->hnm", q[0], k[0]) * 0.5 + bias
    logits[:, ~np.tri(5, dtype=bool)] = -np.inf
    weights = np.exp(logits)
    weights /= np.linalg.norm(weights, axis=-1, keepdims=True)
    expected = np.einsum("hnm,inm->nhi", weights, weights)
    np.testing.assert_allclose(found[0], expected, atol=1e-5)

  def test_features_are_compared_behind_the_output_projection(self):
    heads = jnp.asarray([[[[1.0, 0.0], [1.0, 0.0]]]])
    kernel = jnp.asarray([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])
    np.testing.assert_allclose(
      similarity.feature_cosines(heads, kernel)[0, 0], np.eye(2), atol=1e-6
    )
