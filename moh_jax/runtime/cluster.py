"""How a process joins the others of its run; importable without JAX."""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

JOIN_SECONDS = 12  # that the coordinator has to answer in
_ALL_SECONDS = 300  # that all processes have to come in, once one is there
_SPARE_SECONDS = 30  # after which JAX would end the process itself
_RETRY_SECONDS = 0.5
VARIABLES = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


class Place(NamedTuple):
  """The place of a process in its run; JAX finds out what is None.

  Attributes:
    coordinator: HOST:PORT at which the first process listens.
    count: number of processes.
    index: number of this process, 0 for the first.
  """

  coordinator: str | None = None
  count: int | None = None
  index: int | None = None


def given_place() -> Place:
  """The place that JAX's environment variables say.

  Raises:
    ValueError: a value is none of those allowed.
  """
  address, *numbers = (os.environ.get(name) for name in VARIABLES)
  if address:
    _host_and_port(address)
  for name, text in zip(VARIABLES[1:], numbers):
    if text and not re.fullmatch("-?[0-9]{1,9}", text):
      raise ValueError(f"{name}={text!r} must be a whole number")
  count, index = (int(text) if text else None for text in numbers)
  _, count_name, index_name = VARIABLES
  if count is not None and count < 1:
    raise ValueError(f"{count_name}={count} must be at least 1")
  if index is not None and not 0 <= index < (count or 1 << 31):
    raise ValueError(
      f"{index_name}={index} must be at least 0 and below {count_name}={count}"
    )
  return Place(address or None, count, index)


def join(place: Place, seconds: float = JOIN_SECONDS) -> None:
  """Connects this process to the others; JAX must not have been used before.

  Args:
    place: of this process. TPU pods, Slurm, Open MPI and Kubernetes tell JAX
      what it leaves out.
    seconds: that the first process has to begin to listen in.

  Raises:
    ValueError: the place is not known.
    OSError: the first process cannot be reached.
  """
  import jax

  try:
    place = _completed(place, seconds)
    if place.index:
      _reach(place, seconds)
    limit = max(_ALL_SECONDS, int(seconds))
    with _ended_after(limit, place):
      jax.distributed.initialize(
        place.coordinator,
        place.count,
        place.index,
        initialization_timeout=limit + _SPARE_SECONDS,
      )
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f"--distributed: {error}; outside TPU pods, Slurm, Open MPI and "
      f"Kubernetes set {', '.join(VARIABLES)}"
    ) from error


@contextlib.contextmanager
def _ended_after(seconds: float, place: Place) -> Iterator[None]:
  """Context that ends this process with one line if it lasts too long.

  JAX's C++ code would wait for processes that do not come, and then abort with
  a stack of its own; no exception reaches Python.
  """

  def end() -> None:
    print(
      f"error: --distributed: the {place.count or 'other'} processes of the "
      f"run were not all at process 0 ({place.coordinator or 'its host'}) "
      f"within {seconds:g} s; start the others, or give more time with "
      "--join-seconds",
      file=sys.stderr,
      flush=True,
    )
    os._exit(2)

  timer = threading.Timer(seconds, end)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def _completed(place: Place, seconds: float) -> Place:
  """Adds what JAX reads from the cluster's own environment."""
  try:
    # JAX has no public function for it; without it, only JAX checks.
    from jax._src.clusters import ClusterEnv

    detect = ClusterEnv.auto_detect_unset_distributed_params
  except (ImportError, AttributeError):
    return place
  # An empty list: which devices are this process's own is left to JAX.
  found = detect(*place, [], None, int(seconds))
  return Place(*found[:3])


def _reach(place: Place, seconds: float) -> None:
  """Waits until something listens where the first process should.

  Without it JAX's C++ code would wait for minutes, and then abort.
  """
  deadline = time.monotonic() + seconds
  while True:
    left = deadline - time.monotonic()
    try:
      address = _host_and_port(place.coordinator)
      socket.create_connection(address, max(left, _RETRY_SECONDS)).close()
      return
    except OSError as error:
      if time.monotonic() + _RETRY_SECONDS > deadline:
        raise OSError(
          f"--distributed: process {place.index} of {place.count} cannot reach "
          f"process 0 at {place.coordinator} within {seconds:g} s: {error}; "
          "start process 0 there, open the port, or give it more time with "
          "--join-seconds"
        ) from error
    time.sleep(_RETRY_SECONDS)


def _host_and_port(address: str) -> tuple[str, int]:
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
    raise ValueError(
      f"{VARIABLES[0]}={address!r} must be HOST:PORT, with a port of 1 to 65535"
    )
  return host.strip("[]"), int(port)
