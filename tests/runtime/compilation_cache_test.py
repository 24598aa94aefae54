"""Compiled programs on disk: kept, used again, damaged, and where."""

import os
import subprocess
import sys
from unittest import mock

import jax
import pytest

from moh_jax.runtime import compilation_cache
from tests import folders

# Prints a result, how many programs came from the cache, and its limit.
_PROGRAM = """
import jax
from moh_jax.runtime import compilation_cache
compilation_cache.enable()
hits = []
jax.monitoring.register_event_listener(
  lambda name, **_: hits.append(name.endswith("/cache_hits"))
)
x = jax.numpy.linspace(0, 1, 99)
print(jax.jit(lambda x: jax.numpy.sin(x) @ jax.numpy.exp(x))(x), sum(hits))
print(jax.config.jax_compilation_cache_max_size)
"""


class CompilationCacheTest(folders.FolderTest):
  def _run(self, folder):
    """The result, programs from the cache, the limit, and what was said."""
    environment = {
      **os.environ,
      compilation_cache.VARIABLE: str(folder),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    del environment["JAX_COMPILATION_CACHE_DIR"]
    program = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(
      program, env=environment, capture_output=True, text=True, check=True
    )
    value, hits, limit = done.stdout.split()
    return value, int(hits), int(limit), done.stderr

  @pytest.mark.integration
  def test_a_second_process_compiles_nothing(self):
    value, *others = self._run(self.root)
    self.assertEqual(others, [0, 1 << 30, ""])
    again, hits, *_ = self._run(self.root)
    self.assertEqual(again, value)
    self.assertGreater(hits, 0)
    # Damaged programs are compiled anew.
    for entry in self.root.glob("*/*-cache"):
      entry.write_bytes(entry.read_bytes()[:50])
    self.assertEqual(self._run(self.root)[:2], (value, 0))

  def test_a_folder_that_cannot_be_written_is_told(self):
    (self.root / "file").touch()
    _, hits, _, said = self._run(self.root / "file" / "below")
    self.assertEqual(hits, 0)
    self.assertIn("compiled programs are not kept: ", said)

  def test_folder_is_the_users_unless_given(self):
    for environment, start in (
      ({"HOME": "/home/me"}, "/home/me/.cache/moh_jax/xla/"),
      ({"XDG_CACHE_HOME": "/c"}, "/c/moh_jax/xla/"),
      ({compilation_cache.VARIABLE: "/g", "XDG_CACHE_HOME": "/c"}, "/g/"),
    ):
      with mock.patch.dict(os.environ, environment, clear=True):
        self.assertStartsWith(str(compilation_cache.folder()), start)

  def test_a_cache_given_to_jax_stays(self):
    before = jax.config.jax_compilation_cache_dir
    self.assertTrue(before)  # tests have one of their own
    given = {compilation_cache.VARIABLE: str(self.root / "other")}
    with mock.patch.dict(os.environ, given):
      compilation_cache.enable()
    self.assertEqual(jax.config.jax_compilation_cache_dir, before)
    self.assertFalse((self.root / "other").exists())
