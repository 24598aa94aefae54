import os
import pathlib
import subprocess
import sys
import tempfile
from unittest import mock

import jax
from absl.testing import absltest

from moh_jax.runtime import compilation_cache

# Prints the result and how many programs came from the cache.
_CALL = """
import jax
from moh_jax.runtime import compilation_cache
compilation_cache.enable()
hits = []
jax.monitoring.register_event_listener(
  lambda name, **_: hits.append(name.endswith("/cache_hits"))
)
x = jax.numpy.linspace(0, 1, 99)
print(jax.jit(lambda x: jax.numpy.sin(x) @ jax.numpy.exp(x))(x), sum(hits))
"""


# After the user's cache one of a run: sys.argv has the folders of two runs.
_KEEP = """
import sys
import jax
from moh_jax.runtime import compilation_cache
compilation_cache.enable()
for factor, folder in enumerate([None, *sys.argv[1:]], start=2):
  if folder:
    compilation_cache.keep_in(folder)
  jax.jit(lambda x: factor * jax.numpy.sin(x))(jax.numpy.ones(99))
print(jax.config.jax_compilation_cache_max_size)
"""


class CompilationCacheTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def test_the_folder_of_a_run_takes_the_place_of_the_users(self):
    folders = self.root / "first", self.root / "second"
    out = self._run(_KEEP, self.root / "users", *folders)
    self.assertEqual(out.stdout, "-1\n")  # without a limit, as documented
    for folder in (self.root / "users", *folders):
      self.assertNotEmpty(list(folder.rglob("*-cache")), folder)

  def _call(self, folder, **environment):
    done = self._run(_CALL, folder, **environment)
    value, hits = done.stdout.split()
    return value, int(hits), done.stderr

  def _run(self, program, folder, *argv, **environment):
    environment = {
      **os.environ,
      compilation_cache.VARIABLE: str(folder),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      **environment,
    }
    del environment["JAX_COMPILATION_CACHE_DIR"]
    return subprocess.run(
      [sys.executable, "-c", program, *map(str, argv)],
      env=environment,
      capture_output=True,
      text=True,
      check=True,
    )

  def test_a_second_process_compiles_nothing(self):
    first = self._call(self.root)
    self.assertEqual((first[1], first[2]), (0, ""))
    second = self._call(self.root)
    self.assertEqual(second[0], first[0])
    self.assertGreater(second[1], 0)
    # Damaged programs are compiled anew, half-written ones removed.
    entries = sorted(self.root.glob("*/*-cache"))
    self.assertNotEmpty(entries)
    for entry in entries:
      entry.write_bytes(entry.read_bytes()[:50])
    entries[0].with_name(entries[0].name.replace("-cache", "-atime")).unlink()
    third = self._call(self.root)
    self.assertEqual(third[:2], (first[0], 0))
    self.assertGreater(entries[0].stat().st_size, 50)

  def test_a_folder_that_cannot_be_written_is_told(self):
    (self.root / "file").touch()
    value, hits, stderr = self._call(self.root / "file" / "below")
    self.assertGreater(float(value), 0)
    self.assertEqual(hits, 0)
    self.assertIn("compiled programs are not kept: ", stderr)

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
