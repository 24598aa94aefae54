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
    ("NVIDIA A100 80GB PCIe", 312e12),
    ("NVIDIA A100-PCIE-40GB", 312e12),
    ("NVIDIA H200", 989e12),
    ("NVIDIA H200 NVL", 835e12),
    ("NVIDIA GeForce RTX 4090", 165.2e12),
    ("TPU v4", 275e12),
    ("cpu", None),
    # Other devices whose names hold one of the table, and a part of one.
    ("NVIDIA RTX A1000", None),
    ("NVIDIA A100X", None),
    ("NVIDIA GB200", None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ("NVIDIA GeForce RTX 4090 D", None),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ("NVIDIA H100 80GB HBM2e", None),
    ("NVIDIA A100-SXM-64GB", None),
    ("NVIDIA A100-4-20C", None),
    ("NVIDIA H100 96GB HBM3", 989e12),
    ("A100-SXM-80GB", 312e12),
    ("AMD Instinct MI300X", None),
    ("TPU v5p", 459e12),
    ("TPU7x", 1153.5e12),
    ("TPU v4 lite", None),
  )
  def test_is_that_of_the_kind(self, kind, expected):
    self.assertEqual(published_peak(kind), expected)


if __name__ == "__main__":
  absltest.main()
