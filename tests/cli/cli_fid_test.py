"""The command from files to metrics, with the recorded random network."""

import json
import pathlib

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

  def _network(self):
    """Options for the recorded network, as PyTorch writes it."""
    meta = json.loads((_CASE / "meta.json").read_text())
    stored = read_tensors(_CASE / "weights.safetensors")
    # BatchNorm's counters are in the file too.
    counter = {"Mixed_7c.branch1x1.bn.num_batches_tracked": np.int64(7)}
    weights = self.root / "inception.safetensors"
    save_tensors(weights, regenerate(meta, stored) | counter)
    return "--inception", weights

  @pytest.mark.integration
  def test_files_folders_and_statistics_have_all_metrics(self):
    # Eigenvalues in BLAS threads that wait for busy cores take 20 times longer.
    self.enterContext(threadpoolctl.threadpool_limits(1))
    samples, stats = self.root / "samples.npz", self.root / "stats.npz"
    copies, folder = self.root / "copies", self.root / "reference"
    np.savez(samples, _SAMPLES)
    for place, images in ((copies, _SAMPLES), (folder, _REFERENCE)):
      place.mkdir()
      for i, image in enumerate(images):
        Image.fromarray(image).save(place / f"{i}.png")
    network = self._network()
    status, out, warned = self.call(
      *("--samples", samples, "--reference", folder),
      *("--save-stats", stats, "--json=-", *network),
    )
    self.assertEqual(status, 0, warned)
    self.assertRegex(warned, f"warning: {samples}: 5 images .* 2048")
    metrics = json.loads(out)  # nothing else on stdout
    self.assertGreater(min(metrics["fid"], metrics["sfid"]), 1.0)
    self.assertBetween(metrics["inception_score"], 1.0, 5.0)
    for name in ("precision", "recall"):
      self.assertBetween(metrics[name], 0.0, 1.0)
    self.assertEqual(metrics["samples"], str(samples))
    again = self.report("--samples", copies, "--reference", stats, *network)
    self.assertAlmostEqual(again["fid"], 0.0, places=3)  # of equal images
    score = metrics["inception_score"]
    self.assertAlmostEqual(again["inception_score"], score)
    self.assertAlmostEqual(again["sfid"], 0.0, places=3)
    self.assertNotIn("precision", again)  # needs images
