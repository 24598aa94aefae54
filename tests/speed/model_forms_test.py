"""The form that is named is the one that a layer gets."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.config import without_router
from moh_jax.data.infer import resolve
from moh_jax.ops import attention
from moh_jax.runtime.params import abstract_params, unbox
from moh_jax.speed import model_forms
from moh_jax.speed.options import bench_run, with_length
from moh_jax.training.task import task_builder
from tests.models import small_vit
from tests.training import tiny


def _run(model, batch, length=None):
  run = resolve(bench_run(model, batch))
  return with_length(run, length) if length else run


def _traced(run):
  """The cases that the layers of a step ask about."""
  objective = task_builder(run).make_objective(run)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((run.data.batch_size, *x.shape), x.dtype),
    objective.example,
  )
  args = unbox(abstract_params(objective.model, objective.inputs)), batch
  with _spied(attention) as choose:
    jax.eval_shape(objective.loss_fn, *args, jax.random.key(0), jnp.int32(0))
  return _cases(choose)


def _spied(module):
  return mock.patch.object(module, "choose_form", wraps=module.choose_form)


def _cases(choose):
  return {(call.args[0], call.args[1]) for call in choose.call_args_list}


class FormsTest(parameterized.TestCase):
  @parameterized.product(
    model=(tiny.DIT, small_vit.TWO_STAGES, tiny.LLM),
    form=("auto", "packed"),
    routed=(True, False),
  )
  def test_is_what_a_step_asks_for(self, model, form, routed):
    model = dataclasses.replace(model, attention_impl=form)
    model = model if routed else without_router(model)
    run = _run(model, 3, 8 if model.family == "llm" else None)
    with _spied(model_forms) as choose:
      model_forms.step_forms(run, {})
    self.assertEqual(_cases(choose), _traced(run))

  def test_devices_have_their_part_of_the_batch_and_the_heads(self):
    run = _run(tiny.LLM, 8, 8)
    optim = dataclasses.replace(run.optim, accumulation=2)
    run = dataclasses.replace(run, optim=optim)
    with _spied(model_forms) as choose:
      model_forms.step_forms(run, {"data": 2, "tensor": 2})
    ((_, case),) = _cases(choose)
    self.assertEqual((case.batch, case.num_heads), (2, 2))

  @parameterized.parameters(
    ("packed", 8, 0.75), ("auto", 8, 1.0), ("auto", 512, 0.75)
  )
  def test_the_share_is_that_of_the_heads_that_are_computed(
    self, form, length, share
  ):
    model = dataclasses.replace(tiny.LLM, attention_impl=form, max_length=512)
    run = _run(model, 1, length)
    name, found = model_forms.summary(run, model_forms.step_forms(run, {}))
    self.assertEqual(found, share)
    self.assertEqual(name, "packed" if share < 1 else "dense")


if __name__ == "__main__":
  absltest.main()
