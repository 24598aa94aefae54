"""The program of a run: that of training and of `plan` is the same."""

import dataclasses

import jax
from absl.testing import absltest, parameterized

from moh_jax.config import ClassifierConfig
from moh_jax.runtime import sharding
from moh_jax.training.entrance import check_mixed_images
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder
from tests.runtime.sharding_test import two_slices
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
    objective = task_builder(run).make_objective(run)
    real = make_program(run, objective, mesh)
    planned = make_program(run, objective, mesh.abstract_mesh)

    def specs(tree):
      return jax.tree.map(lambda x: (x.shape, x.sharding.spec), tree)

    self.assertEqual(specs(planned.state), specs(real.state))
    self.assertEqual(specs(planned.batch), specs(real.batch))

  def test_slices_mix_images_of_a_device_which_needs_two(self):
    run = tiny.config(mesh={"dcn_data": 2, "data": 4}, data={"batch_size": 32})
    with two_slices():
      mesh = sharding.make_mesh(run.mesh)
    check_mixed_images(run, mesh)
    parts = {"optim": {"accumulation": 4}}
    alone = tiny.config(
      mesh={"dcn_data": 2, "data": 4}, data={"batch_size": 32}, **parts
    )
    with self.assertRaisesRegex(ValueError, "data.batch_size=32 .* it is 1: "):
      check_mixed_images(alone, mesh)
    off = {"mixup": 0.0, "cutmix": 0.0}
    check_mixed_images(
      dataclasses.replace(alone, classifier=ClassifierConfig(**off)), mesh
    )


if __name__ == "__main__":
  absltest.main()
