"""Tests that write files."""

import pathlib
import tempfile

from absl.testing import parameterized


class FolderTest(parameterized.TestCase):
  """Each test has a new folder, `root`, which goes with it."""

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
