import math

from absl.testing import absltest, parameterized

from moh_jax.config import TextDataConfig, TuneConfig

_MIX = {"source": "tokens", "path": "here", "mix": ("web", "code")}


class TextDataConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    ("source", "digits", "('tokens', 'stdlib', 'fake')"),
    ("tokenizer", "words", "('bpe', 'bytes')"),
    ("sequence_length", 0, "at least 1"),
    ("batch_size", 0, "at least 1"),
    ("prefetch", 0, "at least 1"),
    ("num_threads", 0, "at least 1"),
    ("fake_examples", 0, "at least 1"),
  )
  def test_message_names_field_value_and_what_is_allowed(
    self, field, value, allowed
  ):
    with self.assertRaises(ValueError) as caught:
      TextDataConfig(**{field: value})
    message = str(caught.exception)
    self.assertStartsWith(message, f"data.{field}={value!r} must ")
    self.assertIn(allowed, message)

  @parameterized.parameters("tokens", "stdlib")
  def test_sources_on_disk_need_a_path(self, source):
    with self.assertRaisesRegex(
      ValueError, rf"data\.path='' must name .*data\.source='{source}'"
    ):
      TextDataConfig(source=source)
    TextDataConfig(source=source, path="here")

  @parameterized.parameters("stdlib", "fake")
  def test_only_token_sets_are_mixed(self, source):
    with self.assertRaisesRegex(
      ValueError, rf"data\.mix=\('a',\) must be \(\) .*source='{source}'"
    ):
      TextDataConfig(source=source, path="x", mix=("a",), ratios=(100.0,))

  @parameterized.parameters(
    ({"ratios": (100.0,)}, r"data\.ratios=\(100.0,\) must have one value for"),
    ({"ratios": ()}, r"data\.ratios=\(\) must have one value for each"),
    (
      {"mix": ("a", "a"), "ratios": (50.0, 50.0)},
      r"data\.mix=\('a', 'a'\) must name each source once",
    ),
    ({"ratios": (100.0, 0.0)}, r"data\.ratios=\(100.0, 0.0\) must be above 0"),
    ({"ratios": (120.0, -20.0)}, "must be above 0"),
    ({"ratios": (math.nan, 50.0)}, r"data\.ratios=\(nan, 50.0\) must be above"),
    ({"ratios": (math.inf, 50.0)}, r"data\.ratios=\(inf, 50.0\) must be above"),
    (
      {"ratios": (60.0, 39.0)},
      r"data\.ratios=\(60.0, 39.0\) must sum to 100 \(percent\), not 99",
    ),
    ({"ratios": (0.6, 0.4)}, r"must sum to 100 \(percent\), not 1"),
  )
  def test_ratios_that_do_not_fit_the_mix_are_named(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      TextDataConfig(**{**_MIX, **fields})

  def test_ratios_need_a_mix(self):
    with self.assertRaisesRegex(ValueError, r"data\.ratios=\(100.0,\) must"):
      TextDataConfig(source="tokens", path="here", ratios=(100.0,))

  @parameterized.parameters(((33.33, 66.67),), ((66.7, 33.34),))
  def test_rounded_percents_are_taken(self, ratios):
    self.assertEqual(TextDataConfig(**_MIX, ratios=ratios).ratios, ratios)


class TuneConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    ((0, 5), (3,), r"tune\.top_k_values=\(3,\) must have one value for each"),
    ((), (3,), r"for each of tune\.top_k_steps=\(\)"),
    ((1, 5), (3, 2), r"tune\.top_k_steps=\(1, 5\) must rise from 0"),
    ((0, 5, 5), (3, 2, 1), r"tune\.top_k_steps=\(0, 5, 5\) must rise"),
    ((0, 5, 4), (3, 2, 1), r"tune\.top_k_steps=\(0, 5, 4\) must rise"),
    ((0, 5), (3, 0), r"tune\.top_k_values=\(3, 0\) must be at least 1"),
  )
  def test_bad_schedules_are_named(self, steps, values, message):
    with self.assertRaisesRegex(ValueError, message):
      TuneConfig(top_k_steps=steps, top_k_values=values)

  def test_schedule_may_rise_fall_or_be_empty(self):
    TuneConfig()
    TuneConfig(top_k_steps=(0, 1, 9), top_k_values=(1, 3, 2))


if __name__ == "__main__":
  absltest.main()
