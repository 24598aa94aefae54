"""Every example of README.md and docs/ works.

The default suite checks the options and configs of all; `pytest -m integration`
runs examples with small stand-ins. `pytest -m slow` runs examples as they
stand, in one folder, page after page: about an hour on two cores. Of the
scripts of docs/clusters.md and the job sets of docs/examples/ the syntax and
our commands are checked.
"""

import argparse
import contextlib
import importlib
import io
import os
import pathlib
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest
import yaml

from moh_jax.cli import command, flags, main
from tests.cli import tiny_checkpoint
from tests.docs import blocks, stand_ins

BLOCKS = blocks.all_blocks()
RUN = [block for block in BLOCKS if block.mode == "run"]
CHECKED = [
  block for block in BLOCKS if block.language == "sh" and block.mode != "none"
]
SLOW = [block for block in BLOCKS if block.mode in ("run", "slow")]


class _ParsedError(Exception):
  """A module's arguments are parsed; it need not go on."""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
  """A folder where examples run as they stand."""
  return stand_ins.lay_out(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  """A folder where examples run with stand-ins."""
  folder = stand_ins.lay_out(tmp_path_factory.mktemp("examples"))
  stand_ins.add_runs(folder)
  return folder


@pytest.mark.parametrize("block", CHECKED, ids=str)
def test_options_and_configs_are_valid(block, small, monkeypatch):
  monkeypatch.chdir(small)
  for one in blocks.commands(block.code):
    if one.module == "moh_jax":
      _check(*one.arguments)
    elif one.module not in ("pytest", "tests.parity"):  # have no parser
      _check_module(one, monkeypatch)


@pytest.mark.integration
@pytest.mark.parametrize("block", RUN, ids=str)
def test_runs_with_stand_ins(block, small, monkeypatch):
  monkeypatch.chdir(small)
  if block.language == "python":
    _run_python(block)
    return
  for one in blocks.commands(block.code):
    for name, value in one.environment.items():
      monkeypatch.setenv(name, value)
    assert one.module == "moh_jax", f"{block}: mark it as slow"
    status, out, err = tiny_checkpoint.call(*one.arguments)
    assert status == 0, f"{one}: {err}"
    assert out.strip(), f"{one} printed nothing"


@pytest.mark.slow
@pytest.mark.parametrize("block", SLOW, ids=str)
def test_runs_as_it_stands(block, real):
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  python = pathlib.Path(sys.executable).parent
  environment["PATH"] = f"{python}:{environment['PATH']}"
  argv = [sys.executable, "-c", block.code]
  if block.language == "sh":
    lines = [n for n in block.code.splitlines() if not n.startswith(". ")]
    argv = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
  done = subprocess.run(
    argv, cwd=real, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_every_command_has_an_example():
  shown = {
    argument
    for block in CHECKED
    for one in blocks.commands(block.code)
    if one.module == "moh_jax"
    for argument in one.arguments
  }
  assert shown >= set(main.COMMANDS)


def _check(name, *arguments):
  """Parses a command's options and loads its config; its inputs may lack."""
  while name == "--import":
    module, name, *arguments = arguments
    importlib.import_module(module)
  with mock.patch.object(command.Path, "refusal", lambda *_: ""):
    given, _ = main.parsed(name, arguments)
  if getattr(given, "config", None):
    try:
      _ = given.loaded
    except FileNotFoundError as error:  # the model is that of a checkpoint
      assert "holds no checkpoint" in str(error), error


def _check_module(one, monkeypatch):
  """Parses the options of a module that has a function main."""

  def stop_after(parse):
    def stopped(*args):
      parse(*args)
      raise _ParsedError

    return stopped

  parser = argparse.ArgumentParser
  with monkeypatch.context() as patch, pytest.raises(_ParsedError):
    patch.setattr(sys, "argv", [one.module, *one.arguments])
    patch.setattr(parser, "parse_args", stop_after(parser.parse_args))
    patch.setattr(flags, "parse", stop_after(flags.parse))
    module = importlib.import_module(one.module)
    if not hasattr(module, "main"):  # a package
      module = importlib.import_module(f"{one.module}.__main__")
    module.main()


def _run_python(block):
  code = compile(block.code, str(block), "exec")
  with contextlib.redirect_stdout(io.StringIO()):
    exec(code, {"__name__": "__main__"})


def _scripts():
  """Scripts of docs/clusters.md."""
  page = (blocks.ROOT / "docs/clusters.md").read_text()
  return re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.M)


def _check_script(text):
  """Parses a script of the shell, and our command that it ends with."""
  subprocess.run(["bash", "-n"], input=text, check=True, text=True)
  _, found, arguments = text.partition("python -m moh_jax ")
  if found:
    arguments = arguments.partition(" > ")[0]  # a log
    words = shlex.split(arguments.replace("$JOB_COMPLETION_INDEX", "1"))
    _check(*words)


@pytest.mark.parametrize("script", _scripts(), ids=range(8))
def test_scripts_of_shells(script):
  subprocess.run(["bash", "-n"], input=script, check=True, text=True)
  for line in script.splitlines():
    quoted = re.search(r"--command='([^']*)'", line)
    _check_script(quoted[1] if quoted else line)


@pytest.mark.parametrize("devices", ["gpu", "tpu"])
def test_job_sets(devices):
  file = blocks.ROOT / f"docs/examples/jobset_{devices}.yaml"
  made = yaml.safe_load(file.read_text())
  assert made["kind"] == "JobSet"
  (job,) = made["spec"]["replicatedJobs"]
  spec = job["template"]["spec"]
  (container,) = spec["template"]["spec"]["containers"]
  assert spec["parallelism"] == spec["completions"]
  command = container["command"][-1]
  assert "python -m moh_jax " in command
  _check_script(command)
  if "JAX_COORDINATOR_ADDRESS" in command:
    first = f"{made['metadata']['name']}-{job['name']}-0-0"
    port = container["ports"][0]["containerPort"]
    host = f"JAX_COORDINATOR_ADDRESS={first}.{made['metadata']['name']}:{port}"
    assert host in command.split()
    assert f"JAX_NUM_PROCESSES={spec['completions']}" in command.split()
