"""The load of heads during a run, and routers that collapse."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from etils import epath
from flax import traverse_util

from moh_jax.config import LogConfig
from moh_jax.training.metrics import HeadWatch, MetricsWriter, load_picture
from moh_jax.training.step import HEAD_LOADS, HeadLoads, metric_values
from tests.training import tiny

_CONFIG = tiny.deterministic_config(log={"heads": 2, "every": 1})


def _loads(params):
  """Loads of heads as a step of the run measures them."""
  objective = tiny.make_task(_CONFIG)
  rng = np.random.default_rng(0)
  batch = {
    "image": jnp.asarray(rng.integers(0, 256, (4, 8, 8, 1)), jnp.uint8),
    "label": jnp.arange(4),
  }
  loss_fn = jax.jit(objective.loss_fn)
  _, metrics = loss_fn(params, batch, jax.random.key(0), jnp.int32(0))
  return metric_values(metrics)[HEAD_LOADS]


def _collapsed(params):
  """The same parameters with routers that prefer no head: ties go to one."""
  flat = traverse_util.flatten_dict(params)
  return traverse_util.unflatten_dict(
    {
      path: np.zeros_like(x) if path[-1] == "routed" else x
      for path, x in flat.items()
    }
  )


class HeadWatchTest(absltest.TestCase):
  def test_loads_of_a_step_add_up_to_top_k(self):
    by_layer = HeadWatch(_CONFIG).by_layer(_loads(tiny.random_params(_CONFIG)))
    self.assertEqual(list(by_layer), ["stage1.0", "stage2.0", "stage2.1"])
    for load in by_layer.values():
      self.assertAlmostEqual(float(load.sum()), 1.0, places=5)

  def test_heads_are_listed_by_number_whatever_heads_are_shared(self):
    model = dataclasses.replace(
      tiny.LLM, shared_heads=(2, 2), top_k=(1, 1), num_kv_heads=4,
      head_order=((3, 1, 2, 0), (0, 1, 2, 3)),
    )  # fmt: skip
    loads = np.float32([[0.7, 1.0, 0.3, 1.0], [1.0, 1.0, 0.6, 0.4]])
    by_layer = HeadWatch(tiny.llm_config(model=vars(model))).by_layer([loads])
    np.testing.assert_array_equal(by_layer["blocks0.0"], loads[0, [0, 2]])
    np.testing.assert_array_equal(by_layer["blocks0.1"], loads[1, 2:])

  def test_a_collapsed_router_is_called_out_once(self):
    watch = HeadWatch(_CONFIG)
    loads = _loads(_collapsed(tiny.random_params(_CONFIG)))
    with self.assertLogs("moh_jax", "WARNING") as logs:
      values = watch.metrics(1, loads)
      again = watch.metrics(2, loads)
    self.assertLen(logs.records, 2)
    self.assertRegex(
      logs.output[0], r"step 1: the router of layer stage2.0 has collapsed"
    )
    # The first stage has one routed head, so its tokens have no choice.
    expected = {"load_entropy": 0.0, "collapsed_routers": 2.0}
    self.assertEqual(values, expected)
    self.assertEqual(again, expected)

  def test_even_routers_are_not_called_out(self):
    loads = ([[1.0, 1.0]], [[1, 1, 0.5, 0.5], [1, 1, 0.4, 0.6]])
    with self.assertNoLogs("moh_jax", "WARNING"):
      values = HeadWatch(_CONFIG).metrics(1, loads)
    self.assertEqual(values["collapsed_routers"], 0.0)
    self.assertGreater(values["load_entropy"], 0.9)

  def test_due_at_multiples_and_at_the_end(self):
    watch = HeadWatch(_CONFIG)
    self.assertEqual([s for s in range(1, 5) if watch.due(s)], [2, 4])
    log = dataclasses.replace(_CONFIG.log, heads=0)
    never = HeadWatch(dataclasses.replace(_CONFIG, log=log))
    self.assertFalse(any(map(never.due, range(1, 5))))

  def test_microbatches_are_averaged(self):
    parts = jnp.asarray([[[1.0, 0.0]], [[0.5, 0.5]]])  # [parts, layers, H]
    (mean,) = metric_values({"x": HeadLoads((parts,))})["x"]
    np.testing.assert_allclose(mean, [[0.75, 0.25]])

  def test_bars_have_the_height_of_the_load(self):
    picture = load_picture(np.array([1.0, 0.0, 0.25]))
    blue = (picture == (0, 114, 178)).all(-1).sum(0)
    # The line at the even load crosses the first bar.
    self.assertEqual(blue[10], 99)
    self.assertEqual(blue[26], 0)
    self.assertEqual(blue[42], 25)


class WriteLoadsTest(absltest.TestCase):
  def _writer(self, workdir, start=0):
    log = LogConfig(tensorboard=True, progress=False)
    return MetricsWriter(epath.Path(workdir), log, start=start, steps=4)

  def test_writes_a_row_and_a_picture_for_each_layer(self):
    workdir = pathlib.Path(self.create_tempdir().full_path)
    loads = {"stage1.0": np.array([0.25, 2 / 3])}
    writer = self._writer(workdir)
    writer.write_loads(2, loads)
    writer.write_loads(2, loads)
    writer.close()
    (line,) = (workdir / "metrics.jsonl").read_text().splitlines()
    self.assertEqual(
      json.loads(line), {"step": 2, "split": "heads", "stage1.0": [0.25, 0.667]}
    )
    (events,) = (workdir / "tensorboard").iterdir()
    self.assertIn(b"load/stage1.0", events.read_bytes())


if __name__ == "__main__":
  absltest.main()
