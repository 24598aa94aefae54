"""Names of topologies, and figures of devices."""

import pathlib
import re

import jax
from absl.testing import absltest, parameterized

import moh_jax
from moh_jax.runtime.devices import CHIPS, parse_topology, random_settings
from moh_jax.training.flops import published_peak

_GPUS = pathlib.Path(moh_jax.__file__).parent / "runtime" / "gpu_targets"


class RandomSettingsTest(absltest.TestCase):
  def test_those_of_jax_are_left_out(self):
    self.assertEqual(random_settings(), {})
    with jax.enable_x64(True):
      self.assertEqual(random_settings(), {"jax_enable_x64": True})


class ParseTest(parameterized.TestCase):
  @parameterized.parameters(
    ("v5p:2x4x4", "v5p:2x4x4", 32, 8),
    ("v5p-8", "v5p:2x2x1", 4, 1),
    ("v5p-1024", "v5p:8x8x8", 512, 128),
    ("v5litepod-16", "v5e:4x4", 16, 4),
    ("v6e-8", "v6e:2x4", 8, 2),
    ("tpu7x:2x2x1", "tpu7x:2x2x1", 8, 1),
    ("h100", "h100:1", 1, 1),
    ("b200:16", "b200:16", 16, 2),
  )
  def test_both_notations(self, name, canonical, devices, hosts):
    found = parse_topology(name)
    self.assertEqual(
      (found.name, found.devices, found.hosts), (canonical, devices, hosts)
    )

  @parameterized.parameters(
    ("v9-8", "one of a100, h100.*v5e, v5p"),
    ("v5p:2x2", "one of a100"),
    ("v5p-6", "6 cores name no slice.*2x2x2"),
    ("v5e-12", "12 chips name no slice"),
    ("h100:12", "multiple of 8"),
  )
  def test_bad_names_are_told_what_is_allowed(self, name, message):
    with self.assertRaisesRegex(ValueError, message):
      parse_topology(name)


class ChipsTest(absltest.TestCase):
  def test_gpus_are_those_that_xla_is_told_of(self):
    files = {path.stem: path.read_text() for path in _GPUS.glob("*.txtpb")}
    gpus = {n: c for n, c in CHIPS.items() if c.platform == "gpu"}
    self.assertEqual(set(files), set(gpus))
    for name, chip in gpus.items():
      text = files[name]
      said = {
        key: float(re.search(rf"\b{key}: (\d+)", text)[1])
        for key in ("device_memory_size", "core_count")
      }
      self.assertIn(f'"{chip.kind}"', text)
      self.assertEqual(said["core_count"], chip.cores)
      self.assertAlmostEqual(said["device_memory_size"] / chip.memory, 1, 2)

  def test_every_kind_has_a_published_peak(self):
    for chip in CHIPS.values():
      self.assertIsNotNone(published_peak(chip.kind), chip.kind)
