from absl.testing import absltest

from moh_jax.speed.card.amdahl import expectations
from moh_jax.speed.report import Row


def _row(op, share, form, ms, length=256, **changes):
  return Row("X", op, "forward", length, share, form, ms, **changes)


class ExpectationsTest(absltest.TestCase):
  def test_only_the_core_changes(self):
    cores = [
      _row("attention", 1.0, "dense", 9.0),
      _row("attention", 1.0, "mha", 4.0),
      _row("attention", 0.5, "kernel", 3.0),
      _row("attention", 0.5, "cudnn", 2.0),
      _row("attention", 0.5, "cudnn", 1.0, length=512),
    ]
    active = {"every_head": False}
    layer = _row("layer", 0.5, "auto", 8.5, **active)
    layers = [
      _row("layer", 1.0, "mha", 10.0),
      _row("layer", 0.5, "dense", 9.0, every_head=True),
      layer,
      _row("layer", 0.75, "auto", 9.0, **active),  # core not measured
      _row("layer", 0.5, "auto", 9.0, length=512, **active),  # nor its MHA
      _row("layer", 0.5, "auto", None, **active),
    ]
    # 10 ms, of which 4 become 2.
    self.assertEqual(expectations(layers, cores), [(layer, 0.8)])


if __name__ == "__main__":
  absltest.main()
