"""The command from files to metrics, with the recorded random network."""

import json
import pathlib
import tempfile

import numpy as np
import threadpoolctl
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax.convert.tensor_files import read_tensors
from tests.cli import tiny_checkpoint
from tests.convert.stored import save_tensors
from tests.parity.images import regenerate

_CASE = pathlib.Path(__file__).parents[1] / "goldens/inception_fid"
_RNG = np.random.RandomState(0)
_SAMPLES = _RNG.randint(0, 256, (5, 9, 9, 3), np.uint8)
_REFERENCE = _RNG.randint(0, 200, (6, 9, 9, 3), np.uint8)


class FidCommandTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Eigenvalues in BLAS threads that wait for busy cores take 20 times longer.
    cls.enterClassContext(threadpoolctl.threadpool_limits(1))
    cls.root = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    meta = json.loads((_CASE / "meta.json").read_text())
    stored = read_tensors(_CASE / "weights.safetensors")
    cls.weights = cls.root / "inception.safetensors"
    save_tensors(cls.weights, regenerate(meta, stored))
    cls.samples, cls.folder = cls.root / "samples.npz", cls.root / "reference"
    cls.folder.mkdir()
    np.savez(cls.samples, _SAMPLES)
    for i, image in enumerate(_REFERENCE):
      Image.fromarray(image).save(cls.folder / f"{i}.png")
    cls.stats = cls.root / "stats.npz"
    # One run through everything; tests look at what it left.
    cls.result = cls._call(
      *("--samples", cls.samples, "--reference", cls.folder),
      *("--save-stats", cls.stats, "--json", "-"),
    )

  @classmethod
  def _call(cls, *argv, weights=True):
    network = ("--inception", cls.weights) if weights else ()
    return tiny_checkpoint.call("fid", *argv, *network, "--batch-size", 8)

  def test_json_has_all_metrics(self):
    status, out, _ = self.result
    metrics = json.loads(out)  # nothing else on stdout
    self.assertEqual(status, 0)
    self.assertGreater(metrics["fid"], 1.0)
    self.assertGreater(metrics["sfid"], 1.0)
    self.assertBetween(metrics["inception_score"], 1.0, 5.0)
    for name in ("precision", "recall"):
      self.assertBetween(metrics[name], 0.0, 1.0)
    self.assertEqual(metrics["samples"], str(self.samples))
    self.assertEqual(metrics["reference"], str(self.folder))
    self.assertEqual((metrics["num_samples"], metrics["num_reference"]), (5, 6))
    self.assertEqual(metrics["resize"], "tf1")

  def test_warns_how_many_images_are_needed(self):
    _, _, err = self.result
    self.assertRegex(
      err, f"warning: {self.samples}: 5 images .* fid and sfid .* least 2049"
    )
    self.assertNotIn("6/6", err)  # a bar is for terminals

  def test_two_files_of_statistics_need_no_network(self):
    argv = ("--samples", self.stats, "--reference", self.stats)
    status, out, _ = self._call(
      *argv, *("--metrics", "sfid", "--json", "-"), weights=False
    )
    metrics = json.loads(out)
    self.assertEqual(status, 0)
    self.assertAlmostEqual(metrics["sfid"], 0.0, delta=1e-6)
    for name in ("fid", "precision", "num_samples", "num_reference"):
      self.assertIsNone(metrics[name])

  def test_saved_statistics_serve_as_reference_of_a_folder(self):
    copies = self.root / "copies"
    copies.mkdir()
    for i, image in enumerate(_SAMPLES):
      Image.fromarray(image).save(copies / f"{i}.png")
    status, out, _ = self._call(
      *("--samples", copies, "--reference", self.stats, "--metrics", "fid,is"),
    )
    metrics = dict(line.split(": ", 1) for line in out.splitlines())
    first = json.loads(self.result[1])
    self.assertEqual(status, 0)
    self.assertAlmostEqual(float(metrics["fid"]), 0.0, places=3)
    self.assertEqual(
      metrics["inception_score"], f"{first['inception_score']:.4f}"
    )
    self.assertNotIn("sfid", metrics)

  def test_without_reference_scores_what_needs_none(self):
    status, out, _ = self._call("--samples", self.samples, "--json", "-")
    metrics, first = json.loads(out), json.loads(self.result[1])
    self.assertEqual(status, 0)
    self.assertAlmostEqual(
      metrics["inception_score"], first["inception_score"], places=5
    )
    self.assertIsNone(metrics["fid"])


if __name__ == "__main__":
  absltest.main()
