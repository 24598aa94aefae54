"""Up to which share packing is taken to be faster."""

from absl.testing import absltest, parameterized

from benchmarks import predict
from moh_jax.ops.attention import CROSSOVERS, LENGTHS, largest_share
from moh_jax.ops.target import Target

_A100 = Target("gpu", "NVIDIA A100-SXM4-80GB")
_H100 = Target("gpu", "NVIDIA H100 80GB HBM3")


class TableTest(parameterized.TestCase):
  def test_predicted_entries_are_what_the_script_predicts(self):
    entries = [x for x in CROSSOVERS if not x.measured]
    self.assertEqual(entries, predict.crossovers())

  def test_longer_sequences_allow_larger_shares(self):
    for entry in CROSSOVERS:
      self.assertLen(entry.shares, len(LENGTHS))
      self.assertEqual(sorted(entry.shares), list(entry.shares))
      self.assertBetween(entry.shares[-1], 0.5, 1)

  @parameterized.parameters(
    (_H100, "cudnn", 64), (_H100, "cudnn", 128), (_A100, "cudnn", 64)
  )
  def test_lengths_between_are_interpolated(self, device, backend, dim):
    def share(tokens):
      return largest_share(
        device, backend, "bfloat16", dim, tokens, causal=False
      )

    self.assertLess(share(1024), share(1400))
    self.assertLess(share(1400), share(2048))
    self.assertEqual(share(10**6), share(LENGTHS[-1]))
    self.assertEqual(share(LENGTHS[0] - 1), 0)

  def test_the_entry_of_the_device_comes_before_that_of_its_platform(self):
    case = {"backend": "cudnn", "dtype": "bfloat16", "head_dim": 64}
    ours, other = (
      largest_share(x, **case, queries=512, causal=False)
      for x in (_H100, _A100)
    )
    self.assertLess(ours, other)  # the faster the kernel, the longer it takes

  def test_what_no_entry_is_for_never_packs(self):
    share = largest_share(
      Target("npu", "x"), "cudnn", "bfloat16", 64, 4096, causal=False
    )
    self.assertEqual(share, 0)


class PredictionTest(absltest.TestCase):
  def test_nothing_left_out_costs_the_glue(self):
    for rates in predict._all_rates():
      dense = predict.seconds(rates, 4096, None, causal=True)
      packed = predict.seconds(rates, 4096, 1.0, causal=True)
      self.assertGreater(packed[0], dense[0])

  def test_table_has_a_row_for_each_share(self):
    lines = predict.ratios().splitlines()
    self.assertEqual(len({line.count("|") for line in lines}), 1)
    self.assertEqual(sum("H100" in line for line in lines), 20)


if __name__ == "__main__":
  absltest.main()
