"""`python -m moh_jax plan --no-compile`."""

import json
import pathlib
import textwrap

from absl.testing import absltest, parameterized

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
    self.assertIsNone(plan["proposal"])

  def test_the_table_says_that_it_is_an_estimate(self):
    status, out, _ = self._plan(self._config(), "--topology=h100:8")
    self.assertEqual(status, 0)
    self.assertIn("fits, estimated", out)
    self.assertIn("not compiled", out)
    self.assertIn("the share is assumed", out)

  def test_gpus_need_no_cudnn_here(self):
    config = pathlib.Path(self.create_tempdir().full_path) / "dit.py"
    config.write_text(
      "from configs import dit_digits\n"
      "def get_config():\n"
      "  config = dit_digits.get_config()\n"
      '  config.model.dtype = "bfloat16"\n'
      "  return config\n"
    )
    status, out, err = self._plan(config, "--topology=h100:8")
    self.assertEqual(status, 0, err)
    self.assertIn("fits, estimated", out)

  def test_proposes_what_fits(self):
    config = self._config(width=8192, depth=8)
    status, out, err = self._plan(config, "--topology=v5e-8", "--json=-")
    self.assertEqual(status, 1, err)
    plan = json.loads(out)
    self.assertFalse(plan["fits"])
    self.assertTrue(plan["proposal"]["fits"])
    self.assertGreater(plan["proposal"]["mesh"]["fsdp"], 1)

  @parameterized.parameters(
    (("--topology=v9-8",), "topology='v9-8' must be one of a100"),
    (("--topology=h100:8", "--config.mesh.fsdp=3"), "must divide the 8"),
    (
      ("--topology=h100:8", "--config.optim.accumulation=3"),
      "data.batch_size=64 must be a multiple of",
    ),
    (
      ("--topology=h100:8", "--config.mesh.tensor=8"),
      "mesh.tensor=8.*key/value heads",
    ),
  )
  def test_bad_input_is_one_line(self, argv, message):
    status, _, err = self._plan(self._config(), *argv)
    self.assertEqual(status, 2)
    self.assertRegex(err, message)
    self.assertLen(err.strip().splitlines(), 1)


if __name__ == "__main__":
  absltest.main()
