"""Layers, routing and attention need JAX, Flax, Chex and NumPy alone."""

import pytest
from absl.testing import absltest

from tests.two_processes import python

_PROGRAM = """
import builtins, importlib, pkgutil, sys

allowed = {"moh_jax", "jax", "jaxlib", "flax", "chex", "numpy"}
allowed |= sys.stdlib_module_names
original = builtins.__import__


def guarded(name, names=None, *args, **kwargs):
  ours = (names or {}).get("__name__", "").startswith("moh_jax")
  assert not ours or name.partition(".")[0] in allowed, (name, names)
  return original(name, names, *args, **kwargs)


builtins.__import__ = guarded
import jax, moh_jax.layers
for module in pkgutil.iter_modules(moh_jax.layers.__path__):
  importlib.import_module(f"moh_jax.layers.{module.name}")
layer = moh_jax.MoHAttention(moh_jax.HeadBudget(4, 1, 1, 8))
jax.eval_shape(layer.init, jax.random.key(0), jax.numpy.ones((2, 8, 32)))
"""


class LightCoreTest(absltest.TestCase):
  @pytest.mark.integration
  def test_layers_import_no_other_package(self):
    status, _, err = python("-c", _PROGRAM)
    self.assertEqual(status, 0, err)
