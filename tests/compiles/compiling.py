"""Compiles functions for devices that are not here, and reads the programs."""

import re
import unittest
from collections.abc import Callable
from typing import Any

import jax

from moh_jax.runtime.devices import absent_devices, missing_packages

# Instructions for which no device runs a program.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z-]+)\(")
_ARRAY = re.compile(r"[a-z]\w*\[([0-9,]*)\]")


def compile_for(target: str, function: Callable, *shapes: Any) -> Any:
  """Compiles for one device.

  Args:
    target: see `absent_devices`.
    function: takes arrays.
    *shapes: pytrees of `jax.ShapeDtypeStruct`.

  Raises:
    unittest.SkipTest: the compiler for the device is not installed.
  """
  if missing := missing_packages(target):
    raise unittest.SkipTest(f"needs {', '.join(missing)}")
  mesh = jax.sharding.Mesh(absent_devices(target)[:1], ("data",))
  whole = jax.NamedSharding(mesh, jax.P())
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes
  )
  with jax.set_mesh(mesh):
    return jax.jit(function).lower(*shapes).compile()


def programs(compiled: Any) -> list[tuple[str, list[tuple[int, ...]]]]:
  """What the device runs one after another.

  Args:
    compiled: from `compile_for`.

  Returns:
    For each program its line of the compiled text, and its outputs' shapes.
  """
  text = compiled.as_text()
  lines = text[text.index("\nENTRY") :].splitlines()
  result = []
  for line in lines:
    match = _INSTRUCTION.match(line)
    if match and match[2] not in _FREE:
      shapes = [
        tuple(map(int, filter(None, x.split(","))))
        for x in _ARRAY.findall(match[1])
      ]
      result.append((line, shapes))
  return result
