"""Rows of a batch, with every order of a TPU pod's chips that JAX gives."""

import math
import unittest

import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.config import MeshConfig
from moh_jax.runtime import sharding
from moh_jax.runtime.devices import absent_devices, missing_packages
from tests.runtime.sharding_test import assemble

pytestmark = pytest.mark.compiles


class BatchRowsTest(parameterized.TestCase):
  @parameterized.parameters("v5e:4x4", "v5p:4x4x4")
  def test_global_batch_is_in_order(self, target):
    if missing_packages(target):
      raise unittest.SkipTest("needs libtpu")
    devices = absent_devices(target)
    powers = [2**i for i in range(int(math.log2(len(devices))) + 1)]
    tried, contiguous = 0, True
    for fsdp in powers:
      for tensor in powers:
        if fsdp * tensor > len(devices):
          continue
        mesh = sharding.make_mesh(MeshConfig(fsdp=fsdp, tensor=tensor), devices)
        size = 2 * len(devices)
        np.testing.assert_array_equal(assemble(mesh, size), np.arange(size))
        rows = sharding.batch_rows(mesh, size, 0)
        contiguous &= rows[-1] - rows[0] == len(rows) - 1
        tried += 1
    self.assertGreater(tried, 10)
    self.assertFalse(contiguous)  # so that this test tests something
