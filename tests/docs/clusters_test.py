"""The scripts and files of docs/clusters.md: their syntax, and our commands."""

import re
import shlex
import subprocess

import pytest
import yaml

from tests.docs import blocks
from tests.docs.commands_test import _check

_PAGE = (blocks.ROOT / "docs/clusters.md").read_text()


def _fenced(language):
  found = re.findall(rf"^```{language}\n(.*?)^```", _PAGE, re.DOTALL | re.M)
  assert found
  return found


def _check_command(text):
  """Parses the command of ours that a text ends with."""
  _, found, arguments = text.partition("python -m moh_jax ")
  assert found, text
  arguments = arguments.partition(" > ")[0]  # a log
  words = shlex.split(arguments.replace("$JOB_COMPLETION_INDEX", "1"))
  _check(*words)


@pytest.fixture(autouse=True)
def _root(monkeypatch):
  monkeypatch.chdir(blocks.ROOT)


@pytest.mark.parametrize("script", _fenced("bash"), ids=range(9))
def test_scripts_of_shells(script):
  subprocess.run(["bash", "-n"], input=script, check=True, text=True)
  for line in script.splitlines():
    quoted = re.search(r"--command='([^']*)'", line)
    command = quoted[1] if quoted else line
    subprocess.run(["bash", "-n"], input=command, check=True, text=True)
    if "python -m moh_jax" in command:
      _check_command(command)


@pytest.mark.parametrize("text", _fenced("yaml"), ids=range(2))
def test_job_sets(text):
  made = yaml.safe_load(text)
  assert made["kind"] == "JobSet"
  (job,) = made["spec"]["replicatedJobs"]
  spec = job["template"]["spec"]
  (container,) = spec["template"]["spec"]["containers"]
  assert spec["parallelism"] == spec["completions"]
  command = container["command"][-1]
  subprocess.run(["bash", "-n"], input=command, check=True, text=True)
  _check_command(command)
  if "JAX_COORDINATOR_ADDRESS" in command:
    first = f"{made['metadata']['name']}-{job['name']}-0-0"
    port = container["ports"][0]["containerPort"]
    host = f"JAX_COORDINATOR_ADDRESS={first}.{made['metadata']['name']}:{port}"
    assert host in command.split()
    assert f"JAX_NUM_PROCESSES={spec['completions']}" in command.split()


if __name__ == "__main__":
  pytest.main([__file__])
