"""`python -m moh_jax plan --no-compile`."""

import json
import pathlib
import textwrap
from unittest import mock

from absl.testing import parameterized

from moh_jax.ops.kernels import triton
from tests.cli import tiny_checkpoint

_LLM = f"{pathlib.Path(__file__).parents[2] / 'configs/llm_stdlib.py'}"
CONFIG = textwrap.dedent("""
  def get_config(width="64"):
    return {
      "model": {
        "family": "llm", "max_length": 64, "width": int(width), "mlp_dim": 64,
        "num_heads": (4, 4), "num_kv_heads": 4, "head_dim": 16,
        "shared_heads": (2, 2), "top_k": (1, 1),
      },
      "data": {
        "source": "tokens", "path": "no/such/folder", "batch_size": 64,
        "sequence_length": 64,
      },
    }
""")


class PlanTest(tiny_checkpoint.CommandTest):
  COMMAND = "plan --no-compile"

  def call(self, *argv, config="run.py"):
    (self.root / "run.py").write_text(CONFIG)
    return super().call("--config", self.root / config, *argv)

  def test_tells_memory_splits_and_time_without_data(self):
    plan = self.report(
      *("--topology=v5e-16", "--config.mesh.data=4", "--config.mesh.fsdp=4"),
    )
    self.assertTrue(plan["fits"])
    self.assertEqual(plan["assumed"], {"vocab_size": 65536})
    self.assertEqual(plan["mesh"]["fsdp"], 4)
    self.assertEqual(plan["topology"]["name"], "v5e:4x4")
    self.assertEqual((plan["unit"], plan["units_per_step"]), ("tokens", 4096))
    rows = {row["name"]: row for row in plan["layouts"]}
    head = rows["head/kernel"]
    self.assertEqual(head["axes"], ["", "fsdp"])
    self.assertEqual(head["bytes"], 64 * 65536 * 4 / 4)
    self.assertEqual(
      sum(row["bytes"] for row in rows.values()), plan["memory"]["parameters"]
    )
    self.assertLess(plan["flops"], plan["baseline_flops"])
    self.assertGreater(plan["tokens_per_second"], 0)

  def test_without_a_compiler_only_the_state_is_said_to_fit(self):
    out = self.done("--topology=h100:8")
    self.assertRegex(out, r"the state fits: .* activations come on top, which")
    self.assertIn("the share is assumed", out)
    argv = "--topology=v5e-8", f"--json={self.root / 'x.json'}"
    status, out, _ = self.call(*argv, config="run.py:32768")
    self.assertEqual(status, 1)
    self.assertIn("the state does not fit: ", out)
    self.assertIn('"fits": false', (self.root / "x.json").read_text())

  def test_what_lies_in_the_hosts_memory_is_copied_in_a_step(self):
    keys = "--config.model.remat=dots", "--config.optim.state_memory=host"
    plans = [self.report("--topology=v5e-8", key) for key in keys]
    here, host = (plan["memory"] for plan in plans)
    self.assertEqual(host["host"], here["optimizer"] - host["optimizer"])
    self.assertGreater(host["host"], 0)
    self.assertEqual(host["total"], here["total"])
    self.assertEqual(plans[0]["step_seconds"], plans[1]["step_seconds"])
    copies = "copies to and from the memory of the host take no time"
    told = [copies in plan["assumptions"] for plan in plans]
    self.assertEqual(told, [False, True])

  def test_figures_of_a_schedule_are_said_to_be_of_its_end(self):
    argv = "--topology=v5e-8", "--config.model.vocab_size=512", "--config"
    out = self.done(*argv, f"{_LLM}:schedule")
    self.assertRegex(out, r"75.0% of the heads active in the end, .*tune\.")
    self.assertIn("attention of 100.0%", out)
    out = self.done(*argv, f"{_LLM}:tune")
    self.assertRegex(out, "(?m)75.0% of the heads active$")

  @parameterized.parameters(
    ("a100:8", "", "kernel"), ("a100:8", "Triton", "dense"),
    ("v5e-16", "Triton", "kernel"),
  )  # fmt: skip
  def test_says_which_form_the_devices_get(self, topology, lacks, form):
    file = self.root / "plan.json"
    argv = f"--topology={topology}", "--config.model.dtype=float32"
    with mock.patch.object(triton, "refused", lambda: lacks):
      out = self.done(*argv, "--json", file)
    self.assertRegex(out, rf"(?m)^attention: {form}$")
    forms = json.loads(file.read_text())["attention"]
    self.assertEqual({layer["name"] for layer in forms}, {form})
