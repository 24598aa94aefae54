"""`python -m moh_jax plan --no-compile`."""

import dataclasses
from unittest import mock

from moh_jax.training import plan as plan_lib
from tests.cli import tiny_checkpoint

# Data that are not here.
_DATA = "--config.data.source=tokens --config.data.path=no/such/folder"


class PlanTest(tiny_checkpoint.CommandTest):
  COMMAND = (
    "plan --no-compile --config configs/llm_stdlib.py "
    "--config.data.batch_size=64"
  )

  def test_tells_memory_and_flops_without_data(self):
    plan = self.report(
      *("--topology=v5e-16", "--config.mesh.data=4", "--config.mesh.fsdp=4"),
      *_DATA.split(),
    )
    self.assertTrue(plan["fits"])
    self.assertEqual(plan["assumed"], {"model.vocab_size": 65536})
    self.assertEqual(plan["topology"]["name"], "v5e:4x4")
    self.assertGreater(plan["state"]["parameters"], 65536 * 256 * 4 / 4)
    self.assertLess(plan["flops"], plan["baseline_flops"])

  def test_without_a_compiler_no_run_is_said_to_fit(self):
    argv = "--topology=h100:8", "--config.optim.accumulation=2"
    out = self.done(*argv)
    self.assertRegex(out, "^may fit: a state of .* of 80.7 GB, .*not asked for")
    self.assertIn("64 examples in 2 microbatch(es) of 32\n", out)
    file = self.root / "x.json"
    argv = "--topology=v5e-8", f"--json={file}"
    status, out, _ = self.call(*argv, "--config.model.width=262144")
    self.assertEqual(status, 1)
    self.assertStartsWith(out, "does not fit: ")
    self.assertIn('"fits": false', file.read_text())

  def test_the_first_line_says_what_would_fit(self):
    make = plan_lib.make_plan

    def compiled(*args):
      plan = make(*args)
      return dataclasses.replace(
        plan, total=1.5 * plan.limit, compiler="libtpu 0"
      )

    with mock.patch.object(plan_lib, "make_plan", compiled):
      status, out, _ = self.call("--topology=v5e-8")
    self.assertEqual(status, 1)
    self.assertRegex(
      out,
      r"^does not fit: .* compiled by libtpu 0; "
      r"--config.optim.accumulation=2 should \([\d.]+ GB\)\n",
    )

  def test_microbatches_that_do_not_split_the_batch_are_fewer(self):
    argv = "--config.optim.accumulation=16", "--config.eval.batch_size=3"
    out = self.done("--topology=h100:8", *argv)
    self.assertStartsWith(out, "may fit with --config.optim.accumulation=8: ")
    self.assertIn("64 examples in 8 microbatch(es) of 8\n", out)

  def test_all_that_does_not_fit_is_refused_at_once(self):
    argv = "--config.data.batch_size=12", "--config.mesh.tensor=16"
    self.assert_refused(
      "data.batch_size=16 fits; mesh.tensor=16 must",
      *("--topology=h100:128", *argv),
    )
