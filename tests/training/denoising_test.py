"""The diffusion task: its loss, held-out figures and previews."""

from collections.abc import Callable
from unittest import mock

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest
from PIL import Image

from moh_jax.layers.stack import ModelAux
from moh_jax.runtime.mesh import replicated, use_mesh
from moh_jax.training import denoising
from moh_jax.training.step import metric_values
from tests import folders
from tests.data.tiny_images import put
from tests.training import meshes, tiny
from tests.training.tiny import make_task

_EXAMPLES = 4096
_PREVIEW = {"every": 2, "num": 5, "zoom": 1}
_NO_LABEL = tiny.DIT.num_classes


class _Echo(nn.Module):
  """Predicts a function of the times and labels that it is told."""

  said: Callable = lambda t, labels: 0 * t
  learn_sigma: bool = False

  @nn.compact
  def __call__(self, x, t, labels):
    value = jnp.float32(self.said(t, labels)).reshape(-1, 1, 1, 1)
    out = jnp.broadcast_to(value, x.shape)
    if self.learn_sigma:
      out = jnp.concatenate([out, jnp.zeros_like(x)], axis=-1)
    return out, ModelAux(jnp.float32(3.0), jnp.float32(0.5), layers=())


def _metrics(network, examples=_EXAMPLES, labels=0, seed=0, **sections):
  """Metrics on empty images, whose error is the prediction squared."""
  sections["diffusion"] = {"prediction": "x0", **sections.get("diffusion", {})}
  loss_fn = denoising.make_loss(network, tiny.dit_config(**sections))
  batch = {
    "image": jnp.zeros((examples, 1, 1, 1)),
    "label": jnp.full(examples, labels, jnp.int32),
  }
  loss, metrics = loss_fn({}, batch, jax.random.key(seed), 0)
  chex.assert_trees_all_equal(loss, metrics["loss"])
  return jax.tree.map(float, metric_values(metrics))


class LossTest(absltest.TestCase):
  def test_the_network_is_told_times_and_labels_which_come_from_the_key(self):
    network = _Echo(lambda t, labels: jnp.where(labels == _NO_LABEL, 1, 7))
    for rate in (0.0, 0.1, 0.5):
      sections = {
        "model": {"label_dropout": rate},
        "sample": {"cfg_scale": 1.0},
      }
      mse = _metrics(network, labels=7, **sections)["mse"]
      share = (49 - mse) / (49 - 1)  # of labels that are dropped
      self.assertAlmostEqual(share, rate, delta=0.03 if rate else 0)
    metrics, again, other = (
      _metrics(_Echo(lambda t, labels: t), seed=seed) for seed in (0, 0, 1)
    )
    mean = np.square(np.arange(50)).mean()
    self.assertAlmostEqual(metrics["mse"] / mean, 1, delta=0.05)
    self.assertEqual(metrics, again)
    self.assertNotEqual(metrics, other)
    self.assertNotIn("vb", metrics)
    self.assertEqual(metrics["task_loss"], metrics["mse"])

  def test_loss_is_the_weighted_sum_of_its_parts(self):
    metrics = _metrics(
      _Echo(lambda t, labels: t * 4 // 50, learn_sigma=True),
      diffusion={"vb_weight": 0.5},
      train={"balance_weight": 0.1},
    )
    task = metrics["mse"] + 0.5 * metrics["vb"]
    self.assertGreater(metrics["vb"], 0.05)
    self.assertAlmostEqual(metrics["task_loss"] / task, 1, places=5)
    self.assertAlmostEqual(metrics["loss"] / (task + 0.1 * 3.0), 1, places=5)
    self.assertEqual(metrics["balance_loss"], 3.0)
    self.assertEqual(metrics["activated_share"], 0.5)


class HeldOutTest(folders.FolderTest):
  def test_split_that_lacks_gives_no_figures_and_an_empty_one_is_refused(self):
    put(self.root, "train/0/1.png")
    data = {"source": "image_folder", "path": str(self.root), "batch_size": 1}
    config = tiny.dit_config(data=data, model={"num_classes": 1})
    with self.assertLogs("moh_jax", "WARNING") as logged:
      self.assertEqual(make_task(config).evaluate(None, None), {})
    self.assertIn("has no val/", "".join(logged.output))
    (self.root / "val").mkdir()
    with self.assertRaisesRegex(FileNotFoundError, "holds no image"):
      make_task(config)


class PreviewTest(folders.FolderTest):
  @pytest.mark.integration
  def test_a_run_writes_pictures_beside_its_metrics(self):
    alike = tiny.ALIKE["dit"]
    config = tiny.dit_config(model=alike, train={"steps": 3}, sample=_PREVIEW)
    tiny.train(config, self.root)
    files = sorted(path.name for path in (self.root / "samples").iterdir())
    self.assertEqual(files, ["00000002.png", "00000003.png"])
    with Image.open(self.root / "samples" / files[0]) as picture:
      # 3 rows of 2 images of 8 x 8 and a line of text, 2 pixels apart.
      self.assertEqual((picture.size, picture.mode), ((18, 79), "L"))

  def _preview(self, devices=1, decode=None, **sections):
    sample = {**_PREVIEW, **sections.pop("sample", {})}
    mesh = {"data": devices}
    config = tiny.dit_config(sample=sample, mesh=mesh, **sections)
    mesh = meshes.mesh_of(config)
    params = jax.device_put(tiny.random_params(config), replicated(mesh))
    with use_mesh(mesh):
      return make_task(config, decode).preview(params, mesh).astype(int)

  @pytest.mark.integration
  def test_is_of_wanted_labels_on_any_devices(self):
    picture = self._preview()
    gap = np.abs(picture - self._preview(devices=8))
    self.assertLessEqual(gap.max(), 1)  # where the rounding is a tie
    labelled = self._preview(sample={"labels": (0, 1, -1), "zoom": 3})
    self.assertEqual(labelled.shape, (127, 50, 1))
    # The first two images have the classes' labels, the third one has none.
    second, third = labelled[1:24:3, 27:50:3], labelled[44:67:3, 1:24:3]
    np.testing.assert_array_equal(second, picture[:8, 10:])
    self.assertFalse(np.array_equal(third, picture[27:35, :8]))
    names = labelled[24:41, 26:], labelled[67:84, :24]
    self.assertTrue(all((name < 128).any() for name in names))
    self.assertFalse(np.array_equal(*names))

  def test_latents_are_shown_as_the_autoencoder_decodes_them(self):
    decode = mock.Mock(side_effect=lambda x: jnp.zeros((len(x), 16, 16, 3)))
    latent = {"data": {"source": "fake"}, "diffusion": {"space": "latent"}}
    picture = self._preview(decode=decode, **latent)
    self.assertEqual(decode.call_args.args[0].shape, (5, 8, 8, 1))
    self.assertEqual(picture.shape, (103, 34, 3))
