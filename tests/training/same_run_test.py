import tempfile

from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.training.same_run import check_same_run
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
    metadata = Metadata(other, tiny_checkpoint.CLASS_NAMES)
    with self.assertRaisesRegex(ValueError, message):
      check_same_run(folder, 0, metadata, {})


if __name__ == "__main__":
  absltest.main()
