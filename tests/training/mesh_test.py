"""Training over a 2 x 2 x 2 mesh of fake devices equals one device."""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moh_jax.config import Config, MeshConfig
from moh_jax.inference.restore import restore
from moh_jax.layers.partitioning import constrain
from moh_jax.models.registry import released_model
from moh_jax.ops import head_layout
from moh_jax.runtime import sharding
from moh_jax.training.feed import Feed
from moh_jax.training.step import make_program
from moh_jax.training.train import train
from tests.training import tiny
from tests.training.tiny import make_task

_MESH = tiny.MESH
_dit_config = functools.partial(tiny.dit_config, model=tiny.ALIKE["dit"])


def _losses(workdir: str) -> list[float]:
  with open(os.path.join(workdir, "metrics.jsonl")) as stream:
    rows = [json.loads(line) for line in stream]
  return [row["loss"] for row in rows if row["split"] == "train"]


@contextlib.contextmanager
def _fresh_compiler_log() -> Iterator[list[str]]:
  """Collects what XLA writes to stderr, with every program compiled anew."""
  log: list[str] = []
  before, cached = os.dup(2), jax.config.jax_enable_compilation_cache
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
      yield log
    finally:
      jax.config.update("jax_enable_compilation_cache", cached)
      os.dup2(before, 2)
      os.close(before)
      file.seek(0)
      log += file.read().decode(errors="replace").splitlines()


class _Runs:
  """A run on one device and the same over the mesh."""

  make_config: Callable[..., Config]
  watch = staticmethod(contextlib.nullcontext)  # of the run over the mesh

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.one_dir, cls.mesh_dir = (
      cls.create_tempdir(cls()).full_path for _ in range(2)
    )
    one = jax.devices()[:1]
    cls.one = train(cls.make_config(), cls.one_dir, devices=one)
    with cls.watch() as cls.log:
      cls.on_mesh = train(cls.make_config(mesh=_MESH), cls.mesh_dir)

  def test_losses_equal_the_single_device_ones(self):
    np.testing.assert_allclose(
      _losses(self.mesh_dir), _losses(self.one_dir), rtol=2e-5
    )
    self.assertLen(_losses(self.mesh_dir), 4)

  def test_held_out_figures_equal_the_single_device_ones(self):
    ours, theirs = self.on_mesh.evaluation, self.one.evaluation
    self.assertEqual(ours.keys(), theirs.keys())
    for name, value in ours.items():
      np.testing.assert_allclose(value, theirs[name], rtol=1e-4, err_msg=name)

  def test_mesh_checkpoint_restores_on_one_device(self):
    restored = restore(self.mesh_dir)
    for leaf in jax.tree.leaves(restored.params):
      self.assertLen(leaf.sharding.device_set, 1)
    state = self.on_mesh.state
    chex.assert_trees_all_equal(
      jax.device_get(restored.params),
      jax.device_get(state.params if state.ema is None else state.ema),
    )


@pytest.mark.slow
class DiffusionMeshTest(_Runs, absltest.TestCase):
  """Noise, timesteps and dropped labels are those of one device too."""

  make_config = staticmethod(_dit_config)

  def test_parameters_are_split(self):
    kernel = self.on_mesh.state.params["blocks0"]["attn"]["qkv"]["kernel"]
    spec = (None, "fsdp", None, "tensor")  # layers, C, parts, heads
    self.assertEqual(tuple(kernel.sharding.spec)[:4], spec)

  def test_state_keeps_its_shardings_and_compiles_once(self):
    config = _dit_config(mesh=_MESH)
    task = make_task(config)
    mesh = sharding.make_mesh(config.mesh)
    program = make_program(config, task, mesh)
    with sharding.use_mesh(mesh):
      state = program.init()
      with Feed(task.batches(mesh), mesh, ahead=1) as batches:
        for _ in range(2):
          state, _ = program.step(state, next(batches))
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(program.state))
    for leaf, abstract in leaves:
      self.assertTrue(
        leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)
      )
    self.assertEqual(program.step._cache_size(), 1)

  def test_one_device_checkpoint_continues_on_the_mesh(self):
    config = _dit_config(mesh=_MESH, train={"steps": 5})
    workdir = os.path.join(self.create_tempdir().full_path, "copy")
    resumed = train(config, shutil.copytree(self.one_dir, workdir))
    self.assertEqual(int(resumed.state.step), 5)
    self.assertLen(resumed.state.step.sharding.device_set, 8)


class LanguageMeshTest(_Runs, absltest.TestCase):
  """Vocabulary, heads and MLP are split over `tensor`, widths over `fsdp`."""

  make_config = staticmethod(tiny.llm_config)
  watch = staticmethod(_fresh_compiler_log)

  def test_parameters_are_split(self):
    params = self.on_mesh.state.params
    blocks = params["blocks0"]
    for leaf, spec in (
      (params["embed"]["embedding"], (("tensor", "fsdp"), None)),
      (params["head"]["kernel"], (None, ("tensor", "fsdp"))),
      (blocks["attn"]["q"]["kernel"], (None, "fsdp", None, "tensor", None)),
      (blocks["attn"]["kv"]["kernel"], (None, "fsdp", None, "tensor", None)),
      (blocks["attn"]["out"]["kernel"], (None, "tensor", None, "fsdp")),
      (blocks["mlp"]["down"]["kernel"], (None, "tensor", "fsdp")),
    ):
      self.assertEqual(tuple(leaf.sharding.spec), spec)

  def test_no_array_is_gathered_whole_to_be_split_anew(self):
    found = [line for line in self.log if "rematerialization" in line]
    self.assertEmpty(found)

  def test_such_a_gathering_would_be_seen(self):
    mesh = jax.make_mesh(
      (2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3
    )

    def split(x, *spec):
      sharding = NamedSharding(mesh, PartitionSpec(*spec))
      return jax.lax.with_sharding_constraint(x, sharding)

    @jax.jit
    def resplit(x):
      return split(2 * split(jnp.sin(x), "a", "b"), ("c", "b", "a"), None)

    with _fresh_compiler_log() as log:
      resplit.lower(jnp.zeros((16, 16))).compile()
    self.assertIn("rematerialization", "".join(log))


@pytest.mark.slow
class ImageMeshTest(_Runs, absltest.TestCase):
  make_config = staticmethod(tiny.config)

  def test_parameters_and_moments_are_split(self):
    state = self.on_mesh.state
    kernel = state.params["stage2"]["blocks"]["attn"]["qkv"]["kernel"]
    spec = (None, "fsdp", None, "tensor")  # layers, C, parts, heads
    self.assertEqual(tuple(kernel.sharding.spec)[:4], spec)
    moments = [
      leaf
      for leaf in jax.tree.leaves(state.opt_state)
      if leaf.shape == kernel.shape
    ]
    self.assertNotEmpty(moments)
    for moment in moments:
      self.assertEqual(tuple(moment.sharding.spec)[:4], spec)


class MeshTest(parameterized.TestCase):
  def test_lowered_step_holds_the_activation_constraints(self):
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2))
    with sharding.use_mesh(mesh):
      lowered = jax.jit(
        lambda x: constrain(x, "batch", None, "heads", "head_dim")
      ).lower(jnp.zeros((8, 3, 4, 2)))
    self.assertIn("sharding_constraint", lowered.as_text())
    self.assertIn('"tensor"', lowered.as_text())

  def test_constrain_is_the_identity_outside_a_mesh(self):
    x = jnp.ones((3, 2))
    self.assertIs(constrain(x, "batch", "heads"), x)

  @parameterized.parameters(
    ({"data": -1, "tensor": 3}, "must divide the 8 devices"),
    ({"data": 16}, "needs 16 devices"),
  )
  def test_mesh_that_does_not_fit_is_refused(self, axes, message):
    with self.assertRaisesRegex(ValueError, message):
      sharding.make_mesh(MeshConfig(**axes))

  @parameterized.parameters(
    ("moh-llama3-8b", 2, 1.1, ""),
    ("moh-llama3-8b", 8, 2, ""),
    ("moh-llama3-8b", 8, 1.1, r"16 shared heads of 32.* 1\.333 times .*=1\.1"),
    (
      "moh-llm-s-75",
      8,
      9,
      r"mesh.tensor=8: the 1\. group .*12 key/value heads",
    ),
    ("moh-vit-b50", 4, 1, ""),  # its forms compute every head
    ("moh-vit-s80", 2, 9, "3 key/value heads"),
    ("llm-b", 8, 1, ""),
  )
  def test_heads_must_fit_the_tensor_axis(self, name, devices, most, message):
    mesh = sharding.make_mesh(MeshConfig(tensor=devices))
    model = released_model(name)
    if not message:
      head_layout.check_heads(model, mesh, most)
      return
    with self.assertRaisesRegex(ValueError, message):
      head_layout.check_heads(model, mesh, most)

  def test_shared_heads_are_those_of_the_worst_order(self):
    mesh = sharding.make_mesh(MeshConfig(tensor=2), jax.devices()[:2])
    split = {"num_kv_heads": 4, "shared_heads": (2, 2), "top_k": (1, 1)}
    own, crowded = (0, 1, 2, 3), (0, 2, 1, 3)
    orders = {(own, own): 1.0, (own, crowded): 4 / 3}
    for order, ratio in orders.items():
      model = dataclasses.replace(tiny.LLM, head_order=order, **split)
      head_layout.check_heads(model, mesh, ratio)
    with self.assertRaisesRegex(
      ValueError, r"2 shared heads of 4 in model.head_order: .* 1\.333 times"
    ):
      head_layout.check_heads(model, mesh, 1.3)


if __name__ == "__main__":
  absltest.main()
