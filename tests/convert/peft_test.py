"""Adapters of PEFT: round trips, what is refused; `pytest -m transformers`."""

import json
import pathlib
import shutil
import tempfile

import chex
import jax
import numpy as np
import pytest
from absl.testing import parameterized
from safetensors.numpy import load_file, save_file

from moh_jax.convert.checkpoints import convert, export
from moh_jax.inference.restore import restore
from moh_jax.runtime.files import read_json
from tests.cli import tiny_checkpoint
from tests.convert import peft_cases, transformers_cases

_TENSORS = "adapter_model.safetensors"
_KEY = "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"


def _written(test, names):
  """A folder that holds these cases, as long as the class's tests run."""
  folder = tempfile.TemporaryDirectory()
  root = pathlib.Path(test.enterClassContext(folder))
  for name in names:
    (root / name).mkdir()
    peft_cases.write_case(root / name, name)
  return root


class FolderTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = _written(cls, ("moh", "joined", "tied"))

  def _out(self):
    return self.create_tempdir().full_path

  def _folder(self, case, change=dict, **config):
    """A copy of a case's adapters, with other tensors and another config.

    Args:
      case: name of the case.
      change: from the tensors to those that are written.
      **config: entries of adapter_config.json.
    """
    source = pathlib.Path(self._out(), "peft")
    shutil.copytree(self.root / case / "peft_lora", source)
    path = source / "adapter_config.json"
    path.write_text(json.dumps(read_json(path) | config))
    save_file(change(load_file(source / _TENSORS)), source / _TENSORS)
    return str(source)

  def _convert(self, case, change=dict, **config):
    """Converts such a copy; returns the checkpoint."""
    out, base = f"{self._out()}/again", str(self.root / case / "base")
    convert("peft", self._folder(case, change, **config), out, base=base)
    return out

  def _refused(self, words, *args, **config):
    with self.assertRaisesRegex((ValueError, FloatingPointError), words):
      self._convert(*args, **config)

  @parameterized.parameters("moh", "joined", "tied")
  @pytest.mark.integration
  def test_goes_out_and_comes_back_bit_for_bit(self, name):
    case, again, out = self.root / name, self._convert(name), self._out()
    export(again, f"{out}/peft", to="peft")
    theirs = load_file(f"{out}/peft/{_TENSORS}")
    ours = load_file(case / "peft_lora" / _TENSORS)
    chex.assert_trees_all_equal(ours, theirs)
    chex.assert_trees_all_equal(
      *map(peft_cases.tree_of, (case / "lora", again))
    )
    tokens, want = (np.load(case / "io.npz")[n] for n in ("tokens", "logits"))
    convert(None, str(case / "hf_lora"), f"{out}/merged")
    models = map(restore, (str(case / "lora"), again, f"{out}/merged"))
    logits = [
      jax.jit(x.model.apply)({"params": x.params}, tokens)[0] for x in models
    ]
    np.testing.assert_array_equal(*logits[:2])
    for one in logits[1:]:
      np.testing.assert_allclose(one, want, rtol=0, atol=1e-5)

  def test_only_named_modules_are_targets(self):
    stored = read_json(self.root / "joined/peft_lora/adapter_config.json")
    targets = [f"{x}_proj" for x in ("down", "gate", "o", "q", "up", "v")]
    self.assertEqual(stored["target_modules"], targets)
    self.assertIsNone(stored["modules_to_save"])

  @parameterized.parameters(
    # Entries of the config.
    ({"use_dora": True}, "use_dora=True must be null, false"),
    ({"peft_type": "IA3"}, "peft_type='IA3' must be 'LORA'"),
    ({"r": 0}, "Expected `int` >= 1 - at `.\\.r`"),
    ({"r": 4}, r"lora_A.weight \(3, 24\) instead of \(4, 24\)"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' must be True"),
    # Tensors.
    (lambda x: x | {_KEY: x[_KEY].astype(np.int8)}, "1 dtype, .*lora_B.* I8"),
    (lambda x: x | {_KEY: x[_KEY] * np.nan}, "NaN or infinite .*out/lora_b"),
    (lambda x: {n: x[n] for n in x if n != _KEY}, "1 missing: .*lora_B"),
    (lambda x: x | {"other": np.ones(2)}, "1 not expected: other"),
  )
  def test_what_we_do_not_compute_is_refused(self, change, words):
    is_config = isinstance(change, dict)
    how = change if is_config else {"change": change}
    self._refused(words, "moh", **how)

  @pytest.mark.integration
  def test_modules_that_are_saved_whole_come_in(self):
    base = load_file(self.root / "joined/hf_base/model.safetensors")
    norms = [f"model.layers.{i}.input_layernorm.weight" for i in range(3)]

    def saved(names):
      whole = {f"base_model.model.{n}": base[n] for n in names}
      return lambda tensors: tensors | whole

    out = self._convert("joined", saved([*norms, "lm_head.weight"]))
    self.assertIn("head/kernel", peft_cases.tree_of(pathlib.Path(out)))
    self._refused(f"1 missing: {norms[2]}", "joined", saved(norms[:2]))

  @staticmethod
  def _tied(**factors):
    """The adapters, and the embedding and the head times these factors."""

    def change(tensors):
      embed = tensors["base_model.model.model.embed_tokens.weight"]
      kept = {n: x for n, x in tensors.items() if "lora_" in n}
      for name, factor in factors.items():
        place = "model.embed_tokens" if name == "embed" else "lm_head"
        kept[f"base_model.model.{place}.weight"] = embed * np.float32(factor)
      return kept

    return change

  @parameterized.parameters(
    (["embed_tokens", "lm_head"], {"embed": 1, "head": 1}),
    (None, {"embed": 1}),  # PEFT loads it into the matrix of both
  )
  @pytest.mark.integration
  def test_tied_embeddings_come_in(self, saved, factors):
    out = self._convert("tied", self._tied(**factors), modules_to_save=saved)
    ours = peft_cases.tree_of(self.root / "tied" / "lora")
    chex.assert_trees_all_equal(ours, peft_cases.tree_of(pathlib.Path(out)))

  @parameterized.parameters(
    (["model.embed_tokens"], {"embed": 1}),
    (["lm_head"], {"head": 1}),
    (["embed_tokens", "lm_head"], {"embed": 1, "head": 1.001}),
  )
  def test_an_embedding_that_is_not_the_head_is_refused(self, saved, factors):
    words = "model.embed_tokens.weight and lm_head.weight must both be stored"
    self._refused(words, "tied", self._tied(**factors), modules_to_save=saved)

  @pytest.mark.integration
  def test_layers_without_adapters_stay_without(self):
    kept = {}

    def queries(tensors):
      kept.update({n: x for n, x in tensors.items() if "q_pr" in n})
      return kept

    again = self._convert("joined", queries, target_modules=["q_proj"])
    out = self._out()
    export(again, f"{out}/peft", to="peft")
    again = load_file(f"{out}/peft/{_TENSORS}")
    chex.assert_trees_all_equal(kept, again)

  @pytest.mark.integration
  def test_a_base_and_adapters_belong_together(self):
    case, out = self.root / "moh", self._out()
    with self.assertRaisesRegex(ValueError, "--base None: --from 'peft'"):
      convert("peft", str(case / "peft_lora"), out)
    with self.assertRaisesRegex(ValueError, "family='vit' has no form"):
      base = str(tiny_checkpoint.stored("vit"))
      convert("peft", str(case / "peft_lora"), out, base=base)
    for form in ("peft", "base"):
      words = f"--to '{form}': .*base has no adapters"
      with self.assertRaisesRegex(ValueError, words):
        export(str(case / "base"), out, to=form)


@pytest.mark.transformers
class PeftTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.root = _written(cls, peft_cases.CASES)
    cls.measured = transformers_cases.measure("peft_checks.py", cls.root)

  @parameterized.parameters(*peft_cases.CASES)
  def test_peft_computes_the_same(self, name):
    found = self.measured[name]
    self.assertLess(found["logits"], 2e-6)
    self.assertLess(found["gradients"], 1e-5)
    self.assertLess(found["merged"], 2e-6)
    self.assertEmpty(found["names"])

  @parameterized.parameters(*peft_cases.CASES)
  def test_what_trainer_trained_comes_here(self, name):
    case, out = self.root / name, self.create_tempdir().full_path
    trained, again = case / "trained", f"{out}/again"
    self.assertGreater(self.measured[name]["moved"], 1e-3)
    base = str(case / "base")
    if name == "int8":  # PEFT's base has the rounded matrices
      base = f"{out}/base"
      convert(None, str(case / "hf_base"), base)
    convert("peft", str(trained), again, base=base)
    served = restore(again)
    tokens = np.load(case / "io.npz")["tokens"]
    logits, _ = jax.jit(served.model.apply)({"params": served.params}, tokens)
    want = np.load(case / "trained.npy")
    np.testing.assert_allclose(logits, want, rtol=0, atol=2e-6)
    export(again, f"{out}/peft", to="peft")
    ours = load_file(f"{out}/peft/{_TENSORS}")
    chex.assert_trees_all_equal(load_file(trained / _TENSORS), ours)
