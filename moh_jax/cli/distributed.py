"""Options of commands that run as several processes; importable without JAX."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from moh_jax.runtime import cluster, steps


def add_distributed(parser: argparse.ArgumentParser) -> None:
  """Adds --distributed and where the processes find one another; see `join`."""
  parser.add_argument(
    "--distributed",
    action="store_true",
    help="join the other processes of the run; the first one prints. JAX finds "
    "them on TPU pods, Slurm, Open MPI and Kubernetes; elsewhere give the next "
    "three, or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID",
  )
  parser.add_argument(
    "--join-seconds",
    type=int,
    default=cluster.JOIN_SECONDS,
    metavar="N",
    help="how long process 0 may take to listen, before the others give up "
    f"(default: {cluster.JOIN_SECONDS}); a cluster that starts its hosts one "
    "by one needs more",
  )


def check_given(args: argparse.Namespace) -> None:
  """Checks the options of `add_distributed` and completes --distributed.

  Raises:
    ValueError: a value is not allowed, or is not used.
  """
  given = vars(args)
  if "distributed" not in given:
    return
  if args.join_seconds < 1:
    raise ValueError(f"--join-seconds={args.join_seconds} must be at least 1")
  if args.distributed:
    args.place = cluster.given_place()


def join(args: argparse.Namespace) -> bool:
  """Connects this process to the others of its run if --distributed asks.

  JAX allows it only before its first use.

  Returns:
    Whether this is the first process, which prints and writes the results.

  Raises:
    ValueError: the cluster is none that JAX recognizes, and it is described
      neither by options nor by the environment; or the processes differ in
      their versions, options or checkpoints.
    OSError: the first process cannot be reached, or another one does not come.
  """
  import jax

  from moh_jax.runtime.peers import agree

  if args.distributed:
    cluster.join(args.place, args.join_seconds)
    agree(_compared(vars(args)))
  return jax.process_index() == 0


def _compared(given: Mapping[str, Any]) -> dict[str, Any]:
  """The options in which processes must not differ, and the checkpoint.

  Training compares its config later, complete with what its data tell.
  """
  own = ("config", "place", "coordinator", "process_id", "join_seconds", "json")
  options = {name: given[name] for name in given if name not in own}
  values: dict[str, Any] = {
    "options": json.loads(json.dumps(options, default=str))
  }
  checkpoint = given.get("checkpoint")
  if checkpoint and given.get("step") is None:
    values["newest checkpoint"] = steps.list_steps(checkpoint)[-1:]
  return values
