from absl.testing import absltest, parameterized

from moh_jax.speed.peaks import published_peak


class PublishedPeakTest(parameterized.TestCase):
  @parameterized.parameters(
    ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA A100-SXM4-40GB", 312e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6 lite", 918e12),
    ("cpu", None),
  )
  def test_is_that_of_the_kind(self, kind, expected):
    self.assertEqual(published_peak(kind), expected)


if __name__ == "__main__":
  absltest.main()
