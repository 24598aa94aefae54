"""Joining the other processes of a run."""

import os

import jax


def join_processes() -> None:
  """Connects this process to the others of its run.

  Raises:
    ValueError: the cluster is none that JAX recognizes and the environment does
      not describe it either.
  """
  names = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
  given = {
    key: int(os.environ[name])
    for key, name in names.items()
    if name in os.environ
  }
  try:
    jax.distributed.initialize(**given)  # the address is read by JAX itself
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f"--distributed: {error}; outside TPU pods, Slurm, Open MPI and "
      f"Kubernetes set JAX_COORDINATOR_ADDRESS, {' and '.join(names.values())}"
    ) from error
