"""Runs over eight fake devices: losses, work, memory and communication.

Each mesh of `meshes.MESHES` for each family takes minutes: `pytest -m slow`.
One of them is compiled in the ordinary suite.
"""

import functools
import math

import numpy as np
import pytest
from absl.testing import parameterized

from tests.training import meshes, products, tiny


@functools.cache
def _losses_of_one_device(family):
  return meshes.losses(meshes.config_of(family))


@functools.cache
def _flops_of_one_device(family):
  return products.dot_flops(meshes.compiled_step(meshes.config_of(family))[0])


class _CompiledTest(parameterized.TestCase):
  def _check(self, family, name):
    config = meshes.config_of(family, mesh=meshes.MESHES[name])
    text, mesh = meshes.compiled_step(config)
    ratio = 8 * products.dot_flops(text) / _flops_of_one_device(family)
    self.assertBetween(ratio, 0.95, 1.05)
    if not meshes.GOLDEN.exists():
      self.skipTest(f"{meshes.GOLDEN.name} is not recorded")
    self.assertEqual(
      meshes.exchanges(text, mesh),
      meshes.recorded(family, name),
      "if it should be so: python -m tests.tools.record_collectives",
    )


class FsdpTest(_CompiledTest):
  def test_devices_share_the_work_and_exchange_what_is_expected(self):
    self._check("llm", "2,4")

  def test_no_device_has_the_output_layer_or_its_gradient_whole(self):
    vocab, width = meshes.VOCAB, meshes.WIDTH
    for tied in (False, True):
      model = {**meshes.MODELS["llm"], "tie_embeddings": tied}
      config = tiny.llm_config(
        model=model,
        mesh={"data": 2, "fsdp": 4},
        optim={"accumulation": 2},
        data={"batch_size": 16},
      )
      text, _ = meshes.compiled_step(config)
      whole = {
        shape
        for dtype in ("f32", "bf16")
        for shape in products.shapes(text, dtype)
        if math.prod(shape) >= vocab * width and vocab in shape
      }
      self.assertEmpty(whole)
      self.assertIn((width, vocab // 4), products.shapes(text))


@pytest.mark.slow
class EveryMeshTest(_CompiledTest):
  @parameterized.product(family=tuple(meshes.MODELS), mesh=tuple(meshes.MESHES))
  def test_devices_share_the_work_and_exchange_what_is_expected(
    self, family, mesh
  ):
    self._check(family, mesh)


@pytest.mark.slow
class LossesTest(parameterized.TestCase):
  @parameterized.product(
    family=tuple(meshes.MODELS),
    mesh=tuple(meshes.MESHES),
    form=("dense", "packed"),
  )
  def test_five_steps_equal_those_of_one_device(self, family, mesh, form):
    if family == "vit" and form == "packed":
      self.skipTest("ViT's forms compute every head")
    config = meshes.config_of(family, form, mesh=meshes.MESHES[mesh])
    one = _losses_of_one_device(family)
    np.testing.assert_allclose(meshes.losses(config), one, rtol=1e-5)
