"""Options state defaults and choices of modules that need JAX; are they so?"""

import argparse
import dataclasses

from absl.testing import absltest, parameterized

from moh_jax.cli.arguments import bench, encode_latents, fid, tune_kernels
from moh_jax.inference.latent_set import EncodeOptions
from moh_jax.ops import inception_input
from moh_jax.speed import decode, exactness, layer, options, tiles


def _parse(module, *argv):
  parser = argparse.ArgumentParser()
  module.add_arguments(parser)
  return vars(parser.parse_args(argv))


class DefaultsTest(parameterized.TestCase):
  @parameterized.parameters(
    ("attention", options.SequenceOptions()),
    ("layer", layer.LayerOptions()),
    ("decode", decode.DecodeOptions()),
  )
  def test_of_bench(self, op, wanted):
    stated = dataclasses.asdict(bench.DEFAULTS[op])
    if op == "decode":
      self.assertEmpty(stated.pop("modes"))
    for name, value in stated.items():
      self.assertEqual(getattr(wanted, name), value, name)

  def test_of_bench_are_left_to_the_options(self):
    given = _parse(bench, "attention", "--heads", "8")
    self.assertEqual(
      {name: value for name, value in given.items() if name != "op"},
      {"heads": 8, "json": "", "plot": ""},
    )

  def test_of_encode_latents(self):
    for name, (_, default) in encode_latents.NUMBERS.items():
      value = getattr(EncodeOptions(), name.replace("-", "_"))
      self.assertEqual(value, default, name)
    self.assertEqual(EncodeOptions().bad_images, "raise")

  def test_of_tune_kernels(self):
    given = _parse(tune_kernels, "--out", "x")
    for name, default in dataclasses.asdict(tiles.Workload()).items():
      if name != "head_dim":  # several at once
        self.assertEqual(given[name], default, name)


class ChoicesTest(absltest.TestCase):
  def test_are_those_of_the_modules(self):
    self.assertEqual(bench.MODES, options.MODES)
    self.assertEqual(set(bench.DTYPES), set(exactness.LIMITS))
    self.assertEqual(bench.CACHE_DTYPES, decode.CACHE_DTYPES)
    self.assertEqual(tune_kernels.DTYPES, tiles.DTYPES)
    self.assertEqual(fid.RESIZES, inception_input.RESIZES)


if __name__ == "__main__":
  absltest.main()
