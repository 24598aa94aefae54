"""Tests of the memory that threads share while they decode."""

import threading

from absl.testing import absltest

from moh_jax.data import decoding_memory


def _wait(thread, seconds=0.2):
  thread.join(seconds)
  return not thread.is_alive()


class MemoryBudgetTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.budget = decoding_memory.MemoryBudget(10)

  def _thread(self, size):
    def take():
      with self.budget.reserved(size):
        pass

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread

  def test_threads_wait_while_it_is_spent(self):
    with self.budget.reserved(6):
      self.assertTrue(_wait(self._thread(4), 60))
      waiting = self._thread(5)
      self.assertFalse(_wait(waiting))
    self.assertTrue(_wait(waiting, 60))

  def test_what_is_too_large_goes_alone(self):
    with self.budget.reserved(1):
      waiting = self._thread(11)
      self.assertFalse(_wait(waiting))
    self.assertTrue(_wait(waiting, 60))

  def test_is_kept_until_the_block_ends(self):
    with self.budget.held():
      with self.budget.reserved(3):
        pass
      with self.budget.reserved(3):  # its own does not count against it
        pass
      self.assertTrue(_wait(self._thread(4), 60))
      waiting = self._thread(5)
      self.assertFalse(_wait(waiting))
    self.assertTrue(_wait(waiting, 60))
    self.assertTrue(_wait(self._thread(10), 60))

  def test_what_came_later_waits_for_what_is_large(self):
    with self.budget.reserved(1):
      large = self._thread(10)
      self.assertFalse(_wait(large))
      small = self._thread(1)
      self.assertFalse(_wait(small))
    self.assertTrue(_wait(large, 60) and _wait(small, 60))

  def test_a_thread_never_waits_for_itself(self):
    with self.budget.reserved(8), self.budget.reserved(8):
      waiting = self._thread(1)
      self.assertFalse(_wait(waiting))
    self.assertTrue(_wait(waiting, 60))

  def test_errors_give_it_back(self):
    with self.assertRaises(ValueError), self.budget.held():
      with self.budget.reserved(10):
        raise ValueError
    self.assertTrue(_wait(self._thread(10), 60))


if __name__ == "__main__":
  absltest.main()
