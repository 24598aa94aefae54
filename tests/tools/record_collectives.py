"""Records what every family's training step exchanges on every mesh.

It compiles 15 steps for eight CPU devices, which takes minutes, and writes
tests/goldens/collectives/jax_VERSION.json; once for each version of jax:

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
      config = meshes.config_of(family, mesh=axes)
      text, mesh = meshes.compiled_step(config)
      table[f"{family} {name}"] = meshes.exchanges(text, mesh)
  rows = [
    f"  {json.dumps(name)}: {{\n"
    + ",\n".join(f"    {json.dumps(k)}: {v}" for k, v in row.items())
    + "\n  }"
    for name, row in table.items()
  ]
  meshes.GOLDEN.parent.mkdir(exist_ok=True)
  meshes.GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
  main()
