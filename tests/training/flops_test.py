"""FLOPs of steps against figures of the papers and by hand; forms; peaks."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import parameterized

from moh_jax import config as config_lib
from moh_jax.cli.bench import bench_run
from moh_jax.config import without_router
from moh_jax.data.infer import resolve
from moh_jax.ops import attention
from moh_jax.runtime.sharding import abstract_params, unbox
from moh_jax.training import flops
from moh_jax.training.task import task_builder
from tests.models import small
from tests.training import tiny


def _run(model, batch=1, length=None):
  run = resolve(bench_run(model, batch))
  return config_lib.apply_overrides(
    run, "data", **({"sequence_length": length} if length else {})
  )


def _flops(*args):
  return flops.step_flops(_run(*args)).active


class PublishedPeakTest(parameterized.TestCase):
  def test_is_that_of_the_kind(self):
    for kind, expected in {
      "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12,
      "NVIDIA A100-SXM4-40GB": 312e12, "A100-SXM-80GB": 312e12,
      "NVIDIA H200": 989e12, "NVIDIA H200 NVL": 835e12,
      "NVIDIA GeForce RTX 4090": 165.2e12, "TPU v5 lite": 197e12,
      "TPU v5": 459e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12,
      "TPU v4": 275e12, "TPU7x": 1153.5e12,
    }.items():  # fmt: skip
      self.assertEqual(flops.published_peak(kind), expected, kind)
    # Other devices whose names hold one of the table, and a part of one.
    for kind in (
      "cpu", "NVIDIA RTX A1000", "NVIDIA A100X", "NVIDIA GB200",
      "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D",
      "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM2e",
      "NVIDIA A100-SXM-64GB", "NVIDIA A100-4-20C", "AMD Instinct MI300X",
      "TPU v4 lite",
    ):  # fmt: skip
      self.assertIsNone(flops.published_peak(kind), kind)


class TrainFlopsTest(parameterized.TestCase):
  @parameterized.parameters(
    # Multiplications and additions of a forward pass, in 1e9: arXiv:2212.09748
    # and 2311.17132; the window's products of the latter are not counted.
    ("dit-xl2", 118.6, 0.001),
    ("transnext-base", 18.4, 0.03),
  )
  @pytest.mark.integration
  def test_published_figures(self, name, expected, tolerance):
    found = _flops(config_lib.released_model(name)) / 3 / 2 / 1e9
    self.assertAlmostEqual(found, expected, delta=expected * tolerance)

  @parameterized.parameters(("packed", 0.75), ("blocked", 1), ("dense", 1))
  def test_language_model_by_hand(self, name, heads):
    model = dataclasses.replace(tiny.LLM, loss_chunk=4)
    batch, length = 2, 16
    tokens, seen = batch * length, (length + 1) / 2
    # Of 4 heads 3 are active; 2 have keys and values.
    projection = 2 * model.width * model.head_dim
    layer = projection * (2 * 3 + 2 * 2)
    layer += 2 * model.width * model.mlp_dim * 3
    # Scores of three routed heads and of two groups.
    layer += 2 * model.width * (3 + 2)
    products = 2 * layer + 2 * model.width * model.vocab_size
    keys = 2 * 4 * model.head_dim  # two layers, for each head and key
    step = flops.step_flops(_run(model, batch, length))
    self.assertEqual(step.active, 3 * tokens * (products + 3 * seen * keys))
    more = 2 * length / (length + 1) if name == "dense" else 1.0
    found = step.computed([flops.LayerForm(name, heads, more)])
    idle = 2 * projection * 2  # the fourth head's queries and outputs
    self.assertEqual(found["products"], 3 * tokens * (products + idle))
    computed = heads * 4 * (length if name == "dense" else seen) * keys
    self.assertEqual(found["attention"], 3 * tokens * computed)


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
  @parameterized.parameters(
    (tiny.DIT, "packed"), (small.TWO_STAGES, "auto"), (tiny.LLM, "packed"),
    (without_router(tiny.LLM), "auto"),
  )  # fmt: skip
  def test_is_what_a_step_asks_for(self, model, form):
    model = dataclasses.replace(model, attention_impl=form)
    run = _run(model, 3, 8 if model.family == "llm" else None)
    with _spied(flops) as choose:
      flops.step_forms(run, {})
    self.assertEqual(_cases(choose), _traced(run))

  def test_devices_have_their_part_of_the_batch_and_the_heads(self):
    run = _run(tiny.LLM, 8, 8)
    optim = dataclasses.replace(run.optim, accumulation=2)
    run = dataclasses.replace(run, optim=optim)
    with _spied(flops) as choose:
      flops.step_forms(run, {"data": 2, "tensor": 2})
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
    name, found = flops.form_summary(run, flops.step_forms(run, {}))
    self.assertEqual(found, share)
    self.assertEqual(name, "packed" if share < 1 else "dense")
