import pathlib
import tempfile

from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.entrance import check_same_run
from tests.cli import tiny_checkpoint


class SameRunTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"repeats": 3}, r"data\.repeats: 3 here, 1 there"),
    ({"batch_size": 4}, r"data\.batch_size: 4 here, 8 there"),
  )
  def test_another_order_of_the_images_is_another_run(self, changes, message):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tiny_checkpoint.save(folder)
    other = config_lib.apply_overrides(
      tiny_checkpoint.CONFIG, "data", **changes
    )
    with self.assertRaisesRegex(ValueError, message):
      self._check(folder, other)

  def test_what_changes_is_said_in_a_line(self):
    folder = self.enterContext(tempfile.TemporaryDirectory())
    tiny_checkpoint.save(folder)
    data = pathlib.Path(folder, "checkpoints/0/data")
    data.mkdir()
    (data / "metadata").write_text('{"position": 0}')
    config = tiny_checkpoint.CONFIG
    with self.assertNoLogs("moh_jax", "INFO"):
      self._check(folder, config)
    changes = {"optim": {"lr": 0.5}, "train": {"steps": 7}}
    for section, fields in changes.items():
      config = config_lib.apply_overrides(config, section, **fields)
    with self.assertLogs("moh_jax", "INFO") as logs:
      self._check(folder, config)
    pattern = (
      r"from step 0 on, changed: optim.lr: 0.5 here, 0.001 there; train.steps: "
      r"7 here, \d+ there$"
    )
    self.assertRegex(logs.output[-1], pattern)

  def _check(self, folder, config):
    metadata = Metadata(config, tiny_checkpoint.CLASS_NAMES)
    check_same_run(folder, 0, metadata, {})


if __name__ == "__main__":
  absltest.main()
