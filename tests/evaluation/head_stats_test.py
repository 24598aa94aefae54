"""Statistics of heads against counting tokens one by one."""

import functools

import jax
import numpy as np
from absl.testing import parameterized

from moh_jax import config as config_lib
from moh_jax.evaluation.head_stats import head_stats
from moh_jax.evaluation.probe import make_probe, recorded_layers
from moh_jax.models.registry import make_model
from moh_jax.ops.routing import load_entropy
from tests.evaluation import labelled
from tests.training import tiny

_NAMES = ("ant", "bee", "cat", "dog")  # no example is a dog


def _config(family):
  if family == "llm":
    router = config_lib.RouterConfig(kind="query_norm")
    order = ((2, 0, 1, 3), (0, 1, 2, 3))
    return tiny.llm_config(model={"router": router, "head_order": order})
  if family == "mha":
    return tiny.deterministic_config(
      model={"router": config_lib.RouterConfig("none")}
    )
  return {"vit": tiny.deterministic_config, "dit": tiny.dit_config}[family]()


@functools.cache
def _measured(family, devices=1, names=_NAMES):
  config = _config(family)
  return labelled.measure(
    *(head_stats, config, tiny.random_params(config)),
    *(labelled.batches(family), names),
    data=devices,
    maps=10,
  )


@functools.cache
def _recorded(family):
  """All examples, which tokens count [B, N], and every layer's routing."""
  parts = labelled.batches(family)
  batch = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  config = _config(family)
  probe = make_probe(make_model(config)[0], config)
  apply = jax.jit(functools.partial(probe.apply, mutable=["intermediates"]))
  _, found = apply(tiny.random_params(config), batch)
  counted = batch["mask"][:, None] * (batch.get("segments", np.ones(1)) > 0)
  layers = recorded_layers(found["intermediates"], "routing", 3)
  return batch, counted > 0, jax.tree.map(np.asarray, layers)


class HeadStatsTest(parameterized.TestCase):
  @parameterized.product(family=("vit", "dit", "llm"), devices=(1, 8))
  def test_equals_a_count_of_tokens(self, family, devices):
    stats = _measured(family, devices)
    found = stats.groups["task" if family == "llm" else "class"]
    batch, counted, layers = _recorded(family)
    for layer, routing in enumerate(layers):
      for group in range(3):
        tokens = counted & (batch["label"] == group)[:, None]
        tokens = np.broadcast_to(tokens, routing.gates.shape[:2])
        own = jax.tree.map(lambda x: np.float64(x[tokens]), routing)  # noqa: B023
        expected = {
          "load": [np.ones_like(own.shared_scores), own.selected],
          "score": [own.shared_scores, own.probs],
          "gate": [own.gates],
        }
        self.assertEqual(found.tokens[layer, group], tokens.sum())
        for name, values in expected.items():
          ours, theirs = getattr(found, name)[layer], np.hstack(values).mean(0)
          np.testing.assert_allclose(ours[group], theirs, atol=1e-6)
        weights = own.groups.mean(0)
        np.testing.assert_allclose(
          found.weights[layer, group], weights, atol=1e-6
        )

  def test_loads_add_up_and_groups_are_those_of_the_labels(self):
    for family in ("vit", "dit", "llm"):
      stats = _measured(family)
      for layer, load in zip(stats.layers, stats.groups["all"].load):
        shared = layer.budget.shared
        np.testing.assert_array_equal(load[0, :shared], 1.0)
        np.testing.assert_allclose(load[0, shared:].sum(), layer.budget.top_k)
    found = _measured("vit").groups["class"]  # one without examples
    np.testing.assert_array_equal(found.tokens[:, 3], 0)
    self.assertTrue(np.isnan(found.load[0][3]).all())
    groups = _measured("dit").groups
    self.assertLen(groups["timestep"].names, 10)
    self.assertEqual(groups["timestep"].names[-1], "45-49")
    np.testing.assert_array_equal(
      groups["timestep"].tokens.sum(1), groups["all"].tokens.sum(1)
    )
    stats = _measured("llm", names=_NAMES[:2])  # others are in no group
    self.assertCountEqual(np.unique(stats.maps.label), [0, 1])
    counts = [stats.groups[kind].tokens.sum(1) for kind in ("task", "all")]
    self.assertTrue((counts[0] < counts[1]).all())
    with self.assertRaisesRegex(ValueError, "no example"):
      labelled.measure(head_stats, _config("llm"), {}, [], _NAMES)
    stats = _measured("mha")  # no layer has a router
    self.assertEqual(stats.layers, ())
    self.assertEqual(stats.entropy("class").shape, (0, 4))
    self.assertLen(stats.maps.inputs, 9)  # three of each of three labels

  def test_maps_hold_the_choice_of_each_token(self):
    stats = _measured("llm")
    maps, orders = stats.maps, [layer.order for layer in stats.layers]
    self.assertEqual(orders, [(2, 0, 1, 3), (0, 1, 2, 3)])
    # Ten examples of four labels: three of each at most, one label has none.
    np.testing.assert_array_equal(np.bincount(maps.label), [3, 3, 3])
    batch, counted, layers = _recorded("llm")
    for place, row in enumerate(maps.index.tolist()):
      real = counted[row]
      np.testing.assert_array_equal(maps.inputs[place], batch["inputs"][row])
      for layer, routing in enumerate(layers):
        best = maps.best[layer][place]
        self.assertTrue((best[~real] == -1).all())
        np.testing.assert_array_equal(maps.counted[place], real)
        np.testing.assert_array_equal(
          maps.selected[layer][place][real], routing.selected[row][real]
        )
        # By their own numbers: the first listed head is shared.
        places = routing.probs[row].argmax(-1)[real] + 1
        np.testing.assert_array_equal(
          best[real], np.array(orders[layer])[places]
        )

  def test_entropy_is_between_one_choice_and_all(self):
    loads = [[1, 1, 0, 0], [0.5, 0.5, 0.5, 0.5], [1, 0.5, 0.5, 0], [0.0] * 4]
    found = load_entropy(loads)
    np.testing.assert_allclose(found[:2], [0, 1], atol=1e-12)
    self.assertBetween(found[2], 0.1, 0.9)
    self.assertTrue(np.isnan(found[3]))
    self.assertEqual(load_entropy([1.0, 1.0]), 1.0)  # nothing to choose
