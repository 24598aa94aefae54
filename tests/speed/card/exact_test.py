from unittest import mock

from absl.testing import absltest

from moh_jax.ops import attention as ops
from moh_jax.speed.card import exact


class ExactTest(absltest.TestCase):
  def _checks(self, attend=ops.attention, forms=("packed",), tokens=32):
    with mock.patch.object(exact, "attention", attend):
      return exact.measure(tokens, "float32", 8, forms)["checks"]

  def test_forms_are_exact_in_every_case(self):
    checks = self._checks()
    self.assertEqual([c["case"] for c in checks], list(exact.CASES))
    for check in checks:
      self.assertEqual((check["form"], check["fault"]), ("packed", None))
      self.assertLess(check["max_error"], 1e-5)

  def test_forms_that_are_not_for_the_device_are_left_out(self):
    self.assertEqual(self._checks(forms=("cudnn",)), [])

  def test_what_fails_or_is_wrong_is_a_fault_of_its_own(self):
    def wrong(q, k, v, *, segments, implementation, **options):
      if segments is not None:
        raise RuntimeError("no documents")
      out = ops.attention(q, k, v, implementation=implementation, **options)
      return out * 1.01 if options["causal"] else out

    with mock.patch.dict(exact.CASES):
      del exact.CASES["grouped"]
      faults = {c["case"]: c["fault"] for c in self._checks(wrong)}
    self.assertIsNone(faults["bidirectional"])
    self.assertIn("relative error of the outputs 1.0e-02", faults["causal"])
    self.assertEqual(
      faults["segments"], "does not run: RuntimeError: no documents"
    )


if __name__ == "__main__":
  absltest.main()
