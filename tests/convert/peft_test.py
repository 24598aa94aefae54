"""Adapters of PEFT: round trips, what is refused; `pytest -m transformers`."""

import json
import pathlib
import shutil
import tempfile

import numpy as np
import pytest
from absl.testing import parameterized
from safetensors.numpy import load_file, save_file

from moh_jax.convert.checkpoints import convert, export
from moh_jax.inference.restore import restore
from tests.cli import tiny_checkpoint
from tests.convert import peft_cases, transformers_cases

_TENSORS = "adapter_model.safetensors"


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

  @parameterized.parameters("moh", "joined", "tied")
  @pytest.mark.integration
  def test_goes_out_and_comes_back_bit_for_bit(self, name):
    case, out = self.root / name, self.create_tempdir().full_path
    base, again = str(case / "base"), f"{out}/again"
    convert("peft", str(case / "peft_lora"), again, base=base)
    export(again, f"{out}/peft", to="peft")
    first, second = (
      load_file(pathlib.Path(folder, _TENSORS))
      for folder in (case / "peft_lora", f"{out}/peft")
    )
    self.assertEqual(first.keys(), second.keys())
    for key, x in first.items():
      np.testing.assert_array_equal(x, second[key], key)
    ours, theirs = map(peft_cases.tree_of, (case / "lora", pathlib.Path(again)))
    self.assertEqual(ours.keys(), theirs.keys())
    for key, x in ours.items():
      np.testing.assert_array_equal(x, theirs[key], key)
    served, other = restore(str(case / "lora")), restore(again)
    tokens = np.load(case / "io.npz")["tokens"]
    logits = [
      one.model.apply({"params": one.params}, tokens)[0]
      for one in (served, other)
    ]
    np.testing.assert_array_equal(*logits)
    want = np.load(case / "io.npz")["logits"]
    np.testing.assert_allclose(logits[0], want, rtol=0, atol=1e-5)

  def test_only_named_modules_are_targets(self):
    stored = json.loads(
      (self.root / "joined/peft_lora/adapter_config.json").read_text()
    )
    self.assertEqual(
      stored["target_modules"],
      ["down_proj", "gate_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
    )
    self.assertIsNone(stored["modules_to_save"])

  @parameterized.parameters(
    ({"use_dora": True}, "use_dora=True must be null, false"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern=.* must be null"),
    ({"peft_type": "IA3"}, "peft_type='IA3' must be 'LORA'"),
    ({"r": 0}, "Expected `int` >= 1 - at `.\\.r`"),
    ({"r": 4}, r"lora_A.weight \(3, 24\) instead of \(4, 24\)"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' must be True"),
    ({"layer_replication": [[0, 2]]}, "layer_replication=.* must be null"),
    ({"use_new_thing": True}, "use_new_thing=True must be null"),
  )
  def test_what_we_do_not_compute_is_refused(self, change, words):
    case = self.root / "moh"
    source = pathlib.Path(self.create_tempdir().full_path, "peft")
    shutil.copytree(case / "peft_lora", source)
    path = source / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with self.assertRaisesRegex(ValueError, words):
      out = self.create_tempdir().full_path
      convert("peft", str(source), out, base=str(case / "base"))

  def test_tensors_that_do_not_fit_are_named(self):
    case = self.root / "moh"
    source = pathlib.Path(self.create_tempdir().full_path, "peft")
    shutil.copytree(case / "peft_lora", source)
    tensors = load_file(source / _TENSORS)
    key = next(key for key in tensors if "lora_B" in key)
    projection = "base_model.model.model.layers.0.self_attn.o_proj.weight"
    for changes, words in (
      ({key: tensors[key].astype(np.int8)}, "1 dtype, .*lora_B.weight I8"),
      ({key: np.full_like(tensors[key], np.nan)}, "lora_B.* holds NaN"),
      ({key: None}, "1 missing: .*lora_B"),
      ({"base_model.model.other.lora_A.weight": np.ones((3, 2))},
       "1 not expected: other.lora_A"),
      ({projection: np.zeros((24, 24), np.float32)},
       "o_proj is stored whole and has an adapter"),
      (dict.fromkeys(key for key in tensors if "lora_" in key),
       "none of its tensors is an adapter"),
    ):  # fmt: skip
      given = {n: x for n, x in (tensors | changes).items() if x is not None}
      save_file(given, source / _TENSORS)
      with self.assertRaisesRegex((ValueError, FloatingPointError), words):
        out = self.create_tempdir().full_path
        convert("peft", str(source), out, base=str(case / "base"))

  def _with_saved(self, names):
    """A folder of "joined" with tensors of its base stored whole, its base."""
    case = self.root / "joined"
    source = pathlib.Path(self.create_tempdir().full_path, "peft")
    shutil.copytree(case / "peft_lora", source)
    tensors = load_file(source / _TENSORS)
    base = load_file(case / "hf_base" / "model.safetensors")
    whole = {f"base_model.model.{n}": base[n] for n in names}
    save_file({**tensors, **whole}, source / _TENSORS)
    return str(source), str(case / "base")

  @pytest.mark.integration
  def test_modules_that_are_saved_whole_come_in(self):
    norms = [f"model.layers.{i}.input_layernorm.weight" for i in range(3)]
    out = self.create_tempdir().full_path
    source, base = self._with_saved([*norms, "lm_head.weight"])
    convert("peft", source, out, base=base)
    self.assertIn("head/kernel", peft_cases.tree_of(pathlib.Path(out)))
    source, base = self._with_saved(norms[:2])
    with self.assertRaisesRegex(ValueError, f"1 missing: {norms[2]}"):
      convert("peft", source, f"{out}/other", base=base)

  def _tied(self, saved, **factors):
    """A folder of "tied" with the embedding and the head times factors."""
    source = pathlib.Path(self.create_tempdir().full_path, "peft")
    shutil.copytree(self.root / "tied" / "peft_lora", source)
    path = source / "adapter_config.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"modules_to_save": saved}))
    tensors = load_file(source / _TENSORS)
    embed = tensors["base_model.model.model.embed_tokens.weight"]
    kept = {n: x for n, x in tensors.items() if "lora_" in n}
    for name, factor in factors.items():
      place = "model.embed_tokens" if name == "embed" else "lm_head"
      kept[f"base_model.model.{place}.weight"] = embed * np.float32(factor)
    save_file(kept, source / _TENSORS)
    return str(source), str(self.root / "tied" / "base")

  @parameterized.parameters(
    (["embed_tokens", "lm_head"], {"embed": 1, "head": 1}),
    (["embed_tokens", "model.embed_tokens"], {"embed": 1, "head": 1}),
    (None, {"embed": 1, "head": 1}),
    (None, {"embed": 1}),  # PEFT loads it into the matrix of both
  )
  @pytest.mark.integration
  def test_tied_embeddings_come_in(self, saved, factors):
    source, base = self._tied(saved, **factors)
    out = self.create_tempdir().full_path
    convert("peft", source, out, base=base)
    ours, again = map(peft_cases.tree_of, (self.root / "tied" / "lora", out))
    self.assertEqual(ours.keys(), again.keys())
    for key, x in ours.items():
      np.testing.assert_array_equal(x, again[key], key)

  @parameterized.parameters(
    (["embed_tokens"], {"embed": 1}),
    (["model.embed_tokens"], {"embed": 1}),
    (["lm_head"], {"head": 1}),
    (None, {"head": 1}),
    (["embed_tokens", "lm_head"], {"embed": 1, "head": 1.001}),
  )
  def test_an_embedding_that_is_not_the_head_is_refused(self, saved, factors):
    source, base = self._tied(saved, **factors)
    words = "model.embed_tokens.weight and lm_head.weight must be stored both"
    with self.assertRaisesRegex(ValueError, words):
      convert("peft", source, self.create_tempdir().full_path, base=base)

  @pytest.mark.integration
  def test_layers_without_adapters_stay_without(self):
    source, base = self._with_saved([])
    folder, out = pathlib.Path(source), self.create_tempdir().full_path
    kept = {
      n: x for n, x in load_file(folder / _TENSORS).items() if "q_pr" in n
    }
    save_file(kept, folder / _TENSORS)
    path = folder / "adapter_config.json"
    stored = json.loads(path.read_text()) | {"target_modules": ["q_proj"]}
    path.write_text(json.dumps(stored))
    convert("peft", source, f"{out}/again", base=base)
    export(f"{out}/again", f"{out}/peft", to="peft")
    again = load_file(f"{out}/peft/{_TENSORS}")
    self.assertEqual(kept.keys(), again.keys())
    for name, x in kept.items():
      np.testing.assert_array_equal(again[name], x)

  @pytest.mark.integration
  def test_a_base_and_adapters_belong_together(self):
    case, out = self.root / "moh", self.create_tempdir().full_path
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
    cls.measured = transformers_cases.run_checks(
      "peft_checks.py", "MOH_JAX_TRANSFORMERS_PYTHON", cls.root
    )
    if isinstance(cls.measured, str):
      raise RuntimeError(cls.measured)

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
    logits, _ = served.model.apply({"params": served.params}, tokens)
    want = np.load(case / "trained.npy")
    np.testing.assert_allclose(logits, want, rtol=0, atol=2e-6)
    export(again, f"{out}/peft", to="peft")
    theirs, ours = (
      load_file(pathlib.Path(folder, _TENSORS))
      for folder in (trained, f"{out}/peft")
    )
    self.assertEqual(theirs.keys(), ours.keys())
    for key, x in theirs.items():
      np.testing.assert_array_equal(x, ours[key], key)
