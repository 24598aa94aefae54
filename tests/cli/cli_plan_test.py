"""`python -m moh_jax plan --no-compile`."""

import json
from unittest import mock

import pytest
from absl.testing import parameterized

from moh_jax.ops.kernels import triton
from tests.cli import tiny_checkpoint

_LLM = "configs/llm_stdlib.py"
# Data that are not here.
_DATA = "--config.data.source=tokens --config.data.path=no/such/folder"


class PlanTest(tiny_checkpoint.CommandTest):
  COMMAND = f"plan --no-compile --config {_LLM} --config.data.batch_size=64"

  def test_tells_memory_splits_and_time_without_data(self):
    plan = self.report(
      *("--topology=v5e-16", "--config.mesh.data=4", "--config.mesh.fsdp=4"),
      *_DATA.split(),
    )
    self.assertTrue(plan["fits"])
    self.assertEqual(plan["assumed"], {"vocab_size": 65536})
    self.assertEqual(plan["topology"]["name"], "v5e:4x4")
    self.assertEqual((plan["unit"], plan["units_per_step"]), ("tokens", 16384))
    rows = {row["name"]: row for row in plan["layouts"]}
    table = rows["embed/embedding"]
    self.assertEqual(table["axes"], ["fsdp", ""])
    self.assertEqual(table["bytes"], 65536 * 256 * 4 / 4)
    self.assertEqual(
      sum(row["bytes"] for row in rows.values()), plan["memory"]["parameters"]
    )
    self.assertLess(plan["flops"], plan["baseline_flops"])
    self.assertGreater(plan["tokens_per_second"], 0)

  @pytest.mark.integration
  def test_without_a_compiler_no_run_is_said_to_fit(self):
    out = self.done("--topology=h100:8", "--config.optim.accumulation=2")
    self.assertRegex(out, "(?m)^should fit: .* at least, .* at most, of 80.655")
    self.assertIn("GB  of one microbatch and the sum over 2\n", out)
    self.assertIn("the share is assumed", out)
    argv = "--topology=v5e-8", "--config.data.batch_size=1024"
    status, out, _ = self.call(*argv)
    self.assertEqual(status, 1)
    self.assertRegex(
      out,
      r"(?m)^may not fit: .*\n"
      r"should fit: --config.optim.accumulation=2 needs about",
    )
    argv = "--topology=v5e-8", f"--json={self.root / 'x.json'}"
    status, out, _ = self.call(*argv, "--config.model.width=262144")
    self.assertEqual(status, 1)
    self.assertIn("\ndoes not fit: ", out)
    self.assertIn('"fits": false', (self.root / "x.json").read_text())
    self.assertIn("no number of microbatches fits: ", out)

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

  def test_a_form_that_this_machine_cannot_run(self):
    keys = (
      "--config.model.attention_impl=cudnn",
      "--config.model.dtype=bfloat16",
    )
    out = self.done("--topology=h100:8", *keys)
    self.assertRegex(out, "(?m)^attention: cudnn$")

  @parameterized.parameters(
    ("a100:8", "", "kernel"), ("a100:8", "Triton", "dense"),
    ("v5e-16", "Triton", "splash"),
  )  # fmt: skip
  @pytest.mark.integration
  def test_says_which_form_the_devices_get(self, topology, lacks, form):
    file = self.root / "plan.json"
    argv = f"--topology={topology}", "--config.model.dtype=float32"
    with mock.patch.object(triton, "refused", lambda: lacks):
      out = self.done(*argv, "--json", file)
    self.assertRegex(out, rf"(?m)^attention: {form}$")
    forms = json.loads(file.read_text())["attention"]
    self.assertEqual({layer["name"] for layer in forms}, {form})
