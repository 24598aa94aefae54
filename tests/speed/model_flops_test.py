"""FLOPs of training steps against figures of the papers and by hand."""

import dataclasses

from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.data.infer import resolve
from moh_jax.speed.model_flops import step_flops, train_flops
from moh_jax.speed.model_forms import LayerForm
from moh_jax.speed.options import bench_run, with_length
from tests.training import tiny


def _flops(model, batch=1, length=None):
  run = resolve(bench_run(model, batch))
  if length:
    run = with_length(run, length)
  return train_flops(run)


class TrainFlopsTest(parameterized.TestCase):
  @parameterized.parameters(
    # Multiplications and additions of a forward pass, in 1e9: arXiv:2212.09748
    # and 2311.17132; the window's products of the latter are not counted.
    ("dit-xl2", 118.6, 0.001),
    ("transnext-base", 18.4, 0.03),
  )
  def test_published_figures(self, name, expected, tolerance):
    flops = _flops(config_lib.released_model(name)) / 3 / 2 / 1e9
    self.assertAlmostEqual(flops, expected, delta=expected * tolerance)

  def test_language_model_by_hand(self):
    model = dataclasses.replace(tiny.LLM, loss_chunk=4)
    batch, length = 2, 16
    tokens, seen = batch * length, (length + 1) / 2
    # Of 4 heads 3 are active; 2 have keys and values.
    head, active = model.head_dim, 3
    layer = 2 * model.width * head * (2 * active + 2 * 2)
    layer += 2 * model.width * model.mlp_dim * 3
    # Scores of three routed heads and of two groups.
    layer += 2 * model.width * (3 + 2)
    layer += 4 * active * seen * head
    forward = 2 * layer + 2 * model.width * model.vocab_size
    self.assertEqual(_flops(model, batch, length), 3 * tokens * forward)

  @parameterized.parameters(("packed", 0.75), ("blocked", 1), ("dense", 1))
  def test_computed_are_all_projections_and_the_attention_of_the_form(
    self, name, heads
  ):
    model, batch, length = tiny.LLM, 2, 16
    run = with_length(resolve(bench_run(model, batch)), length)
    flops = step_flops(run)
    keys = 2 * length / (length + 1) if name == "dense" else 1.0
    found = flops.computed([LayerForm(name, heads, keys)])
    # Two layers of 4 heads, 3 of them active.
    tokens = 2 * batch * length
    idle = tokens * 4 * model.width * model.head_dim
    each = tokens * 4 * model.head_dim
    computed = heads * 4 * (length if name == "dense" else (length + 1) / 2)
    self.assertEqual(found["attention"], 3 * each * computed)
    needed = 3 * each * 3 * (length + 1) / 2
    self.assertEqual(found["products"], flops.active - needed + 3 * idle)

  def test_follow_the_batch_and_the_active_heads(self):
    one = _flops(tiny.DIT)
    self.assertEqual(_flops(tiny.DIT, 3), 3 * one)
    more = dataclasses.replace(tiny.DIT, top_k=(1, 2))
    self.assertGreater(_flops(more), one)

  def test_forms_of_attention_do_not_matter(self):
    counts = {
      _flops(dataclasses.replace(tiny.LLM, attention_impl=form), 2, 32)
      for form in ("auto", "dense")
    }
    self.assertLen(counts, 1)


if __name__ == "__main__":
  absltest.main()
