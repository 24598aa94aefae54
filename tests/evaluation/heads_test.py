"""Heads: statistics of routing, how alike they are, and what they are worth."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from flax import traverse_util

from moh_jax import config as config_lib
from moh_jax.config import HeadBudget, MeshConfig, RouterConfig
from moh_jax.config.heads import Units
from moh_jax.evaluation import similarity
from moh_jax.evaluation.head_stats import head_stats
from moh_jax.evaluation.probe import (
  head_importance,
  make_probe,
  order_by_importance,
  recorded_layers,
)
from moh_jax.layers.vocabulary import summed_nats
from moh_jax.models.llm import apply_packed, output_kernel
from moh_jax.models.registry import make_model
from moh_jax.ops.call import Visible
from moh_jax.ops.routing import load_entropy
from moh_jax.runtime.batches import shard_batch
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.runtime.parameters import abstract_params
from tests.training import tiny

_BATCH = 8


@functools.cache
def _labelled(family, count=2, padded=3):
  """Batches on the host for tiny models; the last examples are padding."""
  rng = np.random.default_rng(0)
  total = _BATCH * count
  batch = {
    "label": rng.integers(0, 3, total).astype(np.int32),
    "index": np.arange(total, dtype=np.int32),
    "mask": np.float32(np.arange(total) < total - padded),
  }
  if family == "llm":
    segments = np.ones((total, 16), np.int32)
    segments[::2, 11:] = 0
    batch |= {
      "inputs": rng.integers(0, 60, (total, 16)).astype(np.int32),
      "segments": segments,
      "positions": np.tile(np.arange(16, dtype=np.int32), (total, 1)),
      "targets": rng.integers(0, 60, (total, 16)).astype(np.int32),
      "weights": np.float32(segments),
    }
  else:
    batch["image"] = rng.normal(size=(total, 8, 8, 1)).astype(np.float32)
  return [
    {name: x[start : start + _BATCH] for name, x in batch.items()}
    for start in range(0, total, _BATCH)
  ]


def _measure(function, config, params, parts, *names, **options):
  """What `function` finds on batches; `options` may say `data` and `tensor`."""
  axes = {axis: options.pop(axis, 1) for axis in ("data", "tensor")}
  devices = jax.devices()[: axes["data"] * axes["tensor"]]
  mesh = make_mesh(MeshConfig(**axes), devices)
  probe = make_probe(make_model(config)[0], config)
  with use_mesh(mesh):
    on_mesh = [shard_batch(part, mesh) for part in parts]
    return function(probe, config, params, on_mesh, *names, mesh, **options)


_NAMES = ("ant", "bee", "cat", "dog")  # no example is a dog


def _config(family):
  if family == "llm":
    order = ((2, 0, 1, 3), (0, 1, 2, 3))
    router = RouterConfig("query_norm")
    return tiny.llm_config(model={"router": router, "head_order": order})
  if family == "mha":
    return tiny.deterministic_config(model={"router": RouterConfig("none")})
  return {"vit": tiny.deterministic_config, "dit": tiny.dit_config}[family]()


@functools.cache
def _measured(family, devices=1, names=_NAMES):
  config = _config(family)
  return _measure(
    *(head_stats, config, tiny.random_params(config)),
    *(_labelled(family), names),
    data=devices,
  )


@functools.cache
def _recorded(family):
  """All examples, which tokens count [B, N], and every layer's routing."""
  parts = _labelled(family)
  batch = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  config = _config(family)
  probe = make_probe(make_model(config)[0], config)
  apply = jax.jit(functools.partial(probe.apply, mutable=["intermediates"]))
  _, found = apply(tiny.random_params(config), batch)
  counted = batch["mask"][:, None] * (batch.get("segments", np.ones(1)) > 0)
  layers = recorded_layers(found["intermediates"], "routing", 3)
  return batch, counted > 0, jax.tree.map(np.asarray, layers)


class HeadStatsTest(parameterized.TestCase):
  @parameterized.parameters(("vit", 8), ("dit", 1), ("llm", 1), ("llm", 8))
  @pytest.mark.integration
  def test_equals_a_count_of_tokens(self, family, devices):
    stats = _measured(family, devices)
    batch, counted, layers = _recorded(family)
    label, members = "text" if family == "llm" else "class", batch["label"]
    groups = {(label, i): members == i for i in range(3)}
    groups["all", 0] = members >= 0
    for layer, routing in enumerate(layers):
      for (kind, group), members in groups.items():
        tokens = counted & members[:, None]
        tokens = np.broadcast_to(tokens, routing.gates.shape[:2])
        own = jax.tree.map(lambda x: np.float64(x[tokens]), routing)  # noqa: B023
        load = np.hstack([np.ones_like(own.shared_scores), own.selected])
        found = stats.groups[kind]
        for ours, theirs in (
          (found.load[layer][group], load),
          (found.weights[layer, group], own.groups),
        ):
          np.testing.assert_allclose(ours, theirs.mean(0), atol=1e-6)

  @pytest.mark.integration
  def test_groups_are_those_of_the_labels(self):
    found = _measured("vit").groups["class"]  # one without examples
    self.assertTrue(np.isnan(found.load[0][3]).all())
    times = _measured("dit").groups["timestep"].names
    self.assertEqual((len(times), times[-1]), (10, "45-49"))
    stats = _measured("llm", names=_NAMES[:2])  # others are in no group
    self.assertCountEqual(np.unique(stats.maps.label), [0, 1])
    with self.assertRaisesRegex(ValueError, "no example"):
      _measure(head_stats, _config("llm"), {}, [], _NAMES)
    stats = _measured("mha")  # no layer has a router
    self.assertEqual(stats.layers, ())
    self.assertEqual(stats.entropy().shape, (0,))
    self.assertLen(stats.maps.inputs, 6)  # two of each of three labels

  def test_maps_hold_the_choice_of_each_token(self):
    stats = _measured("llm")
    maps, orders = stats.maps, [layer.order for layer in stats.layers]
    self.assertEqual(orders, [(2, 0, 1, 3), (0, 1, 2, 3)])
    # Eight examples of four labels: two of each at most, one label has none.
    np.testing.assert_array_equal(np.bincount(maps.label), [2, 2, 2])
    batch, counted, layers = _recorded("llm")
    for place, shown in enumerate(maps.inputs):
      (row,) = np.flatnonzero((batch["inputs"] == shown).all(-1))
      real = counted[row]
      for layer, routing in enumerate(layers):
        best = maps.best[layer][place]
        self.assertTrue((best[~real] == -1).all())
        np.testing.assert_array_equal(maps.counted[place], real)
        # By their own numbers: the first listed head is shared.
        places = routing.probs[row].argmax(-1)[real] + 1
        np.testing.assert_array_equal(
          best[real], np.array(orders[layer])[places]
        )

  def test_entropy_is_between_one_choice_and_all(self):
    loads = [[1, 1, 0, 0], [0.5, 0.5, 0.5, 0.5], [1, 0.5, 0.5, 0], [0.0] * 4]
    found = load_entropy(loads)
    np.testing.assert_allclose(found, [0, 1, 0.5, np.nan], atol=1e-12)
    self.assertEqual(load_entropy([1.0, 1.0]), 1.0)  # nothing to choose


def _twins(config):
  """Parameters in which the first two heads of each layer are the same."""
  flat = traverse_util.flatten_dict(tiny.random_params(config))
  boxed = traverse_util.flatten_dict(abstract_params(*make_model(config)))
  for path, x in flat.items():
    axes = [*getattr(boxed[path], "names", ())]
    if "cpb" in path and "fc2" in path:  # the position bias of each head
      axes = [None] * (x.ndim - 1) + ["heads"]
    if "heads" in axes:
      flat[path] = x = np.array(x)
      heads = np.moveaxis(x, axes.index("heads"), 0)
      heads[1] = heads[0]
  return traverse_util.unflatten_dict(flat)


@functools.cache
def _similar(family="dit", router=True, data=1, tensor=1):
  config = _config(family)
  params = _twins(config)
  if not router:
    model = config_lib.without_router(config.model)
    config = dataclasses.replace(config, model=model)
  parts = _labelled(family, count=1, padded=2)
  axes = {"data": data, "tensor": tensor}
  return _measure(similarity.head_similarity, config, params, parts, **axes)


class SimilarityTest(parameterized.TestCase):
  @parameterized.parameters(("dit", 2), ("llm", 2), ("vit", 3))
  @pytest.mark.integration
  def test_identical_heads_give_1_and_others_less(self, family, layers):
    found = _similar(family)
    for cosines in (found.patterns, found.features):
      self.assertLen(cosines, layers)
      for values in cosines.values():
        np.testing.assert_allclose(np.diag(values), 1, atol=1e-5)
        np.testing.assert_allclose(values[0, 1], 1, atol=1e-5)
        np.testing.assert_allclose(values, values.T, atol=1e-5)
        if len(values) > 2:  # heads 2 and 3 of the LLM read other keys
          self.assertLess(values[0, 2], 1 - 1e-4)

  @parameterized.parameters(
    # Heads that no token selects are compared too: in the first layer all are
    # as without a router.
    ({"router": False}, ["blocks0.0"]),
    # Devices that share heads compute them in another order.
    ({"data": 4, "tensor": 2}, ["blocks0.0", "blocks1.0"]),
  )
  @pytest.mark.integration
  def test_routers_and_devices_change_nothing(self, how, layers):
    for ours, theirs in zip(_similar(), _similar(**how)):
      for layer in layers:
        np.testing.assert_allclose(ours[layer], theirs[layer], atol=1e-5)

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


class ImportanceTest(parameterized.TestCase):
  @parameterized.parameters("two_stage", "none")
  @pytest.mark.integration
  def test_is_the_slope_of_the_loss(self, router):
    # With the router "none" all heads count, whatever the budget says.
    run = tiny.llm_config(model={"router": RouterConfig(router)})
    (model, _), config = make_model(run), run.model
    batch = {name: x[:2] for name, x in _labelled("llm")[0].items()}
    params = jax.tree.map(lambda x: 2 * x, tiny.random_params(run))
    found = head_importance(model, config, params, [batch])

    @jax.jit
    def loss(scale, row):  # mean of a sequence whose heads are scaled
      one = jax.tree.map(lambda x: jnp.asarray(x)[row][None], batch)
      x, _ = apply_packed(model, params, one, head_scale=scale)
      weights = one["weights"] / one["weights"].sum()
      kernel, chunk = output_kernel(params, config), config.loss_chunk
      return summed_nats(x, kernel, one["targets"], weights, chunk)

    ones = np.ones((config.depth, config.num_heads[0]), np.float32)
    slopes = np.zeros_like(ones)
    for place in np.ndindex(ones.shape):
      step = np.zeros_like(ones)
      step[place] = 0.002
      for row in range(2):
        slopes[place] += abs(loss(ones + step, row) - loss(ones - step, row))
    slopes /= np.linalg.norm(slopes, axis=-1, keepdims=True)
    np.testing.assert_allclose(found, slopes, atol=0.01)
    np.testing.assert_allclose(np.square(found).sum(-1), 1.0, rtol=1e-6)

  def test_order_is_that_of_the_values(self):
    values = np.array([[0.1, 0.7, 0.2], [0.5, 0.5, 0.6]])
    order = order_by_importance(values, [])  # without a router
    self.assertEqual(order, ((1, 2, 0), (2, 0, 1)))  # equal ones keep theirs

  def test_heads_that_are_chosen_together_count_together(self):
    groups, values = Units(HeadBudget(3, 1, 1, 8), size=2), np.zeros((1, 6))
    values[0] = 0.9, 0.1, 0.3, 0.4, 0.8, 0.7
    order = order_by_importance(values, [groups])
    self.assertEqual(order, ((4, 5, 0, 1, 3, 2),))
    self.assertEqual(groups.order(*order), (4, 5, 0, 1, 2, 3))

  def test_layers_of_different_numbers_of_heads(self):
    run = tiny.llm_config(model={"num_heads": (4, 2), "top_k": (2, 1)})
    probe = make_probe(make_model(run)[0], run)
    self.assertIsNone(probe.importance)  # `heads` goes on without it
