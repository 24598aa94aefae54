"""Records what every family's training step exchanges on every mesh.

It compiles 15 steps for eight CPU devices, which takes minutes, and writes
tests/training/collectives/jax_VERSION.json; once for each version of jax:

  python -m tests.tools.record_collectives
"""

import json

from tests import conftest  # noqa: F401, sets the devices before JAX starts
from tests.training import meshes


def main() -> None:
  """Records the steps of all families on all meshes."""
  table = {}
  for family in meshes.MODELS:
    for name, axes in meshes.MESHES.items():
      step = meshes.compiled_step(meshes.config_of(family, mesh=axes))
      table[f"{family} {name}"] = meshes.exchanges(*step)
  meshes.GOLDEN.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
  main()
