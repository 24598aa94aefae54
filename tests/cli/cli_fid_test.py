"""The command from files to metrics, with the recorded random network."""

import json
import pathlib
import tempfile

import numpy as np
import pytest
import threadpoolctl
from PIL import Image

from moh_jax.cli import fid
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.evaluation.image_metrics import ImageSet
from tests.cli import tiny_checkpoint
from tests.convert.stored import save_tensors
from tests.parity.images import regenerate

_CASE = pathlib.Path(__file__).parents[1] / "goldens/inception_fid"
_RNG = np.random.RandomState(0)
_SAMPLES = _RNG.randint(0, 256, (5, 9, 9, 3), np.uint8)
_REFERENCE = _RNG.randint(0, 200, (6, 9, 9, 3), np.uint8)


class FidTest(tiny_checkpoint.CommandTest):
  COMMAND = "fid --batch-size=8"

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Eigenvalues in BLAS threads that wait for busy cores take 20 times longer.
    cls.enterClassContext(threadpoolctl.threadpool_limits(1))
    root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    meta = json.loads((_CASE / "meta.json").read_text())
    stored = read_tensors(_CASE / "weights.safetensors")
    weights = root / "inception.safetensors"
    # Written by PyTorch the file has BatchNorm's counters too.
    counter = {"Mixed_7c.branch1x1.bn.num_batches_tracked": np.int64(7)}
    save_tensors(weights, regenerate(meta, stored) | counter)
    cls.network = "--inception", weights
    cls.samples = root / "samples.npz"
    np.savez(cls.samples, _SAMPLES)
    cls.copies, cls.folder = root / "copies", root / "reference"
    for folder, images in ((cls.copies, _SAMPLES), (cls.folder, _REFERENCE)):
      folder.mkdir()
      for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i}.png")
    cls.stats = root / "stats.npz"
    # One run through everything; tests look at what it left.
    _, out, cls.warned = tiny_checkpoint.call(
      *("fid", "--samples", cls.samples, "--reference", cls.folder),
      *("--save-stats", cls.stats, "--json=-", "--batch-size=8", *cls.network),
    )
    cls.metrics = json.loads(out)  # nothing else on stdout

  @pytest.mark.integration
  def test_json_has_all_metrics(self):
    metrics = self.metrics
    self.assertGreater(min(metrics["fid"], metrics["sfid"]), 1.0)
    self.assertBetween(metrics["inception_score"], 1.0, 5.0)
    for name in ("precision", "recall"):
      self.assertBetween(metrics[name], 0.0, 1.0)
    for name, value in (
      *(("samples", str(self.samples)), ("reference", str(self.folder))),
      *(("num_samples", 5), ("num_reference", 6), ("resize", "tf1")),
    ):
      self.assertEqual(metrics[name], value)
    self.assertRegex(
      self.warned,
      f"warning: {self.samples}: 5 images .* fid and sfid .* least 2049",
    )
    self.assertNotIn("6/6", self.warned)  # a bar is for terminals

  @pytest.mark.integration
  def test_two_files_of_statistics_need_no_network(self):
    argv = ("--samples", self.stats, "--reference", self.stats)
    metrics = self.report(*argv, "--metrics=sfid")
    self.assertAlmostEqual(metrics["sfid"], 0.0, delta=1e-6)
    for name in ("fid", "precision", "num_samples", "num_reference"):
      self.assertIsNone(metrics[name])

  @pytest.mark.integration
  def test_saved_statistics_serve_as_reference_of_a_folder(self):
    argv = ("--samples", self.copies, "--reference", self.stats)
    argv += ("--metrics=fid,is", *self.network)
    metrics = dict(
      line.split(": ", 1) for line in self.done(*argv).splitlines()
    )
    self.assertAlmostEqual(float(metrics["fid"]), 0.0, places=3)
    score = self.metrics["inception_score"]
    self.assertEqual(metrics["inception_score"], f"{score:.4f}")
    self.assertNotIn("sfid", metrics)
    self.assert_refused("resize", *argv, "--resize=ptfid")

  @pytest.mark.integration
  def test_batches_of_few_and_of_large_images_are_smaller(self):
    for count, side, expected in ((99, 3000, 56), (99, 100, 64), (9, 100, 16)):
      images = ImageSet("x.npz", count, (side, side), iter)
      self.assertEqual(fid._batch_size(images, 64, 8), expected)
    with self.assertRaisesRegex(ValueError, "x.npz: images of 9000 rows x"):
      fid._batch_size(ImageSet("x.npz", 9, (9000, 9000), iter), 64, 8)

  @pytest.mark.integration
  def test_without_reference_scores_what_needs_none(self):
    metrics = self.report("--samples", self.samples, *self.network)
    score = self.metrics["inception_score"]
    self.assertAlmostEqual(metrics["inception_score"], score)
    self.assertIsNone(metrics["fid"])
