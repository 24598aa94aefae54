"""The program of a run: that of training and of `plan` is the same."""

import jax
from absl.testing import absltest, parameterized

from moh_jax.config import get_family
from moh_jax.runtime import sharding
from moh_jax.training.program import make_program
from tests.training import tiny

_RUNS = {"vit": tiny.config, "dit": tiny.dit_config, "llm": tiny.llm_config}


def _shapes(tree):
  return jax.tree.map(lambda x: (x.shape, str(x.dtype)), tree)


class ProgramTest(parameterized.TestCase):
  @parameterized.parameters(*_RUNS)
  def test_the_abstract_batch_is_that_of_the_data(self, family):
    run = _RUNS[family](mesh=tiny.MESH)
    mesh = sharding.make_mesh(run.mesh)
    task = tiny.make_task(run)
    batch = sharding.shard_batch(next(task.batches(mesh)), mesh)
    abstract = make_program(run, task, mesh).batch
    self.assertEqual(_shapes(abstract), _shapes(batch))
    for name, array in batch.items():
      self.assertEqual(abstract[name].sharding, array.sharding)

  @parameterized.parameters(*_RUNS)
  def test_abstract_devices_split_as_devices_do(self, family):
    run = _RUNS[family](mesh=tiny.MESH)
    mesh = sharding.make_mesh(run.mesh)
    objective = get_family(family).tasks().make_objective(run)
    real = make_program(run, objective, mesh)
    planned = make_program(run, objective, mesh.abstract_mesh)

    def specs(tree):
      return jax.tree.map(lambda x: (x.shape, x.sharding.spec), tree)

    self.assertEqual(specs(planned.state), specs(real.state))
    self.assertEqual(specs(planned.batch), specs(real.batch))


if __name__ == "__main__":
  absltest.main()
