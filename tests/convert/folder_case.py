"""A test case with a folder of transformers, and checkpoints made from it."""

import pathlib

from absl.testing import parameterized

from moh_jax.convert.checkpoints import convert, export


class FolderCase(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.source, self.out = self.folder / "hf", self.folder / "ours"

  def _convert(self, kind="llama", **options):
    return convert(kind, str(self.source), str(self.out), **options)

  def _export(self, name="again", **options) -> pathlib.Path:
    export(str(self.out), str(self.folder / name), **options)
    return self.folder / name
