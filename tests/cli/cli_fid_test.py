"""The command from files to metrics, with the recorded random network."""

import json
import pathlib
import tempfile

import numpy as np
import pytest
import threadpoolctl
from PIL import Image

from moh_jax.convert.tensor_files import read_tensors
from tests.cli import tiny_checkpoint
from tests.convert.stored import save_tensors
from tests.parity.images import regenerate

_CASE = pathlib.Path(__file__).parents[1] / "goldens/inception_fid"
_RNG = np.random.RandomState(0)
_SAMPLES = _RNG.randint(0, 256, (5, 9, 9, 3), np.uint8)
_REFERENCE = _RNG.randint(0, 200, (6, 9, 9, 3), np.uint8)


class FidTest(tiny_checkpoint.CommandTest):
  COMMAND = "fid"

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
      *("--save-stats", cls.stats, "--json=-", *cls.network),
    )
    cls.metrics = json.loads(out)  # nothing else on stdout

  @pytest.mark.integration
  def test_json_has_all_metrics(self):
    metrics = self.metrics
    self.assertGreater(min(metrics["fid"], metrics["sfid"]), 1.0)
    self.assertBetween(metrics["inception_score"], 1.0, 5.0)
    for name in ("precision", "recall"):
      self.assertBetween(metrics[name], 0.0, 1.0)
    self.assertEqual(metrics["samples"], str(self.samples))
    self.assertRegex(self.warned, f"warning: {self.samples}: 5 images .* 2048")

  @pytest.mark.integration
  def test_saved_statistics_serve_as_reference_of_a_folder(self):
    metrics = self.report(
      *("--samples", self.copies, "--reference", self.stats),
      *("--metrics=fid,is", *self.network),
    )
    self.assertAlmostEqual(metrics["fid"], 0.0, places=3)
    score = self.metrics["inception_score"]
    self.assertAlmostEqual(metrics["inception_score"], score)
    self.assertNotIn("sfid", metrics)
    self.assert_refused(
      "need --reference",
      *("--samples", self.copies, "--metrics=fid", *self.network),
    )
