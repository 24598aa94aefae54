"""Language models as folders of transformers, there and back again."""

import dataclasses
import functools
import hashlib
import json
import logging
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from absl.testing import parameterized

from moh_jax.config import LLMConfig, TrainConfig
from moh_jax.convert import llama, llama_config, rules
from moh_jax.convert.checkpoints import convert, export
from moh_jax.convert.llama import released_run
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.data.infer import resolve
from moh_jax.data.tokenizers import BEGIN, END, load_tokenizer, train_bpe
from moh_jax.inference.restore import restore
from moh_jax.models.llm import LLM
from moh_jax.ops.position import rotation
from moh_jax.runtime import checkpoint
from tests.convert import tiny_llm
from tests.convert.stored import save_tensors
from tests.folders import FolderTest
from tests.tools import record_transformers as recorder

_TOKENIZER = train_bpe(["one text", "and another one"], 270)
_IDS = json.loads(_TOKENIZER)["model"]["vocab"]
_GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
_CODE = ["configuration_moh.py", "modeling_moh.py"]
_PLAIN_FILES = ["README.md", "config.json", "model.safetensors"]


class _Case(FolderTest):
  """A folder of transformers, and checkpoints made from it."""

  def setUp(self):
    super().setUp()
    self.source, self.out = self.root / "hf", self.root / "ours"

  def convert(self, kind="llama", source="hf", out="ours", **options):
    source, out = str(self.root / source), str(self.root / out)
    convert(kind, source, out, **options)
    return restore(out)

  def export(self, name="again", **options) -> pathlib.Path:
    export(str(self.out), str(self.root / name), **options)
    return self.root / name

  def save(self, model, **sections):
    """Writes a checkpoint of ours, with no folder that it was made from."""
    config = dataclasses.replace(released_run(model, {}), **sections)
    params = tiny_llm.random_params(model)
    checkpoint.save_params(self.out, params, checkpoint.Metadata(config))


def _json(folder, name="config.json"):
  return json.loads((folder / name).read_text())


def _names(folder):
  return sorted(path.name for path in folder.iterdir())


class ThereAndBackTest(_Case):
  @parameterized.parameters(
    ("float32", 1, "float32"),
    ("bfloat16", 4, "bfloat16"),
    ("float16", 1, "float32"),
  )
  def test_folder_becomes_a_checkpoint_and_comes_back(
    self, dtype, shards, written
  ):
    stored = tiny_llm.write_folder(self.source, tiny_llm.MHA, dtype, shards)
    with self.assertLogs(level=logging.WARNING) as logs:
      restored = self.convert()
    self.assertRegex(" ".join(logs.output), "hf has no tokenizer.json or")
    self.assertEqual(restored.tokenizer_sha256, "")
    config = resolve(released_run(tiny_llm.MHA, {}))
    self.assertEqual(restored.config, config)
    self.assertEqual(config.data.sequence_length, 64)
    chex.assert_trees_all_equal(
      restored.params, tiny_llm.random_params(tiny_llm.MHA, dtype)
    )
    folder = self.export(dtype=written)
    chex.assert_trees_all_equal(
      read_tensors(folder), {n: x.astype(written) for n, x in stored.items()}
    )
    self.assertEqual(_json(folder)["torch_dtype"], written)
    self.assertEqual(_names(folder), _PLAIN_FILES)

  @parameterized.parameters(
    (tiny_llm.MOH, "hf", "moh-hf"),
    (tiny_llm.QUERY_NORM, "hf", "moh-hf"),
    (tiny_llm.QUERY_NORM, "released", "moh-llama3"),
  )
  def test_moh_model_comes_back_as_itself(self, model, form, kind):
    self.save(model)
    folder, is_released = self.export(to=form), form == "released"
    stored, card = _json(folder), (folder / "README.md").read_text()
    self.assertEqual(stored["model_type"] == "llama", is_released)
    self.assertEqual(not list(folder.glob("*.py")), is_released)
    self.assertEqual("SkyworkAI/MoH" in card, is_released)
    again = self.convert(kind, "again", "third")
    self.assertEqual(again.config.model, model)
    chex.assert_trees_all_equal(again.params, tiny_llm.random_params(model))

  def test_ignored_tensors_are_no_obstacle(self):
    stored = tiny_llm.write_folder(self.source, tiny_llm.MHA)  # has lm_head
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2)
    file = self.source / "model-00001-of-00001.safetensors"
    save_tensors(file, stored)
    tied = dataclasses.replace(tiny_llm.MHA, tie_embeddings=True)
    config = json.dumps(llama_config.to_hf(tied))
    (self.source / "config.json").write_text(config)
    with self.assertRaisesRegex(ValueError, "lm_head.weight differs from"):
      self.convert()
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    save_tensors(file, stored)
    self.assertNotIn("head", self.convert().params)
    card = (self.export() / "README.md").read_text()  # without a license
    self.assertNotIn("license:", card)
    self.assertNotIn("trust_remote_code", card)


class BadSourceTest(_Case):
  """Nothing is written of a source that is not whole."""

  def setUp(self):
    super().setUp()
    tiny_llm.write_folder(self.source, tiny_llm.MHA, shards=3)

  @parameterized.parameters(
    ("model-00002-of-00003.safetensors", "llama", "3.safetensors: no such f"),
    ("config.json", "moh-hf", "No such file .*config.json"),
    # Then the shapes decide.
    ("config.json", "llama", "none of .*'llama3-8b'"),
    ("config.json", "moh-llama3", r"none of \['moh-llama3-8b'\]"),
    ("", "moh-hf", "use --from llama"),
  )
  @pytest.mark.integration
  def test_missing_file_and_config_of_another_network(
    self, missing, kind, regex
  ):
    if missing:
      (self.source / missing).unlink()
    with self.assertRaisesRegex((ValueError, FileNotFoundError), regex):
      self.convert(kind)
    self.assertFalse(self.out.exists())


class FilesTest(_Case):
  """The code and the tokenizer of an exported folder."""

  def test_routed_model_has_its_code_and_a_card(self):
    self.save(tiny_llm.MOH, train=TrainConfig(balance_weight=0.25))
    folder = self.export(license="apache-2.0")
    card = (folder / "README.md").read_text()
    for line in (
      "---\nlicense: apache-2.0\nlibrary_name: transformers\n",
      "2 layers of 6, 2 of them always active and 2 chosen by each token; 1 l",
      "Tokens use 66.7% of the heads",
      'AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)',
    ):
      self.assertIn(line, card)
    self.assertEqual(_names(folder), sorted([*_CODE, *_PLAIN_FILES]))
    code = pathlib.Path(llama.__file__).parent / "transformers_code"
    for name in _CODE:
      self.assertEqual((folder / name).read_bytes(), (code / name).read_bytes())
    stored = _json(folder)
    self.assertEqual(stored["router_aux_loss_coef"], 0.25)
    for place in stored["auto_map"].values():
      module, _, name = place.partition(".")
      self.assertIn(f"class {name}(", (folder / f"{module}.py").read_text())

  def test_our_tokenizer_can_be_loaded_and_stops(self):
    self.save(tiny_llm.MOH)
    (self.out / "tokenizer.json").write_bytes(_TOKENIZER)
    folder = self.export()
    stored = _json(folder, "tokenizer_config.json")
    self.assertEqual(stored["tokenizer_class"], "PreTrainedTokenizerFast")
    self.assertEqual((stored["bos_token"], stored["eos_token"]), (BEGIN, END))
    self.assertEqual(
      _json(folder, "generation_config.json"),
      {"bos_token_id": _IDS[BEGIN], "eos_token_id": _IDS[END]},
    )
    # Prompts begin in transformers as ours do, and again in ours.
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours, again = load_tokenizer(self.out), load_tokenizer(folder)
    ids = ours.encode("a b")
    self.assertEqual(theirs.encode("a b").ids, [ours.bos_id, *ids])
    self.assertTrue(ours.add_bos and again.add_bos)
    self.assertEqual(again.encode("a b"), ids)

  def _source_with(self, files):
    model = dataclasses.replace(tiny_llm.MHA, vocab_size=270)
    tiny_llm.write_folder(self.source, model)
    for name, content in files.items():
      (self.source / name).parent.mkdir(exist_ok=True)
      (self.source / name).write_bytes(content)

  def test_tokenizer_comes_along_there_and_back(self):
    files = {
      "tokenizer.json": _TOKENIZER,
      "generation_config.json": b'{"eos_token_id": [1, 2]}',
      "chat_template.jinja": b"x",
      "additional_chat_templates/rag.jinja": b"y",
    }
    for name in ("tokenizer_config", "special_tokens_map", "added_tokens"):
      files[f"{name}.json"] = b"{}"
    self._source_with(files)
    (self.source / "unrelated.json").touch()
    restored = self.convert()
    digest = hashlib.sha256(_TOKENIZER).hexdigest()
    self.assertEqual(restored.tokenizer_sha256, digest)
    folder = self.export()
    for name, content in files.items():
      self.assertEqual((self.out / name).read_bytes(), content)
      self.assertEqual((folder / name).read_bytes(), content)
    self.assertFalse((self.out / "unrelated.json").exists())
    stored = _json(folder)
    self.assertEqual(stored["bos_token_id"], _IDS[BEGIN])
    self.assertEqual(stored["eos_token_id"], [1, 2])

  @parameterized.parameters(
    ({"tokenizer_config.json": b"{"}, "config.json: not valid JSON"),
    (
      {"tokenizer.json": train_bpe(["the quick brown fox jumps " * 9], 271)},
      "ids, more than model.vocab_size",
    ),
  )
  def test_damaged_file_is_named_and_nothing_written(self, files, message):
    self._source_with({"tokenizer.json": _TOKENIZER, **files})
    with self.assertRaisesRegex(ValueError, message):
      self.convert()
    self.assertFalse(self.out.exists())


@functools.cache
def _recorded(file: str) -> dict[str, np.ndarray]:
  with np.load(_GOLDENS / f"{file}.npz") as stored:
    return dict(stored)


_VERSIONS = ("transformers_4.57.6", "transformers_5.23.0")


def _model(version: str, case: str) -> tuple[LLMConfig, dict[str, np.ndarray]]:
  """Our config from their config.json, and their tensors."""
  meta = json.loads(str(_recorded(version)[f"{case}/meta"]))
  tensors = {n: recorder.weight(n, s) for n, s in meta["shapes"].items()}
  return llama_config.from_hf(meta["config"]), tensors


class VersionsTest(parameterized.TestCase):
  """The results of two versions, see tests/tools/record_transformers.py."""

  # The two versions differ in their config.json; the numbers are compared with
  # both, and computed once.
  @parameterized.parameters(*recorder.CASES)
  @pytest.mark.integration
  def test_logits_and_greedy_tokens_are_those_of_transformers(self, case):
    config, tensors = _model(_VERSIONS[0], case)
    self.assertEqual(config, _model(_VERSIONS[1], case)[0])
    table, abstract = llama.model_rules(config), tiny_llm.abstract(config)
    params = rules.load_params(table, tensors, abstract, source="recorded")
    tokens = recorder.tokens().astype(np.int32)
    logits, _ = jax.jit(LLM(config).apply)({"params": params}, tokens)
    prompts = tokens[:, : recorder.PROMPT]
    written = tiny_llm.greedy(config, params, prompts, recorder.NEW)
    for version in _VERSIONS:
      recorded = _recorded(version)
      np.testing.assert_allclose(
        logits[:, recorder.PLACES], recorded[f"{case}/logits"], atol=5e-5
      )
      np.testing.assert_array_equal(written, recorded[f"{case}/written"])

  @parameterized.product(version=_VERSIONS, name=tuple(recorder.ROTATIONS))
  def test_yarn_turns_as_in_transformers(self, version, name):
    dim, theta, scaling = recorder.ROTATIONS[name]
    original = scaling["original_max_position_embeddings"]
    tiny = llama_config.to_hf(tiny_llm.MHA) | {
      "head_dim": dim,
      "rope_theta": theta,
      "rope_scaling": scaling,
      "max_position_embeddings": original,
    }
    model = llama_config.from_hf(tiny)
    self.assertEqual(model.max_length, original * scaling["factor"])
    # One token turns by at most a radian, so the angle can be read off.
    by = rotation(jnp.array([[1]]), model.rope, dim)
    cos, sin = (np.asarray(part[0, 0], np.float64) for part in (by.cos, by.sin))
    *frequencies, factor = _recorded(version)[f"rotation/{name}"]
    np.testing.assert_allclose(np.arctan2(sin, cos), frequencies, rtol=1e-6)
    np.testing.assert_allclose(np.hypot(sin, cos), factor, rtol=1e-6)
