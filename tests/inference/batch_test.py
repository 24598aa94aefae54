"""Prompts that wait for rows of a batch, and prefixes that are read once."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from moh_jax.config.llm import RotaryConfig, Sampling
from moh_jax.inference import decoding
from tests.inference import tiny_writer

_RANDOM = dataclasses.replace(
  tiny_writer.RANDOM,
  model=dataclasses.replace(tiny_writer.RANDOM.model, max_length=256),
)
_DRAWN = Sampling(max_new_tokens=60, temperature=1.0, seed=5)


def _generator(size, cache_dtype=None, on_mesh=False, config=_RANDOM):
  how = {"cache_dtype": cache_dtype, "on_mesh": on_mesh}
  return tiny_writer.generator(config, size=size, **how)


def _prompts(lengths, shared=0):
  rng = np.random.default_rng(0)
  prefix = rng.integers(1, 60, shared).tolist()
  return [prefix + rng.integers(1, 60, n).tolist() for n in lengths]


class BatchTest(parameterized.TestCase):
  def _calls(self, name):
    return self.enter_context(
      mock.patch.object(decoding, name, wraps=getattr(decoding, name))
    )

  def _check(self, generator, alone, prompts, sampling=_DRAWN):
    """Every text is what is written after its prompt alone."""
    together = generator.generate(prompts, sampling)
    for index, prompt in enumerate(prompts):
      (one,) = alone.generate([prompt], sampling, first=index)
      self.assertEqual(together[index].tokens, one.tokens)
      self.assertEqual(together[index].finish_reason, one.finish_reason)
      np.testing.assert_allclose(
        together[index].log_probs, one.log_probs, atol=2e-4
      )
    return {one.finish_reason for one in together}

  @pytest.mark.integration
  def test_prompts_join_as_texts_end(self):
    self._check_joins(None)

  def _check_joins(self, cache_dtype):
    join, move = self._calls("join"), self._calls("move")
    prompts = _prompts((3, 40, 11, 1, 25, 38, 7, 16, 30, 5, 2, 9, 12, 31))
    generator = _generator(3, cache_dtype)
    reasons = self._check(generator, _generator(1, cache_dtype), prompts)
    self.assertEqual(reasons, {"end", "length"})
    self.assertGreater(join.call_count, 2)
    self.assertGreater(move.call_count, 0)

  @pytest.mark.integration
  def test_stop_texts_give_rows_free(self):
    sampling = dataclasses.replace(_DRAWN, stop=("a", "e"))
    prompts = _prompts((3, 40, 11, 1, 25))
    reasons = self._check(_generator(2), _generator(1), prompts, sampling)
    self.assertIn("stop", reasons)

  @pytest.mark.integration
  def test_a_shared_prefix_is_read_once(self):
    generator, prompts = _generator(2), _prompts((3, 9, 1, 20, 5, 2), 70)
    programs = generator._programs
    prefill = mock.Mock(wraps=programs.prefill)
    generator._programs = dataclasses.replace(programs, prefill=prefill)
    self.addCleanup(setattr, generator, "_programs", programs)
    self._check(generator, _generator(1), prompts)
    read = [call.args[1].shape for call in prefill.call_args_list]
    self.assertEqual(read[0], (1, 64))
    self.assertLess(max(length for _, length in read[1:]), 64)

  @pytest.mark.integration
  def test_no_prefix_is_shared_that_alone_has_other_keys(self):
    rope = RotaryConfig(scaling="dynamic", factor=4.0, original_length=32)
    model = dataclasses.replace(_RANDOM.model, rope=rope)
    config = dataclasses.replace(_RANDOM, model=model)
    several, alone = (_generator(size, config=config) for size in (2, 1))
    self._check(several, alone, _prompts((3, 20, 1), 96))
    self.assertTrue(_generator(2)._programs.shares)
    self.assertFalse(_generator(2, "bfloat16")._programs.shares)  # it rounds

  @pytest.mark.integration
  def test_devices_share_the_rows(self):
    generator = _generator(4, on_mesh=True)
    join = self._calls("join")
    prompts = _prompts((3, 9, 1, 20, 5, 2, 14), 40)
    self._check(generator, _generator(1), prompts)
    self.assertGreater(join.call_count, 0)


if __name__ == "__main__":
  absltest.main()
