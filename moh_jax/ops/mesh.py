"""What is known of the devices while a function is traced."""

import jax


def on_one_device() -> bool:
  """Whether no mesh splits arrays, so that axes may be merged at will."""
  mesh = jax.sharding.get_abstract_mesh()
  return mesh.empty or mesh.size == 1
