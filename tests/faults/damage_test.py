"""Every file of a checkpoint, damaged in turn: named, and stepped over."""

import pathlib
import random

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.inference.restore import restore
from moh_jax.runtime import steps
from moh_jax.runtime.steps import DamagedCheckpointError
from tests.training import tiny

pytestmark = pytest.mark.faults


def _damages(content: bytes, seed: str):
  """Contents of a damaged file, None where it is deleted."""
  rng = random.Random(seed)
  bit = rng.randrange(8 * len(content))
  changed = bytearray(content)
  changed[bit // 8] ^= 1 << bit % 8
  yield bytes(changed)
  yield content[: rng.randrange(1, len(content))]
  yield b""
  yield None


class DamageTest(parameterized.TestCase):
  @parameterized.parameters(*tiny.CONFIGS)
  def test_every_file_is_named_and_the_step_before_is_used(self, family):
    workdir = self.create_tempdir().full_path
    config = tiny.CONFIGS[family](model=tiny.ALIKE[family])
    tiny.train(config, workdir)  # checkpoints of steps 2 and 4
    whole = jax.tree.map(np.asarray, restore(workdir).params)
    folder, cases = pathlib.Path(workdir, "checkpoints/4"), 0
    read = {"config", "", "ema" if (folder / "ema").exists() else "params"}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
      name = path.relative_to(folder).as_posix()
      item = name.partition("/")[0] if "/" in name else ""
      content = path.read_bytes()
      for damaged in _damages(content, name):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        self.assertEqual([*steps.find_damage(workdir, 4)], [name])
        self.assertEqual(steps.newest_whole_step(workdir), 2)
        cases += 1
        if item in read:
          with self.assertRaisesRegex(
            DamagedCheckpointError, r"step 4: damaged, .*steps: \[2\]$"
          ) as caught:
            restore(workdir)
          self.assertIn(name.removeprefix(f"{item}/"), str(caught.exception))
        elif damaged is None:  # of an item that inference does not read
          values = restore(workdir).params
          jax.tree.map(np.testing.assert_array_equal, values, whole)
      path.write_bytes(content)
    print(f"{family}: {cases} cases, 0 unnoticed")
