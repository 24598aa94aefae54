import json
import pathlib

import chex
import numpy as np
from absl.testing import absltest

from moh_jax.convert import INCEPTION_FILE, rules
from moh_jax.convert.inception import (
  abstract_inception,
  convert_inception,
  inception_rules,
  load_inception,
)
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.models.inception import InceptionV3
from tests.convert.stored import save_tensors
from tests.parity.images import regenerate

_CASE = pathlib.Path(__file__).parents[1] / "goldens/inception_fid"


class InceptionCheckpointTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.meta = json.loads((_CASE / "meta.json").read_text())
    stored = read_tensors(_CASE / "weights.safetensors")
    cls.tensors = regenerate(cls.meta, stored)

  def test_names_are_those_of_the_public_file(self):
    table = inception_rules(abstract_inception(InceptionV3()))
    names = [name for rule in table for name in rule.theirs]
    public = [entry["name"] for entry in self.meta["state_dict"]]
    counters = [n for n in public if n.endswith("num_batches_tracked")]
    self.assertNotEmpty(counters)
    self.assertCountEqual(names + counters, public)

  def test_file_there_and_back_is_exact(self):
    file = pathlib.Path(self.create_tempdir().full_path) / "inception.st"
    # Written by PyTorch the file has BatchNorm's counters too.
    counter = {"Mixed_7c.branch1x1.bn.num_batches_tracked": np.int64(7)}
    save_tensors(file, self.tensors | counter)
    params = load_inception(file)
    back = rules.dump_params(inception_rules(params), params)
    chex.assert_trees_all_equal(back, self.tensors)

  def test_missing_file_says_which_is_expected_and_how_to_pass_it(self):
    with self.assertRaisesRegex(
      FileNotFoundError,
      f"no/file.pth: no such file;.*{INCEPTION_FILE}.*--inception PATH",
    ):
      load_inception("no/file.pth")

  def test_another_network_is_refused(self):
    # torchvision's: 1000 classes and an auxiliary head.
    tensors = self.tensors | {"AuxLogits.fc.bias": np.zeros(1000)}
    tensors["fc.bias"] = np.zeros(1000, np.float32)
    del tensors["Mixed_6a.branch3x3.bn.running_var"]
    with self.assertRaisesRegex(
      ValueError,
      r"here: .*1 missing: Mixed_6a\.branch3x3\.bn\.running_var; "
      r"1 not expected: AuxLogits\.fc\.bias; 1 shape: fc\.bias \(1000,\)",
    ):
      convert_inception(tensors, InceptionV3(), source="here")
