"""Processes that are about to do different things are told so."""

import sys

from absl.testing import absltest

from moh_jax.runtime import cluster, peers
from tests import two_processes

_CHILD = """
import sys
sys.path.insert(0, ".")
from tests.runtime import agreement_test
agreement_test.compare()
"""


def compare() -> None:
  """What both processes do: agree, then differ; prints what was said."""
  cluster.join(cluster.given_place(None, None, None))
  import jax

  index = jax.process_index()
  peers.agree({"config": {"seed": 3, "tags": ["a"]}})
  peers.agree({"config": {"seed": 4}})
  try:
    peers.agree({"config": {"seed": index, "same": 1}, "steps": [2][index:]})
  except ValueError as error:
    print(error)
  sys.stdout.flush()


class AgreementTest(absltest.TestCase):
  def test_one_process_agrees_with_itself(self):
    peers.agree({"config": {"seed": 1}})

  def test_what_differs_is_named_in_all_processes(self):
    said = two_processes.call("-c", _CHILD)
    self.assertEqual(
      said,
      [
        "the 2 processes of the run differ: config.seed: 0 in process 0, 1 in "
        "process 1; steps: [2] in process 0, [] in process 1\n"
      ]
      * 2,
    )

  def test_many_differences_are_counted(self):
    told = [{f"f{i}": 0 for i in range(9)}, {f"f{i}": 1 for i in range(9)}]
    self.assertRegex(peers._differences(told), "f4: .*; and 4 more$")


if __name__ == "__main__":
  absltest.main()
