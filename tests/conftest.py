"""Settings of every test, made before JAX starts.

Eight fake CPU devices: most tests use one of them, those of meshes use all.
LLVM does not optimize: programs here are small and compiling them is most of
the suite's time (parity_test.py runs some recorded cases as users do).
Programs that several tests share are compiled once per session, through a
compilation cache of its own. Processes that tests start inherit both. What JAX
keeps in memory is dropped after each file: in the whole suite it would grow to
7 GB in each process, and the garbage collector would go through it all.
"""

import gc
import importlib.metadata
import os
import pathlib
import shutil
import tempfile

import pytest
from absl import flags
from hypothesis import settings

_XLA_FLAGS = (
  "--xla_force_host_platform_device_count=8",
  "--xla_backend_optimization_level=0",
)
if importlib.metadata.version("jax").startswith("0.10."):
  # Compiles in half the time; XLA no longer knows it in 0.11.
  _XLA_FLAGS += ("--xla_cpu_use_fusion_emitters=false",)
os.environ["XLA_FLAGS"] = " ".join(
  [os.environ.get("XLA_FLAGS", ""), *_XLA_FLAGS]
)
# On a CPU each collective that waits for other devices takes a thread: with no
# more threads than devices all of them can wait.
os.environ.setdefault("PJRT_NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Arrays of unequal rank do not broadcast by chance: code says which axes meet.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

# The same examples in every run; compiling takes what time it takes.
settings.register_profile(
  "suite", deadline=None, derandomize=True, database=None
)
settings.load_profile("suite")

# Workers of pytest-xdist inherit the cache of the process that starts them.
_MOST_WORKERS = 4  # bounds the memory that the suite takes
# With JAX_COMPILATION_CACHE_DIR set, later runs find the programs of this one.
_OWN_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if _OWN_CACHE:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(
    prefix="moh_jax_tests_"
  )
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_configure():
  # absltest's temporary directories read flags, which pytest does not parse.
  flags.FLAGS.mark_as_parsed()
  # On a busy machine "still ..." would come before the one line of an error.
  importlib.import_module("moh_jax.runtime.alive")._SECONDS = 3600.0


def pytest_collection_finish():
  # Modules stay: the garbage collector need not look at them again.
  gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def drop_compiled_programs():
  yield
  import jax  # not before the settings above

  jax.clear_caches()


def pytest_xdist_auto_num_workers(config):
  """Answers `-n auto`: workers for the whole suite, none for a part of it.

  A worker starts slowly and compiles what its own tests need, which pays only
  where there is much to do. `-n 2` asks for workers in any case.
  """
  tests = pathlib.Path(__file__).parent
  paths = [pathlib.Path(arg.partition("::")[0]) for arg in config.args]
  asked = {(config.invocation_params.dir / path).resolve() for path in paths}
  if not asked & {tests, tests.parent} or config.option.keyword:
    return 0
  return min(os.cpu_count() or 1, _MOST_WORKERS)


def pytest_unconfigure():
  if _OWN_CACHE:
    shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
