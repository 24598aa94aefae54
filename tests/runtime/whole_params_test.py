"""Parameters that a mesh leaves whole: the report and the limit."""

from absl.testing import absltest, parameterized

from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from moh_jax.runtime.sharding import abstract_params
from tests.training import tiny

_SIZES = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}


def _boxed(**model):
  return abstract_params(*make_model(tiny.llm_config(model=model)))


class WholeParamsTest(parameterized.TestCase):
  def test_norms_and_routers_are_whole_by_design(self):
    rows = sharding.unsplit_params(_boxed(), {**_SIZES, "fsdp": 2})
    self.assertCountEqual(
      {(one.name.split("/")[-2], one.why) for one in rows if one.whole},
      [("router", ""), ("attn_norm", ""), ("mlp_norm", ""), ("norm", "")],
    )
    self.assertTrue(all(one.whole for one in rows))

  def test_what_an_axis_does_not_divide_is_listed(self):
    rows = sharding.unsplit_params(
      _boxed(mlp_dim=27), {**_SIZES, "fsdp": 2, "tensor": 2}
    )
    (down,) = [one for one in rows if one.name.endswith("mlp/down/kernel")]
    self.assertEqual(down.why, "tensor=2 does not divide mlp 27")
    self.assertEqual((down.shape, down.whole), ((2, 27, 32), False))
    self.assertEqual(down.bytes, 4 * 2 * 27 * 32 // 2)
    self.assertEqual([one.bytes for one in rows], sorted(
      (one.bytes for one in rows), reverse=True
    ))  # fmt: skip

  def test_a_vocabulary_that_one_axis_divides_is_split_by_it(self):
    rows = sharding.unsplit_params(
      _boxed(vocab_size=62), {**_SIZES, "fsdp": 2, "tensor": 2}
    )
    self.assertEmpty([one for one in rows if one.why])

  def test_nothing_is_listed_where_nothing_is_to_be_split(self):
    self.assertEmpty(sharding.unsplit_params(_boxed(), {**_SIZES, "data": 8}))

  def test_limit_refuses_and_names_the_largest(self):
    sizes = {**_SIZES, "fsdp": 2}
    line = sharding.check_whole(_boxed(), sizes, 10**6)
    self.assertRegex(line, r"^\d+ parameters \(.* bytes\) whole")
    with self.assertRaisesRegex(
      ValueError, r"mesh.max_whole=10 bytes: .*router/routed \[2, 32, 3\]"
    ) as caught:
      sharding.check_whole(_boxed(), sizes, 10)
    self.assertNotIn("\n", str(caught.exception))

  @parameterized.parameters("fsdp", "tensor")
  def test_axis_that_divides_nothing_is_refused(self, axis):
    with self.assertRaisesRegex(ValueError, f"mesh.{axis}=7 divides no dim"):
      sharding.check_whole(_boxed(), {**_SIZES, axis: 7}, 10**9)


if __name__ == "__main__":
  absltest.main()
