"""Layers, routing and attention need JAX, Flax, Chex and NumPy alone."""

import pathlib
import subprocess
import sys

import pytest
from absl.testing import absltest

_ROOT = pathlib.Path(__file__).parents[2]
# Refuses to modules of the package what they may not import.
_BLOCKED = """
import builtins, sys

allowed = {"moh_jax", "jax", "jaxlib", "flax", "chex", "numpy"}
allowed |= sys.stdlib_module_names
original = builtins.__import__


def guarded(name, names=None, *args, **kwargs):
  ours = (names or {}).get("__name__", "").startswith("moh_jax")
  if ours and name.partition(".")[0] not in allowed:
    raise ModuleNotFoundError(f"{names['__name__']} imports {name}")
  return original(name, names, *args, **kwargs)


builtins.__import__ = guarded
"""
_EVERY_LAYER = """
import importlib, pkgutil
import moh_jax.layers

for module in pkgutil.iter_modules(moh_jax.layers.__path__):
  importlib.import_module(f"moh_jax.layers.{module.name}")
"""
_USE = """
import jax
from moh_jax import HeadBudget, MoHAttention

layer, x = MoHAttention(HeadBudget(4, 1, 1, 8)), jax.numpy.ones((2, 8, 32))
params = jax.jit(layer.init)(jax.random.key(0), x)
grads = jax.grad(lambda p: layer.apply(p, x)[0].sum())(params)
print(layer.apply(params, x)[0].shape)
"""


class LightCoreTest(absltest.TestCase):
  @pytest.mark.integration
  def test_layers_import_no_other_package(self):
    program = _BLOCKED + _EVERY_LAYER + _USE
    done = subprocess.run(
      [sys.executable, "-c", program], capture_output=True, text=True, cwd=_ROOT
    )
    self.assertEqual(done.returncode, 0, done.stderr[-2000:])
    self.assertStartsWith(done.stdout, "(2, 8, 32)")
