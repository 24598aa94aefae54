"""Runs on meshes of fake devices: equal to one device; what does not fit."""

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moh_jax.config import MeshConfig
from moh_jax.inference.restore import restore
from moh_jax.layers.partitioning import constrain
from moh_jax.models.registry import released_model
from moh_jax.ops import head_layout
from moh_jax.runtime import sharding
from moh_jax.training import entrance
from moh_jax.training.feed import Feed
from moh_jax.training.step import make_program
from moh_jax.training.train import train
from tests.runtime.sharding_test import two_slices
from tests.training import tiny
from tests.training.tiny import make_task

_MAKE = {"vit": tiny.config, "dit": tiny.dit_config, "llm": tiny.llm_config}


@contextlib.contextmanager
def _fresh_compiler_log() -> Iterator[list[str]]:
  """Collects what XLA writes to stderr, with every program compiled anew."""
  log: list[str] = []
  before, cached = os.dup(2), jax.config.jax_enable_compilation_cache
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # which has read the setting
    try:
      yield log
    finally:
      jax.config.update("jax_enable_compilation_cache", cached)
      compilation_cache.reset_cache()
      os.dup2(before, 2)
      os.close(before)
      file.seek(0)
      log += file.read().decode(errors="replace").splitlines()


class RunTest(absltest.TestCase):
  """A run on one device and the same over the mesh."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.one_dir, cls.mesh_dir = (
      cls.create_tempdir(cls()).full_path for _ in range(2)
    )
    cls.one = tiny.train(tiny.llm_config(), cls.one_dir)
    with _fresh_compiler_log() as cls.log:
      cls.on_mesh = train(tiny.llm_config(mesh=tiny.MESH), cls.mesh_dir)

  def test_figures_equal_the_single_device_ones(self):
    losses = [
      [row["loss"] for row in tiny.rows(folder, "train")]
      for folder in (self.mesh_dir, self.one_dir)
    ]
    np.testing.assert_allclose(*losses, rtol=2e-5)
    self.assertLen(losses[0], 4)
    ours, theirs = self.on_mesh.evaluation, self.one.evaluation
    chex.assert_trees_all_close(ours, theirs, rtol=1e-4)

  def test_checkpoints_go_from_the_mesh_to_one_device_and_back(self):
    restored = restore(self.mesh_dir)
    for leaf in jax.tree.leaves(restored.params):
      self.assertLen(leaf.sharding.device_set, 1)
    state = self.on_mesh.state
    chex.assert_trees_all_equal(*jax.device_get((restored.params, state.ema)))
    config = tiny.llm_config(mesh=tiny.MESH, train={"steps": 5})
    workdir = os.path.join(self.create_tempdir().full_path, "copy")
    resumed = train(config, shutil.copytree(self.one_dir, workdir))
    self.assertEqual(int(resumed.state.step), 5)
    self.assertLen(resumed.state.step.sharding.device_set, 8)

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
    self.assertEmpty([x for x in self.log if "rematerialization" in x])
    mesh = jax.make_mesh(
      (2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3
    )

    def split(x, *spec):
      sharding = NamedSharding(mesh, PartitionSpec(*spec))
      return jax.lax.with_sharding_constraint(x, sharding)

    @jax.jit
    def resplit(x):
      return split(2 * split(jnp.sin(x), "a", "b"), ("c", "b", "a"), None)

    with _fresh_compiler_log() as log:  # one would be seen
      resplit.lower(jnp.zeros((16, 16))).compile()
    self.assertIn("rematerialization", "".join(log))


class ProgramTest(parameterized.TestCase):
  @parameterized.parameters(*_MAKE)
  def test_is_what_abstract_devices_and_the_data_say(self, family):
    run = _MAKE[family](mesh=tiny.MESH)
    mesh, task = sharding.make_mesh(run.mesh), make_task(run)
    real = make_program(run, task, mesh)
    planned = make_program(run, task, mesh.abstract_mesh)

    def specs(tree):
      return jax.tree.map(
        lambda x: (x.shape, str(x.dtype), x.sharding.spec), tree
      )

    self.assertEqual(specs(planned.state), specs(real.state))
    self.assertEqual(specs(planned.batch), specs(real.batch))
    batch = sharding.shard_batch(next(task.batches(mesh)), mesh)
    self.assertEqual(specs(real.batch), specs(batch))

  def test_state_keeps_its_shardings_and_compiles_once(self):
    config = tiny.llm_config(mesh=tiny.MESH)
    task, mesh = make_task(config), sharding.make_mesh(config.mesh)
    program = make_program(config, task, mesh)
    with sharding.use_mesh(mesh):
      state = program.init()
      with Feed(task.batches(mesh), mesh, ahead=1) as batches:
        for _ in range(2):
          state, _ = program.step(state, next(batches))
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(program.state))
    for leaf, abstract in leaves:
      same = leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)
      self.assertTrue(same)
    self.assertEqual(program.step._cache_size(), 1)

  def test_constraints_are_lowered_and_nothing_outside_of_a_mesh(self):
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2))
    with sharding.use_mesh(mesh):
      lowered = jax.jit(
        lambda x: constrain(x, "batch", None, "heads", "head_dim")
      ).lower(jnp.zeros((8, 3, 4, 2)))
    self.assertIn("sharding_constraint", lowered.as_text())
    self.assertIn('"tensor"', lowered.as_text())
    x = jnp.ones((3, 2))
    self.assertIs(constrain(x, "batch", "heads"), x)


class ChecksTest(parameterized.TestCase):
  @parameterized.parameters(
    ("moh-llama3-8b", 2, 1.1, ""),
    ("moh-llama3-8b", 8, 2, ""),
    ("moh-llama3-8b", 8, 1.1, r"16 shared heads of 32.* 1\.333 times .*=1\.1"),
    ("moh-llm-s-75", 8, 9, r"mesh.tensor=8: the 1\. group .*12 key/value"),
    ("moh-vit-b50", 4, 1, ""),  # its forms compute every head
    ("moh-vit-s80", 2, 9, "3 key/value heads"),
    ("llm-b", 8, 1, ""),
  )
  def test_heads_must_fit_the_tensor_axis(self, name, devices, most, message):
    mesh = sharding.make_mesh(MeshConfig(tensor=devices))
    with (
      self.assertRaisesRegex(ValueError, message)
      if message
      else contextlib.nullcontext()
    ):
      head_layout.check_heads(released_model(name), mesh, most)

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

  def test_slices_mix_images_of_a_device_which_needs_two(self):
    def check(**sections):
      run = tiny.config(
        mesh={"dcn_data": 2, "data": 4}, data={"batch_size": 32}, **sections
      )
      with two_slices():
        mesh = sharding.make_mesh(run.mesh)
      entrance.check_mixed_images(run, mesh)

    alone, off = {"accumulation": 4}, {"mixup": 0.0, "cutmix": 0.0}
    check()
    check(optim=alone, classifier=off)
    with self.assertRaisesRegex(ValueError, "data.batch_size=32 .* it is 1: "):
      check(optim=alone)

  def test_devices_without_memory_of_a_host_are_refused_in_one_line(self):
    device = SimpleNamespace(
      device_kind="Abacus",
      addressable_memories=lambda: [SimpleNamespace(kind="beads")],
    )
    mesh = SimpleNamespace(devices=np.array([device]))
    config = tiny.llm_config(optim={"state_memory": "host"})
    with self.assertRaisesRegex(
      ValueError, r"^optim.state.* of the kind pinned_host; Abacus has .'beads'"
    ):
      entrance.check_host_memory(config, mesh)


class HostMemoryTest(absltest.TestCase):
  @pytest.mark.slow
  def test_a_run_is_the_same_and_resumes_on_a_mesh(self):
    """Its state is saved from the host and restored to it."""

    def config(memory, remat, steps):
      return tiny.llm_config(
        mesh=tiny.MESH,
        train={"steps": steps},
        optim={"lr": 1e-3, "warmup_steps": 0, "state_memory": memory},
        model={"remat": remat},
      )

    folders = [self.create_tempdir().full_path for _ in range(2)]
    device = train(config("device", "dots", 3), folders[0]).state
    for steps in (2, 3):
      host = train(config("host", "offload", steps), folders[1]).state
    moments = host.opt_state[1][0].mu["head"]["kernel"]
    self.assertEqual(moments.sharding.memory_kind, sharding.HOST_MEMORY)
    chex.assert_trees_all_close(
      *jax.device_get((host, device)), rtol=1e-6, atol=1e-7
    )
