"""What compilers say: sizes that they refuse, collectives of programs."""

import jax
import jax.numpy as jnp
from absl.testing import parameterized

from moh_jax.config import MeshConfig
from moh_jax.runtime import sharding
from moh_jax.training.compiling import read_collectives, refused_sizes

_MESH = {"data": 2, "fsdp": 4}


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
    self.assertEqual(refused_sizes(error), sizes)


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
      for one in read_collectives(text, dict(mesh.shape))
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
  )
  def test_groups_of_every_notation(self, groups, axes):
    text = _program("f32[4]{0} all-reduce(%p)", groups)
    (found,) = read_collectives(text, _MESH)
    self.assertEqual(found.axes, axes)
    self.assertEqual(found.bytes, 16)

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
    (found,) = read_collectives(_program(instruction, groups), _MESH)
    self.assertAlmostEqual(found.bytes, size)

  def test_pairs_of_a_ring_are_its_devices(self):
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    text = _program("f32[4]{0} collective-permute(%p)", pairs)
    (found,) = read_collectives(text, _MESH)
    self.assertEqual((found.axes, found.devices), (("fsdp",), (0, 1, 2, 3)))

  def test_parts_of_a_chain_are_one_collective_and_a_channel_is_several(self):
    line = "  %{} = f32[4] all-reduce(%p), channel_id=1, {}\n"
    attributes = (
      *['frontend_attributes={chain_id="0"}'] * 2,
      'frontend_attributes={chain_id="3"}',
      *["to_apply=%add"] * 2,
    )
    lines = [line.format(f"x{i}", a) for i, a in enumerate(attributes)]
    text = f"ENTRY %main (p: f32[4]) -> f32[4] {{\n{''.join(lines)}}}\n"
    (found,) = read_collectives(text, _MESH)
    self.assertEqual(found.count, 4)

  def test_a_kernels_attributes_of_several_lines_end_nothing(self):
    text = _program("f32[4]{0} all-reduce(%p)", "replica_groups={{0,1,2,3}}")
    kernel = "  %k = f32[4] custom-call(%p), kernel={{\n}}, metadata={}\n"
    text = text.replace("  ROOT %one", f"{kernel}  ROOT %one")
    self.assertLen(read_collectives(text, _MESH), 1)

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
    inside, crossing = read_collectives(text, _MESH, 2)[::-1]
    self.assertEqual((inside.axes, inside.devices), (("fsdp",), (0, 1, 2, 3)))
    self.assertEqual((crossing.kind, crossing.bytes), ("all-reduce", 32))
    self.assertEqual((crossing.axes, crossing.devices), (("data",), (0, 4)))

  def test_a_group_of_one_device_exchanges_nothing(self):
    text = _program("f32[4]{0} all-reduce(%p)", "replica_groups=[8,1]<=[8]")
    self.assertEqual(read_collectives(text, _MESH), ())
