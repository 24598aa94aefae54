"""What one process of a run finds out and all of them must know."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils


def ask_first_process(
  question: Callable[[], Sequence[int]], length: int
) -> list[int]:
  """What the first process finds on its disk; its error stops all of them.

  Args:
    question: called by the first process alone.
    length: number of answers, each an int32.

  Raises:
    ValueError: the first process met an error; there, it is that one.
    OSError: on the first process, what `question` raised.
  """
  error, answer = None, [0] * length
  if jax.process_index() == 0:
    try:
      answer = question()
    except (ValueError, OSError) as caught:
      error = caught
  told = np.array([error is not None, *answer], np.int32)
  told = multihost_utils.broadcast_one_to_all(told)
  if error is not None:
    raise error
  if told[0]:
    raise ValueError("the first process stopped with an error, see there")
  return [int(number) for number in told[1:]]
