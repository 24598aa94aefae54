"""A test with a folder of its own."""

import pathlib
import tempfile

from absl.testing import parameterized


class FolderTest(parameterized.TestCase):
  """`root` is a new folder for each test."""

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
