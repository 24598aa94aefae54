"""The order of the stages, and what they ask for on a GPU."""

import json
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.ops import attention
from moh_jax.ops.kernels.backends import block_sizes, read
from moh_jax.ops.kernels.sizes import BlockSizes, Key, Tile
from moh_jax.speed.card import stages
from moh_jax.speed.card.scale import scale_for
from moh_jax.speed.card.store import Store
from moh_jax.speed.options import SequenceOptions
from tests.ops.devices import need, traced_for, with_triton


class StagesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(with_triton())
    folder = self.create_tempdir().full_path
    self.store = Store(folder, {"machine": {"device": "X"}})

  def _names(self, platform):
    with traced_for(platform, "NVIDIA H100"):
      found = stages.stages(scale_for(platform), self.store)
      return [stage.name for stage in found]

  def test_what_is_worth_most_comes_first(self):
    names = self._names("gpu")
    self.assertLen(set(names), len(names))
    self.assertEqual(names[:4], [
      *("peaks", "exact_bfloat16_64", "exact_bfloat16_128"),
      "exact_bfloat16_256",
    ])  # fmt: skip
    order = [
      *("exact_float32_64", "core_64_forward_4096", "core_128_forward_16384"),
      *("model_moh-dit-xl2-90", "model_moh-vit-b50", "model_moh-llm-b-50"),
      *("decode_64_4096", "tiles_64", "core_64_causal_8192"),
      *("core_128_forward_backward_8192", "layer_64_forward_256"),
      *("core_64_forward_256", "core_64_causal_1024", "model_dit-xl2-mha"),
      "core_128_causal_forward_backward_2048",
    ]
    self.assertEqual(order, sorted(order, key=names.index))

  def test_every_length_and_head_dim_has_every_mode(self):
    cores = [n for n in self._names("gpu") if n.startswith("core")]
    self.assertLen(cores, 7 * 2 * 4)

  def test_a_cpu_has_no_tiles(self):
    names = self._names("cpu")
    self.assertEqual([n for n in names if n.startswith("tiles")], [])
    self.assertLess(len(names), 12)

  @parameterized.parameters(("gpu", "triton"), ("tpu", "mosaic_tpu"))
  def test_tuned_tiles_are_for_the_kernels_of_the_device(self, platform, name):
    tile = Tile(64, 64)
    found = BlockSizes(tile, tile, tile)
    with (
      traced_for(platform, "Kind A"),
      mock.patch.object(stages.tiles, "tune", return_value=found) as tune,
    ):
      result = stages._tiles(scale_for(platform), self.store, 64)
    self.assertIn(block_sizes(name, 64, "bfloat16").dq, tune.call_args.args[2])
    key = Key(name, "Kind A", 64, "bfloat16")
    self.assertEqual(read(self.store.folder / "tiles.json"), {key: found})
    self.assertEqual(json.loads(json.dumps(result))["backend"], name)

  @parameterized.parameters(
    ("gpu", "bfloat16", "forward", ("kernel", "cudnn")),
    ("gpu", "bfloat16", "causal", ("kernel",)),
    ("gpu", "float32", "forward", ("kernel",)),
    ("tpu", "bfloat16", "forward", ("kernel",)),
    ("cpu", "bfloat16", "causal", ("packed",)),
  )
  def test_forms_that_pack_are_compared(self, platform, dtype, mode, forms):
    if platform == "gpu":
      need("triton")  # it is traced
    cudnn = mock.patch.object(  # it need not be here
      attention, "cudnn_attention", lambda q, *args, **options: q
    )
    found = mock.patch.object(attention, "has_cudnn", lambda: True)
    with traced_for(platform), cudnn, found:
      options = SequenceOptions(
        lengths=(64,), shares=(50,), modes=(mode,), dtype=dtype
      )
      self.assertEqual(set(stages._packing(options)), set(forms))


if __name__ == "__main__":
  absltest.main()
