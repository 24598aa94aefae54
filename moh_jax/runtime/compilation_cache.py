"""Compiled programs on disk, so that the second call of a command starts soon.

JAX writes and reads them; this module says where, and how much. Importable
without JAX.
"""

import hashlib
import logging
import os
import pathlib
import platform

VARIABLE = "MOH_JAX_COMPILATION_CACHE"
_OPTIONS = {
  "jax_compilation_cache_max_size": 1 << 30,  # bytes; the oldest use goes first
  # A command compiles dozens of small programs too.
  "jax_persistent_cache_min_compile_time_secs": 0.1,
}
_LOG = logging.getLogger(__name__)


def enable() -> None:
  """Makes JAX keep compiled programs, before it has compiled the first one.

  A cache that the user gave JAX itself (JAX_COMPILATION_CACHE_DIR) stays, and
  so do JAX's other variables. MOH_JAX_COMPILATION_CACHE=off keeps none.
  Where the folder cannot be used, a warning says so and programs are compiled
  as without it.
  """
  import jax

  if jax.config.jax_compilation_cache_dir or os.environ.get(VARIABLE) == "off":
    return
  path = folder()
  try:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds programs
  except OSError as error:
    _LOG.warning("compiled programs are not kept: %s: %s", path, error)
    return
  jax.config.update("jax_compilation_cache_dir", str(path))
  for name, value in _OPTIONS.items():
    if name.upper() not in os.environ:
      jax.config.update(name, value)


def folder() -> pathlib.Path:
  """The folder of this machine's programs, given or in the user's cache."""
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  given = os.environ.get(VARIABLE) or os.path.join(base, "moh_jax", "xla")
  return pathlib.Path(given).expanduser().absolute() / _machine()


def _machine() -> str:
  """A name for machines that can run one another's programs.

  Homes are shared between machines, and a program may use instructions that
  another processor lacks.
  """
  processor = platform.processor()
  cpus = pathlib.Path("/proc/cpuinfo")
  if cpus.exists():
    lines = cpus.read_text().splitlines()
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    processor = flags[0] if flags else processor
  digest = hashlib.sha256(processor.encode()).hexdigest()[:8]
  return f"{platform.machine()}-{digest}"
