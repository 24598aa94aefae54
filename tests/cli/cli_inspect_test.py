import dataclasses
import json
import pathlib
import tempfile
from unittest import mock

import jax
from absl.testing import absltest, parameterized

from moh_jax.cli import common, inspect
from moh_jax.config import RouterConfig
from moh_jax.models.registry import make_model
from moh_jax.ops.kernels import triton
from moh_jax.runtime.sharding import abstract_params, unbox
from moh_jax.training import flops
from tests.cli import tiny_checkpoint
from tests.ops import devices

_CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"


def _report(*argv):
  status, out, err = tiny_checkpoint.call("inspect", *argv, "--json", "-")
  if status:
    raise AssertionError(err)
  return json.loads(out)


class InspectCommandTest(parameterized.TestCase):
  def _checkpoint(self):
    root = self.enterContext(tempfile.TemporaryDirectory())
    tiny_checkpoint.save(root)
    return root

  def test_describes_a_checkpoint(self):
    report = _report("--checkpoint", self._checkpoint())
    self.assertEqual(report["step"], 0)
    self.assertEqual(report["class_names"], list(tiny_checkpoint.CLASS_NAMES))
    self.assertEqual(report["activated_share"], 0.5)
    self.assertEqual(report["config"]["model"]["top_k"], [1])

  @parameterized.parameters(
    ("two_stage", "two_stage (released)"), ("none", "none")
  )
  def test_gates_have_a_form_where_a_router_weighs(self, kind, shown):
    _, out, err = tiny_checkpoint.call(
      *("inspect", "--config", _CONFIGS / "dit_digits.py"),
      f"--config.model.router.kind={kind}",
    )
    self.assertIn(f"router: {shown}\n", out, err)

  def test_layers_hold_the_head_budget(self):
    (layer,) = _report("--checkpoint", self._checkpoint())["layers"]
    expected = {
      "layer": 0, "stage": 1, "tokens": 4, "num_heads": 4, "head_dim": 2,
      "shared": 1, "routed": 3, "top_k": 1, "active": 2,
      "attention": "dense",
    }  # fmt: skip
    self.assertEqual(layer, expected)

  @parameterized.parameters(
    ("llama3_moh.py", 2, 12.0, 1.0),
    ("llama3_moh.py", 8, 4.0, 1.333),
    ("llama3_moh.py", 16, None, None),  # 8 key/value heads
    ("llm.py:b75", 4, 3.2, 1.067),
    ("vit.py:b75", 4, 1.0, 1.0),  # its form computes every head
  )
  def test_heads_on_the_devices_of_a_tensor_axis(
    self, name, devices, expected, imbalance
  ):
    report = _report(
      "--config", _CONFIGS / name, f"--config.mesh.tensor={devices}"
    )
    layer = report["layers"][0]
    self.assertEqual(layer["per_device"], expected)
    self.assertEqual(layer["imbalance"], imbalance)

  def test_parameters_are_counted(self):
    report = _report("--checkpoint", self._checkpoint())
    params = unbox(abstract_params(*make_model(tiny_checkpoint.CONFIG)))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    self.assertEqual(report["parameters"], count)
    self.assertEqual(sum(report["parameters_by_module"].values()), count)

  @parameterized.parameters(("moh", 0.75), ("mha", 1.0))
  def test_describes_a_config(self, arg, share):
    report = _report("--config", f"{_CONFIGS / 'vit_digits.py'}:{arg}")
    self.assertIsNone(report["step"])
    self.assertLen(report["layers"], 4)
    self.assertEqual(report["activated_share"], share)

  def test_says_which_layers_skip_heads(self):
    report = _report("--config", f"{_CONFIGS / 'llm_stdlib.py'}:moh")
    self.assertEqual({r["attention"] for r in report["layers"]}, {"packed"})
    report = _report("--config", f"{_CONFIGS / 'llm_stdlib.py'}:mha")
    self.assertEqual({r["attention"] for r in report["layers"]}, {"blocked"})
    report = _report("--config", f"{_CONFIGS / 'vit_digits.py'}:moh")
    attention = [row["attention"] for row in report["layers"]]
    self.assertEqual(attention[0], "window")
    self.assertEqual(attention[-1], "dense")

  @parameterized.parameters(
    (RouterConfig("query_norm"), "packed"),
    (RouterConfig("query_norm", straight_through="all"), "blocked"),
    (RouterConfig("none"), "blocked"),
  )
  def test_layers_that_need_all_heads_skip_none(self, router, form):
    config = common.load_config(f"{_CONFIGS / 'llm_stdlib.py'}:moh")
    model = dataclasses.replace(config.model, router=router)
    rows = inspect._layers(dataclasses.replace(config, model=model))
    self.assertEqual({row["attention"] for row in rows}, {form})

  @parameterized.parameters(("", "kernel"), ("Triton", "dense"))
  def test_says_what_is_taken_where_jax_lacks_triton(self, lacks, form):
    config = common.load_config(f"{_CONFIGS / 'llm_stdlib.py'}:moh")
    found = mock.patch.object(triton, "refused", lambda: lacks)
    with found, devices.traced_for("gpu", "NVIDIA A100-SXM4-80GB"):
      rows = inspect._layers(config)
    self.assertEqual({row["attention"] for row in rows}, {form})

  def test_form_of_another_device_is_named(self):
    config = common.load_config(f"{_CONFIGS / 'llm_stdlib.py'}:moh")
    model = dataclasses.replace(config.model, attention_impl="cudnn")
    rows = inspect._layers(dataclasses.replace(config, model=model))
    forms = {row["attention"] for row in rows}
    self.assertEqual(
      forms, {f"cudnn (impossible on this {jax.default_backend()})"}
    )

  @parameterized.parameters(("tune", "packed"), ("schedule", "blocked"))
  def test_layers_whose_top_k_changes_skip_no_head(self, arg, form):
    report = _report("--config", f"{_CONFIGS / 'llm_stdlib.py'}:{arg}")
    self.assertEqual({r["attention"] for r in report["layers"]}, {form})
    self.assertEqual({row["active"] for row in report["layers"]}, {6})

  @parameterized.parameters(
    ("vit_digits.py", {True}), ("dit_digits.py", {False})
  )
  def test_choice_knows_of_a_position_bias(self, name, biased):
    with mock.patch.object(
      flops, "choose_form", wraps=flops.choose_form
    ) as choose:
      _report("--config", f"{_CONFIGS / name}:moh")
    cases = [call.args[1] for call in choose.call_args_list]
    self.assertEqual({case.biased for case in cases}, biased)

  def test_prints_tables(self):
    status, out, _ = tiny_checkpoint.call(
      "inspect", "--checkpoint", self._checkpoint()
    )
    self.assertEqual(status, 0)
    self.assertRegex(out, r"(?m)^layers +count +stage +tokens +num_heads")
    self.assertRegex(out, r"(?m)^classes: 6 \(ant, bee, cat, dog, eel, fox\)$")
    self.assertNotIn("{", out)
    self.assertRegex(out, r"(?m)^activated share: 0\.5000$")

  def test_equal_layers_are_printed_once(self):
    status, out, _ = tiny_checkpoint.call(
      "inspect", "--config", f"{_CONFIGS / 'vit_digits.py'}:moh"
    )
    self.assertEqual(status, 0)
    self.assertRegex(out, r"(?m)^0-1 +2 +1 +64 +4 .* window$")
    self.assertRegex(out, r"(?m)^2-3 +2 +2 +16 +8 .* dense$")

  @parameterized.parameters("--config.model.depths=(1,3)", "")
  def test_takes_overrides(self, override):
    argv = ("--config", _CONFIGS / "vit_digits.py", *filter(None, [override]))
    depths = [row["stage"] for row in _report(*argv)["layers"]]
    self.assertEqual(depths, [1, 2, 2, 2] if override else [1, 1, 2, 2])

  def test_layers_of_a_diffusion_model_have_the_budgets_of_their_runs(self):
    root = self.enterContext(tempfile.TemporaryDirectory())
    tiny_checkpoint.save_dit(root)
    report = _report("--checkpoint", root)
    common = {"tokens": 4, "head_dim": 4, "top_k": 1, "attention": "dense"}
    first = {"layer": 0, "stage": 1, "num_heads": 2, "shared": 1, "routed": 1}
    second = {"layer": 1, "stage": 2, "num_heads": 4, "shared": 2, "routed": 2}
    self.assertEqual(
      report["layers"],
      [{**common, **first, "active": 2}, {**common, **second, "active": 3}],
    )
    self.assertAlmostEqual(report["activated_share"], 5 / 6)
    self.assertEqual(report["class_names"], list("0123456789"))
    self.assertEqual(report["config"]["sample"]["steps"], "4")
    count = sum(report["parameters_by_module"].values())
    self.assertEqual(report["parameters"], count)

  def test_equal_layers_of_a_diffusion_config_are_one_stage(self):
    report = _report("--config", f"{_CONFIGS / 'dit_digits.py'}:moh")
    self.assertEqual([row["layer"] for row in report["layers"]], [0, 1, 2, 3])
    self.assertEqual({row["stage"] for row in report["layers"]}, {1})
    self.assertEqual({row["active"] for row in report["layers"]}, {4})
    self.assertAlmostEqual(report["activated_share"], 4 / 6)

  @parameterized.parameters("nope.py", "vit.py:huge")
  def test_bad_config_is_one_line(self, spec):
    status, out, err = tiny_checkpoint.call(
      "inspect", "--config", _CONFIGS / spec
    )
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertIn(spec.partition(":")[2] or spec, err)


if __name__ == "__main__":
  absltest.main()
