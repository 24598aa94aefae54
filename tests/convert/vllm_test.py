"""Exported language models in vLLM: `pytest -m vllm`.

vLLM is that of another Python, which MOH_JAX_VLLM_PYTHON names; it needs no
JAX, and its build for CPUs is enough. It finds our plug-in as where moh_jax is
installed.
"""

import dataclasses
import json
import os
import pathlib
import re
import tempfile
import tomllib
from unittest import mock

import numpy as np
import pytest
from absl.testing import parameterized

from moh_jax.inference.restore import restore
from tests.convert import peft_cases, tiny_llm, transformers_cases
from tests.docs import blocks

pytestmark = pytest.mark.vllm

_PAGE = "docs/serve.md"
# vLLM turns a short text by the frequencies of the longest one, transformers
# and we by its own.
_OTHER = {"dynamic"}
# vLLM's yarn has as many places as the trained ones times the factor.
_YARN = {"qk_norm", "yarn_options"}
# vLLM's attention on CPUs has heads of 32 and more.
_SIZES = {"head_dim": 32, "width": 192}
# Two key/value groups, one for each of two devices.
_TWO_GROUPS = {
  "num_kv_heads": 2,
  "shared_heads": (4, 0, 12),
  "top_k": (4, 6, 0),
}


class VllmTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    # What pip writes when it installs moh_jax.
    installed = self.folder / "site" / "moh_jax-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Name: moh_jax\nVersion: 0\n")
    project = tomllib.loads((blocks.ROOT / "pyproject.toml").read_text())
    lines = []
    for group, points in project["project"]["entry-points"].items():
      lines += [f"[{group}]", *(f"{k} = {v}" for k, v in points.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    self.plugged = {"PYTHONPATH": f"{installed.parent}:{blocks.ROOT}"}

  def _write(self, name, **changes):
    config = dataclasses.replace(
      transformers_cases.model(name), **_SIZES, **changes
    )
    transformers_cases.write(self.folder, config)
    return json.loads((self.folder / "hf" / "config.json").read_text())

  def _serve(self, *options, plugged=True, **environment):
    """What vllm_checks.py prints of the case, or the end of its errors."""
    environment |= self.plugged if plugged else {}
    with mock.patch.dict(os.environ, environment):
      return transformers_cases.run_checks(
        "vllm_checks.py", "MOH_JAX_VLLM_PYTHON", self.folder, *options
      )

  def _assert_ours(self, *options, **more):
    found = self._serve(*options, **more)
    self.assertIsInstance(found, dict, found)
    count = 48 if "--length" in options else 64
    self.assertEqual(found["equal"], [32] * count)
    return found

  @parameterized.parameters(
    *((n,) for n in sorted({*transformers_cases.CASES} - _OTHER - _YARN)),
    *((name, "--length", "64") for name in sorted(_YARN)),
    *((name, "--compile") for name in ("head_order", "per_group")),
  )
  def test_tokens_of_64_prompts_served_together_are_ours(self, name, *options):
    (architecture,) = self._write(name)["architectures"]
    found = self._assert_ours(*options)
    if not options:
      self.assertEqual(found["class"], architecture)

  @parameterized.parameters(
    ("per_group", [6, 6, 12]),  # of 12
    ("whole_group", [12, 12, 12]),
  )
  def test_attention_computes_the_heads_that_tokens_share(self, name, heads):
    self._write(name)
    self.assertEqual(self._assert_ours()["heads"], heads)

  @parameterized.parameters("per_group", "per_group_norms")
  def test_heads_are_split_over_two_devices(self, name):
    self._write(name, **_TWO_GROUPS)
    # vLLM binds its processes to nodes of memory, and there may be one.
    found = self._assert_ours(
      "--devices", "2", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    self.assertEqual(found["heads"], [4, 3, 6])

  def _write_tuned(self, model):
    model = dataclasses.replace(model, head_dim=32, max_length=128)
    peft_cases.write(self.folder, model)
    tokens = np.load(self.folder / "io.npz")["tokens"]
    prompts = tokens[:, : transformers_cases.PROMPT]
    greedy = [
      tiny_llm.greedy(
        one.config.model, one.params, prompts, transformers_cases.GREEDY
      )
      for one in (restore(str(self.folder / n)) for n in ("lora", "base"))
    ]
    self.assertNotEqual(*np.array(greedy).tolist())
    np.savez(
      self.folder / "io.npz",
      tokens=tokens,
      greedy=greedy[0],
      greedy_base=greedy[1],
    )

  @parameterized.parameters(tiny_llm.QUERY_NORM, tiny_llm.MHA)
  def test_adapters_merged_and_at_run_time_beside_the_base(self, model):
    self._write_tuned(model)
    self._assert_ours("--model", "hf_lora")
    (loras,) = re.findall(r"--max-loras \d+", (blocks.ROOT / _PAGE).read_text())
    lora = ("--lora", "peft_lora", *loras.split())
    self._assert_ours("--model", "hf_base", *lora)

  def test_trained_routers_are_served_merged(self):
    self._write_tuned(tiny_llm.MOH)
    self._assert_ours("--model", "hf_lora")

  def test_without_the_plug_in_transformers_code_is_served(self):
    self._write("released_gates")
    found = self._assert_ours("--trust", plugged=False)
    self.assertEqual(found["class"], "TransformersForCausalLM")

  def test_without_the_plug_in_unequal_numbers_of_heads_are_refused(self):
    self._write("heads_by_layer")
    found = self._serve("--trust", plugged=False)
    self.assertIn("config.heads_per_layer is [6, 9, 3]: without the", found)

  def test_routers_stay_float32_in_bfloat16_models(self):
    self._write("released_gates")
    found = self._serve("--dtype", "bfloat16")
    self.assertIsInstance(found, dict, found)
    dtypes = found["dtypes"]
    routers = {x: dtype for x, dtype in dtypes.items() if "router" in x}
    self.assertLen(routers, 3)
    self.assertEqual(set(routers.values()), {"torch.float32"})
    self.assertEqual(dtypes["model.norm.weight"], "torch.bfloat16")

  def test_texts_beyond_the_places_of_yarn_are_refused(self):
    self._write("qk_norm")
    found = self._serve()
    self.assertIn("max_model_len=128 must be at most 64 (yarn)", found)
