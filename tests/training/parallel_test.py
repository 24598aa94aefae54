"""Runs over eight fake devices: losses, work, memory and communication.

Each mesh of `_MESHES` for each family takes minutes: `pytest -m slow`. One of
them is compiled in the ordinary suite.
"""

import contextlib
import functools
import math

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax.runtime import sharding
from moh_jax.training.program import make_program
from tests.runtime.slices_test import two_slices
from tests.training import collectives, tiny

_VOCAB, _WIDTH = 336, 64
_MODELS = {
  "llm": {
    "vocab_size": _VOCAB,
    "width": _WIDTH,
    "mlp_dim": 96,
    "num_heads": (8, 8),
    "num_kv_heads": 4,
    "shared_heads": (2, 2),
    "top_k": (3, 3),
    "loss_chunk": 8,
  },
  "dit": {
    "input_size": (24, 24),  # as large as one device has all logits at once
    "patch_size": 2,
    "width": 64,
    "num_heads": (8, 8),
    "head_dim": 8,
    "shared_heads": (2, 2),
    "top_k": (3, 3),
  },
  "vit": {
    "image_size": (16, 16),
    "embed_dims": (32, 64),
    "depths": (1, 1),
    "num_heads": (4, 8),
    "shared_heads": (2, 2),
    "top_k": (1, 3),
    "mlp_ratios": (4, 4),
    "sr_ratios": (2, 1),
    "drop_path": 0.0,
  },
}
_CONFIGS = {
  "llm": tiny.llm_config,
  "dit": tiny.dit_config,
  "vit": tiny.deterministic_config,
}
_MESHES = {
  "8": {"data": 8},
  "2,4": {"data": 2, "fsdp": 4},
  "2,2,2": {"data": 2, "fsdp": 2, "tensor": 2},
  "1,2,2,2": {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2},
  "2 slices": {"dcn_data": 2, "data": 1, "fsdp": 2, "tensor": 2},
}
# Exchanges that every family may have on a mesh: sums of gradients and of
# statistics over the batch, parameters and tokens gathered, heads dealt.
_ALLOWED = {
  "data": {"all-reduce"},
  "fsdp": {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"},
  "tensor": {"all-reduce", "all-gather", "all-to-all"},
  "sequence": {"all-reduce", "all-gather", "all-to-all", "collective-permute"},
}


def _config(family, form="dense", mesh=None, **sections):
  model = dict(_MODELS[family])
  if family != "vit":  # its forms compute every head
    model["attention_impl"] = form
  mesh = {"data": 1, "max_imbalance": 2.0, **(mesh or {})}
  return _CONFIGS[family](model=model, mesh=mesh, **sections)


def _mesh(config):
  """The config's mesh, of fake slices where it has some."""
  axes = (*config.mesh.AXES, "dcn_data")
  size = [getattr(config.mesh, axis) for axis in axes]
  devices = jax.devices()[: math.prod(size)]
  slices = config.mesh.dcn_data > 1
  with two_slices((0, 2, 4, 6)) if slices else contextlib.nullcontext():
    return sharding.make_mesh(config.mesh, devices)


def _losses(config):
  mesh, task, losses = _mesh(config), tiny.make_task(config), []
  program = make_program(config, task, mesh)
  with sharding.use_mesh(mesh):
    state, batches = program.init(), task.batches(mesh)
    for _ in range(5):
      batch = sharding.shard_batch(next(batches), mesh)
      state, metrics = program.step(state, batch)
      losses.append(float(metrics["loss"]))
  return losses


def _program(config):
  """Text of the compiled step, and its mesh."""
  mesh, task = _mesh(config), tiny.make_task(config)
  one = sharding.make_mesh(tiny.config().mesh, jax.devices()[:1])
  split = jax.NamedSharding(mesh, jax.P(sharding.BATCH_AXES))
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split),
    jax.tree.map(np.asarray, next(task.batches(one))),
  )
  program = make_program(config, task, mesh)
  with sharding.use_mesh(mesh):
    return program.step.lower(program.state, batch).compile().as_text(), mesh


@functools.cache
def _flops_of_one_device(family):
  return collectives.dot_flops(_program(_config(family))[0])


class _CompiledTest(parameterized.TestCase):
  def _check(self, family, axes):
    text, mesh = _program(_config(family, mesh=axes))
    ratio = 8 * collectives.dot_flops(text) / _flops_of_one_device(family)
    self.assertBetween(ratio, 0.95, 1.05)
    found = collectives.collectives(text, mesh)
    for kind, where, dtype in found:
      for axis in where.split("+"):
        self.assertIn(kind, _ALLOWED[axis], (kind, where, dtype))
      self.assertIn(dtype, ("f32", "s32", "pred"), (kind, where))
    crossing = {kind for kind, where, _ in found if "data" in where}
    self.assertLessEqual(crossing, {"all-reduce"})
    return found


class FsdpTest(_CompiledTest):
  def test_fsdp_exchanges_what_is_expected(self):
    self.assertEqual(
      self._check("llm", _MESHES["2,4"]),
      {
        ("all-gather", "fsdp", "f32"),  # parameters, tokens at both ends
        ("all-gather", "fsdp", "s32"),  # token numbers
        ("reduce-scatter", "fsdp", "f32"),  # vectors and their gradients
        ("all-reduce", "fsdp", "f32"),  # XLA for CPUs scatters no other sums
        ("all-reduce", "data", "f32"),
        ("all-reduce", "data+fsdp", "f32"),  # the batch's statistics
      },
    )

  def test_no_device_has_the_output_layer_or_its_gradient_whole(self):
    for tied in (False, True):
      model = {**_MODELS["llm"], "tie_embeddings": tied}
      config = tiny.llm_config(
        model=model,
        mesh={"data": 2, "fsdp": 4},
        optim={"accumulation": 2},
        data={"batch_size": 16},
      )
      text, _ = _program(config)
      whole = {
        shape
        for dtype in ("f32", "bf16")
        for shape in collectives.shapes(text, dtype)
        if math.prod(shape) >= _VOCAB * _WIDTH and _VOCAB in shape
      }
      self.assertEmpty(whole)
      self.assertIn((_WIDTH, _VOCAB // 4), collectives.shapes(text))


@pytest.mark.slow
class EveryMeshTest(_CompiledTest):
  @parameterized.product(family=("llm", "dit"), mesh=tuple(_MESHES))
  def test_devices_share_the_work_and_exchange_what_is_allowed(
    self, family, mesh
  ):
    self._check(family, _MESHES[mesh])


@functools.cache
def _losses_of_one_device(family):
  return _losses(_config(family))


@pytest.mark.slow
class LossesTest(parameterized.TestCase):
  @parameterized.product(
    family=tuple(_MODELS), mesh=tuple(_MESHES), form=("dense", "packed")
  )
  def test_five_steps_equal_those_of_one_device(self, family, mesh, form):
    if family == "vit" and form == "packed":
      self.skipTest("ViT's forms compute every head")
    losses = _losses(_config(family, form, mesh=_MESHES[mesh]))
    np.testing.assert_allclose(losses, _losses_of_one_device(family), rtol=1e-5)


if __name__ == "__main__":
  absltest.main()
