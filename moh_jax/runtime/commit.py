"""How Orbax gives a step folder its name: after its manifest is written."""

from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from moh_jax.runtime import manifest

TEMPORARY = ocp.path.atomicity_types.TMP_DIR_SUFFIX


def temporary_path_class(
  folder: epath.Path,
) -> type[ocp.path.atomicity_types.TemporaryPath]:
  """The class of a manager's temporary paths, for the folder of its steps."""
  default = ocp.path.atomicity_defaults.get_default_temporary_path_class(folder)
  renames = issubclass(default, ocp.path.atomicity.AtomicRenameTemporaryPath)
  return _Renamed if renames else _Marked


class _Renamed(ocp.path.atomicity.AtomicRenameTemporaryPath):
  """A step folder that is renamed twice, and gets its manifest in between.

  Orbax changes its own metadata just before it renames a folder, so that only
  then all files have their last content.
  """

  step: epath.Path | None = None  # None: the folder of an item

  @classmethod
  def from_final(cls, final_path: epath.Path, **options: Any) -> "_Renamed":
    if not final_path.name.isdecimal():
      return super().from_final(final_path, **options)
    staged = final_path.with_name(f"{final_path.name}{TEMPORARY}")
    path = super().from_final(staged, **options)
    path.step = final_path
    return path

  def get_final(self) -> epath.Path:
    return self.step or super().get_final()

  async def finalize(self) -> None:
    await super().finalize()
    if self.step:
      staged = super().get_final()
      manifest.write(staged)
      staged.rename(self.step)


class _Marked(ocp.path.atomicity.CommitFileTemporaryPath):
  """A step folder in a bucket, which cannot rename: a file marks it as whole.

  A step that is killed between that file and its manifest counts as damaged.
  """

  async def finalize(self) -> None:
    await super().finalize()
    if self.get_final().name.isdecimal():
      manifest.write(self.get_final())
