"""Starting a run of other classes, or of another image size."""

import dataclasses
import pathlib
import tempfile

import jax
import numpy as np
from absl.testing import absltest, parameterized
from flax.traverse_util import flatten_dict

from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint, sharding
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.sharding import abstract_on
from moh_jax.training.warm_start import warm_start
from tests.training import tiny

_TEN = tuple("0123456789")
_HEADS = {
  "vit": (("head", "kernel"), 1),
  "dit": (("embed", "label", "embedding"), 0),
}


def _config(family, classes, **model):
  if family == "dit":
    return tiny.dit_config(model={"num_classes": classes, **model})
  return tiny.config(model={"num_classes": classes, "channels": 1, **model})


class NewClassesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.source = str(root / "source")

  def _start(self, config, names, stored_config, stored_names=_TEN):
    """Parameters that were stored, initial ones, and those of the start."""
    stored = tiny.random_params(stored_config)
    checkpoint.save_params(
      self.source, stored, Metadata(stored_config, stored_names)
    )
    train = dataclasses.replace(config.train, init_from=self.source)
    config = dataclasses.replace(config, train=train)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    abstract = abstract_on(*make_model(config), mesh)
    initial = tiny.random_params(config, seed=1)
    read = warm_start(Metadata(config, names), abstract, mesh)
    with self.assertLogs("moh_jax.training.warm_start", level="INFO") as logs:
      started = read(initial)
    self.said = logs.output[-1]
    return tuple(map(flatten_dict, (stored, initial, started)))

  @parameterized.parameters("vit", "dit")
  def test_head_is_new_and_all_else_is_loaded(self, family):
    head, axis = _HEADS[family]
    stored, initial, started = self._start(
      _config(family, 3), ("ant", "bee", "cat"), _config(family, 10)
    )
    for path, leaf in started.items():
      if "head" in path or "label" in path:
        continue
      np.testing.assert_array_equal(leaf, stored[path], path)
    ours, own = (np.moveaxis(t[head], axis, 0) for t in (started, initial))
    np.testing.assert_array_equal(ours[:3], own[:3])
    if family == "dit":  # the vector of "no label"
      np.testing.assert_array_equal(ours[3], stored[head][10])
    taken = (
      "took 1 rows, initialised 3"
      if family == "dit"
      else ("took 0 rows, initialised 3, left out 10")
    )
    self.assertIn(f"{'/'.join(head)}: {taken}", self.said)

  @parameterized.parameters("vit", "dit")
  def test_known_classes_keep_their_rows(self, family):
    head, axis = _HEADS[family]
    stored, initial, started = self._start(
      _config(family, 3), ("7", "new", "2"), _config(family, 10)
    )
    ours, own, theirs = (
      np.moveaxis(tree[head], axis, 0) for tree in (started, initial, stored)
    )
    np.testing.assert_array_equal(ours[0], theirs[7])
    np.testing.assert_array_equal(ours[1], own[1])
    np.testing.assert_array_equal(ours[2], theirs[2])

  def test_as_many_other_classes_are_new_too(self):
    names = tuple("abcdefghij")
    _, initial, started = self._start(
      _config("vit", 10), names, _config("vit", 10)
    )
    for path in (("head", "kernel"), ("head", "bias")):
      np.testing.assert_array_equal(started[path], initial[path])

  @parameterized.parameters(((), _TEN), (_TEN, ()), (_TEN, _TEN))
  def test_same_classes_keep_the_head(self, ours, theirs):
    stored, _, started = self._start(
      _config("vit", 10), ours, _config("vit", 10), theirs
    )
    for path, leaf in started.items():
      np.testing.assert_array_equal(leaf, stored[path], path)

  def test_another_width_is_still_refused(self):
    with self.assertRaisesRegex(ValueError, "does not fit the model"):
      self._start(
        _config("dit", 3, width=48), ("a", "b", "c"), _config("dit", 10)
      )

  def test_another_size_takes_everything(self):
    size = {"image_size": (16, 16), "pretrain_image_size": 8}
    stored, _, started = self._start(
      _config("vit", 10, **size), _TEN, _config("vit", 10)
    )
    self.assertEqual(started.keys(), stored.keys())
    for path, leaf in started.items():
      np.testing.assert_array_equal(leaf, stored[path], path)


if __name__ == "__main__":
  absltest.main()
