"""Predictions for every image, and scores that are exact counts."""

import types

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from moh_jax.config import MeshConfig
from moh_jax.evaluation import predictions
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training import classification
from tests.training import tiny

_RNG = np.random.RandomState(0)
_LOGITS = _RNG.normal(size=(24, 8)).astype(np.float32)
_LABELS = _RNG.randint(0, 8, 24).astype(np.int32)


class _Echo(nn.Module):
  """The "images" are the logits."""

  @nn.compact
  def __call__(self, images):
    return images, types.SimpleNamespace(activated_share=jnp.float32(0.5))


def _predict(logits=_LOGITS, labels=_LABELS, real=21):
  count = len(labels)
  batch = {
    "image": logits,
    "label": labels,
    "index": np.arange(count, dtype=np.int32),
    "mask": (np.arange(count) < real).astype(np.float32),
  }
  mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
  parts = [{k: v[i : i + 8] for k, v in batch.items()} for i in (0, 8, 16)]
  step = predictions.predict_step(_Echo())
  with sharding.use_mesh(mesh):
    parts = [sharding.shard_batch(part, mesh) for part in parts]
    return predictions.predict_all(step, {}, parts)


class ScoresTest(parameterized.TestCase):
  def test_equal_the_definition(self):
    found = _predict()  # the last three of 24 are padding
    logits, labels = _LOGITS[:21], _LABELS[:21]
    hits = np.argsort(-logits, axis=-1) == labels[:, None]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = {
      "accuracy": hits[:, 0].mean(),
      "top5_accuracy": hits[:, :5].any(-1).mean(),
      "loss": -logp[np.arange(21), labels].mean(),
      "activated_share": 0.5,
      "examples": 21,
    }
    ours = predictions.scores(found)
    chex.assert_trees_all_close(ours, expected, atol=5e-6, rtol=0)

  @parameterized.product(classes=(2, 4, 5, 8), place=(0, 1, slice(None)))
  def test_model_that_gives_nan_scores_nothing(self, classes, place):
    logits = np.zeros((24, classes), np.float32)
    logits[:, place] = np.nan
    found = _predict(logits, np.arange(24, dtype=np.int32) % classes)
    ours = predictions.scores(found)
    self.assertEqual((ours["accuracy"], ours["top5_accuracy"]), (0, 0))

  def test_several_classes_may_be_right(self):
    found = _predict()
    right = [
      {int(row[0])} if i % 2 else {int(row[4])}
      for i, row in enumerate(found.top)
    ]
    right[3] = right[4] = frozenset()  # these do not count
    ours = predictions.scores(found, right)
    self.assertEqual(ours["examples"], 19)
    self.assertEqual(ours["accuracy"], 9 / 19)
    self.assertEqual(ours["top5_accuracy"], 1)

  def test_by_class(self):
    found = predictions.Predictions(
      index=np.arange(5),
      label=np.array([0, 0, 0, 2, 2]),
      top=np.array([[0, 1], [2, 0], [2, 1], [2, 0], [-1, -1]]),
      loss=np.zeros(5),
      activated_share=1.0,
    )
    rows = predictions.by_class(found, ("ant", "bee", "cat"))
    self.assertEqual(
      [tuple(row.values()) for row in rows],
      [
        ("ant", 3, 1 / 3, 2 / 3, "cat", 2),
        ("bee", 0, None, None, "", 0),
        ("cat", 2, 1 / 2, 1 / 2, "", 0),
      ],
    )


class ReadRightTest(parameterized.TestCase):
  classes = ("a", "b")

  @parameterized.parameters(
    ([[0], [1, 0]],),
    ({"2.jpg": ["b", "a"], "1.jpg": "a"},),
    ({"b/2.jpg": [0, 1], "a/1.jpg": 0},),
    ({"b/1.jpg": [0, 1], "a/1.jpg": 0}, ("b/1.jpg", "a/1.jpg")),
  )
  def test_forms(self, stored, names=("b/2.jpg", "a/1.jpg")):
    right = predictions.read_right(stored, names, self.classes)
    self.assertEqual(right, [{0, 1}, {0}])

  @parameterized.parameters(
    # As of 12 digits, whose names are their numbers; of the rows of tables; of
    # ImageNet, whose class folders are in another order.
    ([str(i) for i in range(12)],),
    ([f"data/val-0.parquet:{i + 1}" for i in range(12)],),
    ([f"{'ba'[i // 6]}/val_{i}.JPEG" for i in range(12)],),
  )
  def test_lists_are_in_order_of_the_numbers_in_names(self, names):
    classes = tuple(f"class {i}" for i in range(12))
    expected = [{i} for i in range(12)]
    right = predictions.read_right(list(range(12)), names, classes)
    self.assertEqual(right, expected)
    right = predictions.read_right(list(range(12)), names[::-1], classes)
    self.assertEqual(right, expected[::-1])

  @parameterized.parameters(
    ("b/2.jpg", [[0]], "1 entries, must be one for each of the 2"),
    ("b/2.jpg", {"1.jpg": 0}, "no entry for the image 'b/2.jpg'"),
    ("b/2.jpg", [0, "c"], "'b/2.jpg' has the label 'c'"),
    ("b/2.jpg", [0, 7], "'b/2.jpg' has the label 7"),
    ("b/1.jpg", [0, 1], r"several images are called '1.jpg'.*\"CLASS/NAME\""),
    ("b/1.jpg", {"1.jpg": 0}, "for the image 'b/1.jpg', and others have"),
  )
  def test_bad_file_is_named(self, name, stored, message):
    names = (name, "a/1.jpg")
    with self.assertRaisesRegex(ValueError, message):
      predictions.read_right(stored, names, self.classes)


class DevicesTest(parameterized.TestCase):
  def test_any_number_of_devices_counts_the_same_images(self):
    config = tiny.config(model=tiny.ALIKE["vit"], eval={"batch_size": 16})
    model, _ = make_model(config)
    params = tiny.random_params(config)
    _, predict = classification.make_predict(model, config, Metadata(config))
    found = {}
    for count in (1, 8):
      mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:count])
      with sharding.use_mesh(mesh):
        found[count] = predict(params, mesh)
    one, eight = found.values()
    self.assertEqual(len(one.index) % 8, 7)  # the last batch is filled up
    np.testing.assert_array_equal(np.sort(one.index), np.arange(len(one.index)))
    for name in ("index", "label", "top"):
      ours, theirs = getattr(one, name), getattr(eight, name)
      np.testing.assert_array_equal(ours, theirs)
