import subprocess
import sys

from absl.testing import absltest

# Slow to import, or missing where only kernels and layers are used.
_HEAVY = (
  "chex",
  "flax",
  "grain",
  "jax",
  "ml_collections",
  "numpy",
  "optax",
  "orbax",
)
_PROGRAM = """
import sys
import moh_jax.config
print(*(name for name in sys.argv[1:] if name in sys.modules))
"""


class ImportsTest(absltest.TestCase):
  def test_config_loads_no_library(self):
    out = subprocess.run(
      [sys.executable, "-c", _PROGRAM, *_HEAVY],
      capture_output=True,
      check=True,
      text=True,
    ).stdout
    self.assertEqual(out.split(), [])


if __name__ == "__main__":
  absltest.main()
