"""`python -m moh_jax plan --no-compile`."""

import json
import pathlib
import textwrap
from unittest import mock

from absl.testing import absltest, parameterized

from moh_jax.ops.kernels import triton
from tests.cli import tiny_checkpoint

_CONFIG = """
  def get_config():
    return {
      "model": {
        "family": "llm", "max_length": 64, "width": WIDTH, "mlp_dim": 64,
        "num_heads": (4,) * DEPTH, "num_kv_heads": 4, "head_dim": 16,
        "shared_heads": (2,) * DEPTH, "top_k": (1,) * DEPTH,
      },
      "data": {
        "source": "tokens", "path": "no/such/folder", "batch_size": 64,
        "sequence_length": 64,
      },
    }
"""


class PlanCommandTest(parameterized.TestCase):
  def _config(self, width=64, depth=2):
    text = textwrap.dedent(_CONFIG)
    text = text.replace("WIDTH", str(width)).replace("DEPTH", str(depth))
    path = pathlib.Path(self.create_tempdir().full_path) / "run.py"
    path.write_text(text)
    return path

  def _plan(self, config, *argv):
    return tiny_checkpoint.call(
      "plan", "--config", config, "--no-compile", *argv
    )

  def test_tells_memory_splits_and_time_without_data(self):
    status, out, err = self._plan(
      self._config(),
      *("--topology=v5e-16", "--config.mesh.data=4", "--config.mesh.fsdp=4"),
      "--json=-",
    )
    self.assertEqual(status, 0, err)
    plan = json.loads(out)
    self.assertTrue(plan["fits"])
    self.assertEqual(plan["assumed"], {"vocab_size": 65536})
    self.assertEqual(plan["mesh"]["fsdp"], 4)
    self.assertEqual(plan["topology"]["name"], "v5e:4x4")
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
    status, out, _ = self._plan(self._config(), "--topology=h100:8")
    self.assertEqual(status, 0)
    self.assertRegex(out, r"the state fits: .* activations come on top, which")
    self.assertIn("the share is assumed", out)
    large = self._config(width=16384, depth=8)
    status, out, _ = self._plan(large, "--topology=v5e-8")
    self.assertEqual(status, 1)
    self.assertIn("the state does not fit: ", out)
    status, out, _ = self._plan(large, "--topology=v5e-8", "--json=-")
    self.assertEqual((status, json.loads(out)["fits"]), (1, False))

  def test_what_lies_in_the_hosts_memory_is_copied_in_a_step(self):
    plans = []
    for key in ("model.remat=dots", "optim.state_memory=host"):
      status, out, err = self._plan(
        *(self._config(), "--topology=v5e-8", "--json=-", f"--config.{key}")
      )
      self.assertEqual(status, 0, err)
      plans.append(json.loads(out))
    here, host = (plan["memory"] for plan in plans)
    self.assertEqual(host["host"], here["optimizer"] - host["optimizer"])
    self.assertGreater(host["host"], 0)
    self.assertEqual(host["total"], here["total"])
    self.assertEqual(plans[0]["step_seconds"], plans[1]["step_seconds"])
    copies = "copies to and from the memory of the host take no time"
    told = [copies in plan["assumptions"] for plan in plans]
    self.assertEqual(told, [False, True])

  def test_figures_of_a_schedule_are_said_to_be_of_its_end(self):
    spec = pathlib.Path(__file__).parents[2] / "configs" / "llm_stdlib.py"
    argv = "--topology=v5e-8", "--config.model.vocab_size=512"
    _, out, _ = self._plan(f"{spec}:schedule", *argv)
    self.assertRegex(out, r"75.0% of the heads active in the end, .*tune\.")
    self.assertIn("attention of 100.0%", out)
    _, out, _ = self._plan(f"{spec}:tune", *argv)
    self.assertRegex(out, "(?m)75.0% of the heads active$")

  @parameterized.parameters(
    ("a100:8", "", "kernel"), ("a100:8", "Triton", "dense"),
    ("v5e-16", "Triton", "kernel"),
  )  # fmt: skip
  def test_says_which_form_the_devices_get(self, topology, lacks, form):
    argv = f"--topology={topology}", "--config.model.dtype=float32"
    with mock.patch.object(triton, "refused", lambda: lacks):
      _, out, _ = self._plan(self._config(), *argv)
      _, report, _ = self._plan(self._config(), *argv, "--json=-")
    self.assertRegex(out, rf"(?m)^attention: {form}$")
    forms = json.loads(report)["attention"]
    self.assertEqual({layer["name"] for layer in forms}, {form})


if __name__ == "__main__":
  absltest.main()
