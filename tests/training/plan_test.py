"""Plans: memory, predicted times, and what compilers say of programs."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from absl.testing import absltest, parameterized

from moh_jax.config import MeshConfig, without_router
from moh_jax.runtime import devices, sharding
from moh_jax.runtime.devices import parse_topology
from moh_jax.training import compiling
from moh_jax.training import plan as plan_lib
from moh_jax.training.plan import assumptions, make_plan, seconds
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder
from tests.training import meshes, tiny

_MESH = {"data": -1, "max_imbalance": 2.0}


def _plan(run, name="v5e-4", compiles=False):
  return make_plan(run, parse_topology(name), compiles)


class MemoryTest(absltest.TestCase):
  @pytest.mark.integration
  def test_state_is_that_of_the_compiled_step(self):
    sections = {"data": {"batch_size": 64}, "optim": {"accumulation": 2}}
    run = tiny.llm_config(mesh=tiny.MESH, **sections)
    mesh = sharding.make_mesh(run.mesh)
    program = make_program(run, task_builder(run).make_objective(run), mesh)
    with sharding.use_mesh(mesh):
      compiled = program.step.lower(program.state, program.batch).compile()
    found = compiled.memory_analysis().argument_size_in_bytes
    memory = _plan(run, "v5e-8").memory
    self.assertEqual((memory.arguments, memory.total), (found, found))


class TimeTest(parameterized.TestCase):
  @pytest.mark.integration
  def test_products_that_run_again_take_time(self):
    none, *others = (
      _plan(
        tiny.llm_config(model={"remat": remat, "loss_chunk": 0}, mesh=_MESH)
      )
      for remat in ("none", "dots", "offload", "attention", "full")
    )
    dots, offload, attention, full = (
      plan.step_time.products / none.step_time.products for plan in others
    )
    self.assertEqual((dots, offload), (1, 1))
    self.assertBetween(attention, 1.1, full - 1e-3)
    # The forward pass, a third of the step, but for the output layer.
    model, data = none.config.model, none.config.data
    tokens = data.batch_size * data.sequence_length
    output = 2 * tokens * model.width * model.vocab_size
    self.assertAlmostEqual(full, 4 / 3 - output / none.computed_flops)

  def test_the_output_layer_runs_once(self):
    few, many = (
      _plan(
        tiny.llm_config(model={"remat": "full", "vocab_size": size}, mesh=_MESH)
      )
      for size in (64, 4096)
    )
    self.assertEqual(few.recomputed_flops, many.recomputed_flops)
    self.assertLess(few.computed_flops, many.computed_flops)

  @parameterized.parameters(16, 2048)
  @pytest.mark.integration
  def test_heads_that_are_computed_take_time(self, length):
    # 16 tokens are too few to leave heads out on any device.
    run = tiny.llm_config(
      mesh=_MESH,
      model={"max_length": length},
      data={"sequence_length": length},
    )
    baseline = dataclasses.replace(run, model=without_router(run.model))
    moh, mha = _plan(run, "v5p-8"), _plan(baseline, "v5p-8")
    comparison = self.assertGreater if length == 16 else self.assertLess
    comparison(moh.step_time.products, mha.step_time.products)
    self.assertEqual(moh.attention[0].heads, 1 if length == 16 else 0.75)


class ExchangesTest(parameterized.TestCase):
  @pytest.mark.integration
  def test_one_a_step_is_that_of_the_compiled_step(self):
    mesh = {"data": 2, "fsdp": 4, "gather": "step", "max_imbalance": 2.0}
    run = meshes.config_of("llm", mesh=mesh, optim={"accumulation": 8},
                           data={"batch_size": 64})  # fmt: skip
    step, other = _plan(run, "v5e-8").exchanges
    self.assertEqual((step.gather, other.gather), ("step", "microbatch"))
    text, devices = meshes.compiled_step(run)
    found = compiling.read_collectives(text, dict(devices.shape))
    ratio = step.bytes / sum(one.bytes for one in found)
    self.assertBetween(ratio, 0.95, 1.05)
    self.assertGreater(step.memory, other.memory)
    self.assertGreater(other.bytes, 2 * step.bytes)
    self.assertGreater(other.seconds, step.seconds)

  def test_replicas_have_one_and_one_device_none(self):
    def count(**mesh):
      return len(_plan(tiny.llm_config(mesh={**_MESH, **mesh})).exchanges)

    self.assertEqual(count(), 1)
    self.assertEqual(count(data=1, tensor=2, sequence=2), 0)

  def test_microbatches_are_the_fewest_that_leave_room(self):
    run = tiny.llm_config(mesh=_MESH, data={"batch_size": 32},
                          optim={"accumulation": 8})  # fmt: skip
    plan = _plan(run)
    self.assertEqual(plan.microbatches()[0], 1)
    self.assertEqual(plan.gradients, 2 * plan.memory.parameters)
    fixed, one = plan.memory.total + plan.gradients, plan.memory.parameters
    grows = 10 * one
    for limit, number in (
      *((20, 4), (39, 4), (40, 2), (78, 2), (79, 1), (10, None), (9, None)),
    ):
      found = compiling.Compiled(
        "c", 1.0, True, fixed + limit * one, fixed + grows
      )
      plan = dataclasses.replace(plan, compiled=found)
      if number is None:
        self.assertIsNone(plan.microbatches())
      else:
        total = fixed + grows * 8 / number - one * (number == 1)
        self.assertEqual(plan.microbatches(), (number, total))

  @pytest.mark.integration
  def test_without_a_compiler_the_most_bytes_decide(self):
    length = {"model": {"max_length": 2048}, "data": {"sequence_length": 2048}}
    plans = [
      _plan(tiny.llm_config(mesh=_MESH, optim={"accumulation": n}, **length))
      for n in (1, 2)
    ]
    for plan in plans:  # one or two examples a device
      least, most = plan.bounds
      self.assertEqual(least, plan.memory.total + plan.gradients + plan.kept)
      self.assertTrue(plan.fits)
      for memory, fits in ((most, True), (least, False)):
        chip = dataclasses.replace(plan.topology.chip, memory=memory / 0.95 + 1)
        topology = dataclasses.replace(plan.topology, chip=chip)
        small = dataclasses.replace(plan, topology=topology)
        self.assertEqual(small.fits, fits)
    one, two = plans
    self.assertAlmostEqual(one.kept / two.kept, 2, delta=0.05)
    parameters = one.memory.parameters
    self.assertEqual((one.gradients, two.gradients),
                     (parameters, 2 * parameters))  # fmt: skip
    # Where one is too much, two are proposed.
    need = two.bounds[1] / 0.95 + 1
    chip = dataclasses.replace(one.topology.chip, memory=need)
    topology = dataclasses.replace(one.topology, chip=chip)
    one = dataclasses.replace(one, topology=topology)
    self.assertFalse(one.fits)
    number, bytes_ = one.microbatches()
    self.assertEqual(number, 2)
    self.assertAlmostEqual(bytes_ / two.bounds[1], 1, delta=0.05)

  @pytest.mark.integration
  def test_what_whole_layers_compute_again_is_not_kept(self):
    runs = [
      tiny.llm_config(
        mesh=_MESH, model={"remat": remat}, data={"batch_size": 64}
      )
      for remat in ("none", "full")
    ]
    none, full = (_plan(run).kept for run in runs)
    self.assertGreater(none, 2 * full)


class SlicesTest(parameterized.TestCase):
  def test_what_crosses_slices_is_slower(self):
    one = parse_topology("v5e:2x4")
    two = dataclasses.replace(parse_topology("v5e:2x2"), slices=2)
    self.assertEqual((two.devices, two.hosts), (8, 2))
    data, fsdp = (
      compiling.Collective("all-reduce", "f32", (axis,), devices, 1, 1e6)
      for axis, devices in (("data", (0, 4)), ("fsdp", (0, 1, 2, 3)))
    )
    self.assertEqual(seconds(fsdp, one), seconds(fsdp, two))
    self.assertGreater(seconds(data, two), 10 * seconds(data, one))

  def test_a_plan_has_as_many_slices_as_the_config(self):
    run = tiny.llm_config(mesh={**_MESH, "dcn_data": 2, "fsdp": 2})
    plan = _plan(run, "v5e:2x2")
    self.assertEqual(plan.topology.devices, 8)
    self.assertEqual(plan.mesh["data"], 4)
    self.assertTrue(plan.fits)


class CompilerTest(absltest.TestCase):
  @pytest.mark.integration
  def test_decides_and_its_collectives_take_time(self):
    one = compiling.Collective("all-reduce", "f32", ("data",), (0, 1), 1, 1e12)
    full = compiling.Compiled("libtpu 0.0", 1.0, False, 1e9, 2e9)
    fits = dataclasses.replace(full, fits=True, collectives=(one,))
    broken = ValueError("libtpu 0.0: broken")
    run = tiny.llm_config(mesh={"data": -1})
    with (
      mock.patch.object(
        devices, "missing_packages", side_effect=[(), (), (), ("libtpu",)]
      ),
      mock.patch.object(
        plan_lib, "compile_step", side_effect=[full, fits, broken]
      ),
    ):
      refused, plan, *failed = (_plan(run, compiles=True) for _ in range(4))
    self.assertFalse(refused.fits)
    self.assertTrue(plan.fits)
    self.assertGreater(plan.step_time.seconds, 2 * refused.step_time.seconds)
    self.assertIn("collectives reach 70% of ", assumptions(plan)[2])
    self.assertIn("collectives are not counted", assumptions(refused)[2])
    # Without what the compiler says, the state alone decides.
    for plan, reason in zip(failed, ("libtpu 0.0: broken", "libtpu")):
      self.assertTrue(plan.fits)
      self.assertIsNone(plan.compiled)
      self.assertIn(reason, plan.not_compiled)


_AXES = {"data": 2, "fsdp": 4}


def _program(instruction, groups):
  return f"""
%add (x: f32[], y: f32[]) -> f32[] {{
  ROOT %sum = f32[] add(%x, %y)
}}
ENTRY %main (p: f32[4]) -> f32[4] {{
  ROOT %one = {instruction}, channel_id=1, {groups}, to_apply=%add
}}
"""


class RefusedSizesTest(parameterized.TestCase):
  @parameterized.parameters(
    (
      "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
      "for HLO temporaries (33.54G) exceeds available HBM (15.75G).",
      (33.54 * 2**30, 15.75 * 2**30),
    ),
    (
      "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.5G "
      "of 15.75G hbm.",
      (20.5 * 2**30, 15.75 * 2**30),
    ),
    ("INTERNAL: Used 20.5G of 15.75G hbm.", None),
    ("RESOURCE_EXHAUSTED: no sizes", None),
  )
  def test_are_those_of_the_message(self, error, sizes):
    self.assertEqual(compiling.refused_sizes(error), sizes)


class ReadCollectivesTest(parameterized.TestCase):
  def test_loops_count_as_often_as_they_run(self):
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=4))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)

    def total(x):
      def add(carry, _):
        whole = jax.lax.all_gather(x * carry, "fsdp", tiled=True)
        return jnp.sin(whole).sum(), None

      return jax.lax.scan(add, 1.0, length=5)[0]

    total = jax.shard_map(
      total,
      mesh=mesh,
      in_specs=jax.P("fsdp", None),
      out_specs=jax.P(),
      check_vma=False,
    )
    text = jax.jit(total).lower(x).compile().as_text()
    (gather,) = (
      one
      for one in compiling.read_collectives(text, dict(mesh.shape))
      if one.kind == "all-gather"
    )
    self.assertEqual(gather.axes, ("fsdp",))
    self.assertEqual(gather.devices, (0, 1, 2, 3))
    self.assertEqual((gather.dtype, gather.count), ("f32", 5))
    self.assertEqual(gather.bytes, 5 * 64 * 32 * 4)

  @parameterized.parameters(
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("fsdp",)),
    ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
    ("replica_groups={}", ("data", "fsdp")),
    ("replica_groups=[2,4]<=[8]", ("fsdp",)),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ("fsdp",)),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ("data",)),
    ("replica_groups=mesh['a'=8] {'a':(2)4}", ("fsdp",)),
    ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", ("fsdp",)),
    ("replica_groups=[8,1]<=[8]", None),  # exchanges nothing
  )
  def test_groups_of_every_notation(self, groups, axes):
    kind = "collective-permute" if "pairs" in groups else "all-reduce"
    text = _program(f"f32[4]{{0}} {kind}(%p)", groups)
    found = [
      (one.axes, one.bytes) for one in compiling.read_collectives(text, _AXES)
    ]
    self.assertEqual(found, [(axes, 16)] if axes else [])

  @parameterized.parameters(
    ("bf16[8]{0} all-gather(%p)", 16),
    ("(bf16[2]{0}, bf16[8]{0}) all-gather-start(%p)", 16),
    ("bf16[2]{0} reduce-scatter(%p)", 16),
    ("((bf16[8]{0}), (bf16[2]{0})) reduce-scatter-start(%p)", 16),
    ("(f32[8]{0:T(8,128)}, bf16[8]{0}) all-reduce(%p, %q)", 48),
    ("(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p)", 32),
  )
  def test_bytes_are_those_of_the_whole_array(self, instruction, size):
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}"
    (found,) = compiling.read_collectives(_program(instruction, groups), _AXES)
    self.assertAlmostEqual(found.bytes, size)

  def test_parts_of_a_chain_are_one_collective_and_a_channel_is_several(self):
    line = "  %{} = f32[4] all-reduce(%p), channel_id=1, {}\n"
    attributes = (
      *['frontend_attributes={chain_id="0"}'] * 2,
      'frontend_attributes={chain_id="3"}',
      *["to_apply=%add"] * 2,
    )
    lines = [line.format(f"x{i}", a) for i, a in enumerate(attributes)]
    # A kernel's attributes of several lines end nothing.
    lines.insert(
      2, "  %k = f32[4] custom-call(%p), kernel={{\n}}, metadata={}\n"
    )
    text = f"ENTRY %main (p: f32[4]) -> f32[4] {{\n{''.join(lines)}}}\n"
    (found,) = compiling.read_collectives(text, _AXES)
    self.assertEqual(found.count, 4)

  def test_what_crosses_slices_is_sent_to_the_hosts(self):
    attributes = (
      'frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",'
      '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    text = (
      "ENTRY %main (p: f32[2,4]) -> f32[2,4] {\n"
      "  %send = (f32[2,4]{1,0}, u32[], token[]) send(%p, %token), "
      f"channel_id=2, {attributes}\n"
      "  %sum = f32[4] all-reduce(%p), replica_groups={{0,1,2,3}}\n}\n"
    )
    inside, crossing = compiling.read_collectives(text, _AXES, 2)[::-1]
    self.assertEqual((inside.axes, inside.devices), (("fsdp",), (0, 1, 2, 3)))
    self.assertEqual((crossing.kind, crossing.bytes), ("all-reduce", 32))
    self.assertEqual((crossing.axes, crossing.devices), (("data",), (0, 4)))
