import math
import re

from absl.testing import absltest, parameterized

from moh_jax.config.data import RandAugmentPolicy, parse_policy


class ParsePolicyTest(parameterized.TestCase):
  @parameterized.parameters(
    ("rand", {}),
    (
      "rand-m9-mstd0.5-inc1",
      {"magnitude": 9, "spread": 0.5, "increasing": True},
    ),
    ("rand-inc1-m9-mstd0.5", {"magnitude": 9, "spread": 0.5, "increasing": 1}),
    ("rand-n3-p0.8-mmax20-m15",
     {"layers": 3, "probability": 0.8, "limit": 20, "magnitude": 15}),
    ("rand-mstd101-inc0", {"spread": math.inf}),
    ("rand-mstd100", {"spread": 100.0}),
  )  # fmt: skip
  def test_means_what_timm_means(self, text, fields):
    self.assertEqual(parse_policy(text, "x"), RandAugmentPolicy(**fields))

  @parameterized.parameters("", "3a")
  def test_has_no_options(self, text):
    self.assertIsNone(parse_policy(text, "x"))

  @parameterized.parameters(
    ("v0", "must be '', '3a', or 'rand' with sections"),
    ("3a-mstd0.5", "must be '', '3a', or 'rand' with sections"),
    ("augmix-m5", "must be '', '3a', or 'rand' with sections"),
    ("rand-", "section '' must be one of the keys m, n, p, mstd, mmax, inc"),
    ("rand-m", "section 'm' must be one of the keys"),
    ("rand-w0", "section 'w0' must be one of the keys"),
    ("rand-tweights", "section 'tweights' must be one of the keys"),
    ("rand-m-9", "section 'm' must be one of the keys"),
    ("rand-m9-m8", "key 'm' comes twice"),
    ("rand-m9.5", "'m9.5' must have a whole number in [0, 30]"),
    ("rand-m31", "'m31' must have a whole number in [0, 30]"),
    ("rand-n0", "'n0' must have a whole number in [1, 15]"),
    ("rand-p1.5", "'p1.5' must have a number in [0, 1]"),
    ("rand-inc2", "'inc2' must have a whole number in [0, 1]"),
    ("rand-m" + "9" * 40, "must be one of the keys"),
  )
  def test_names_what_is_not_understood(self, text, message):
    with self.assertRaisesRegex(
      ValueError, rf"data\.auto_augment=.*{re.escape(message)}"
    ):
      parse_policy(text, "data.auto_augment")


if __name__ == "__main__":
  absltest.main()
