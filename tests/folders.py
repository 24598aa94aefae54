"""Tests that write files."""

import pathlib
import tempfile

from absl.testing import parameterized


class FolderTest(parameterized.TestCase):
  """Each test has a new folder, `root`, which goes with it."""

  @classmethod
  def shared_folder(cls) -> pathlib.Path:
    """A new folder, which goes with the tests of the class."""
    return pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))

  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
