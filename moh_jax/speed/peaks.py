"""Published matrix peaks, by which a model's FLOPs are judged (MFU)."""

import re

# FLOP/s of dense bfloat16 products with float32 sums. GPUs: NVIDIA's data
# sheets, whose figures with sparsity are halved. TPUs: the pages of the
# versions at cloud.google.com/tpu/docs.
_BFLOAT16 = {
  "H100 PCIe": 756e12,
  "H100 NVL": 835e12,
  "H100": 989e12,
  "H200 NVL": 835e12,
  "H200": 989e12,
  "B200": 2250e12,
  "A100": 312e12,
  "RTX 4090": 165.2e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5p": 459e12,
  "TPU v5": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
  "TPU7x": 2307e12 / 2,  # JAX counts a chip as two devices
}
# What a device's kind says beside that name: the maker, and of GPUs the form
# and the memory. Other words name another device, or a part of one (MIG), and
# so do other memories: an H100 with HBM2e is the PCIe card, an A100 or H100 of
# 64 GB was made for one computer.
_MAKER = re.compile(r"(NVIDIA )?(GeForce )?")
_FORM = re.compile(r"([ -](SXM\d?|PCIe|(40|80|96)GB|HBM3))*", re.IGNORECASE)


def published_peak(kind: str) -> float | None:
  """FLOP/s of bfloat16 products that a device's maker states.

  Args:
    kind: `jax.Device.device_kind`.

  Returns:
    The peak, or None for devices that are not in the table.
  """
  kind = kind[_MAKER.match(kind).end() :]
  for name, peak in _BFLOAT16.items():
    if kind.startswith(name) and _FORM.fullmatch(kind, len(name)):
      return peak
  return None
