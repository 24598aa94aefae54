"""Language models as folders of transformers, there and back again."""

import dataclasses
import hashlib
import json
import logging
import pathlib

import chex
import jax
import numpy as np
import tokenizers
from absl.testing import absltest, parameterized

from moh_jax.cli.main import main
from moh_jax.config import (
  OptimConfig,
  TextDataConfig,
  TrainConfig,
  TuneConfig,
)
from moh_jax.convert import llama, llama_config
from moh_jax.convert.checkpoints import convert, export
from moh_jax.convert.llama import released_run
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.data.tokenizers import BEGIN, END, load_tokenizer, train_bpe
from moh_jax.inference.restore import load_checkpoint_tokenizer, restore
from moh_jax.models.llm import LLM
from moh_jax.runtime import checkpoint
from tests.cli import tiny_checkpoint
from tests.convert import tiny_llm, transformers_cases
from tests.convert.stored import save_tensors

_TOKENIZER = train_bpe(["one text", "and another one"], 270)
_IDS = json.loads(_TOKENIZER)["model"]["vocab"]
_WITH_TEXT = dataclasses.replace(tiny_llm.MHA, vocab_size=270)
_RECORDED = pathlib.Path(__file__).parents[1] / "goldens/transformers.npz"
_CODE = ["configuration_moh.py", "modeling_moh.py"]


class _Case(parameterized.TestCase):
  """A folder of transformers, and checkpoints made from it."""

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.source, self.out = self.folder / "hf", self.folder / "ours"

  def convert(self, kind="llama", source="hf", out="ours", **options):
    source, out = str(self.folder / source), str(self.folder / out)
    convert(kind, source, out, **options)
    return restore(out)

  def export(self, name="again", **options) -> pathlib.Path:
    export(str(self.out), str(self.folder / name), **options)
    return self.folder / name

  def save(self, model, **sections):
    """Writes a checkpoint of ours, with no folder that it was made from."""
    config = dataclasses.replace(released_run(model, {}), **sections)
    params = tiny_llm.random_params(model)
    checkpoint.save_params(self.out, params, checkpoint.Metadata(config))


def _json(folder, name="config.json"):
  return json.loads((folder / name).read_text())


def _names(folder):
  return sorted(path.name for path in folder.iterdir())


class ConvertTest(_Case):
  @parameterized.parameters(("float32", 1), ("bfloat16", 4), ("float16", 1))
  def test_folder_becomes_a_checkpoint(self, dtype, shards):
    stored = tiny_llm.write_folder(self.source, tiny_llm.MHA, dtype, shards)
    _, count = convert("llama", str(self.source), str(self.out))
    self.assertEqual(count, sum(x.size for x in stored.values()))
    restored = restore(str(self.out))
    self.assertEqual(restored.config.model, tiny_llm.MHA)
    self.assertEqual(restored.config.data, TextDataConfig(sequence_length=64))
    self.assertEqual(restored.config.tune, TuneConfig())
    chex.assert_trees_all_equal(
      restored.params, tiny_llm.random_params(tiny_llm.MHA, dtype)
    )

  def test_ignored_tensors_are_no_obstacle(self):
    stored = tiny_llm.write_folder(self.source, tiny_llm.MHA)  # has lm_head
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}
    file = self.source / "model-00001-of-00001.safetensors"
    save_tensors(file, stored | frequencies)
    tied = dataclasses.replace(tiny_llm.MHA, tie_embeddings=True)
    config = json.dumps(llama_config.to_hf(tied))
    (self.source / "config.json").write_text(config)
    self.assertNotIn("head", self.convert().params)
    card = (self.export() / "README.md").read_text()  # without a license
    self.assertNotIn("license:", card)
    self.assertIn("| License | not stated |", card)
    self.assertNotIn("trust_remote_code", card)

  def test_without_config_json_the_shapes_decide(self):
    tiny_llm.write_folder(self.source, tiny_llm.QUERY_NORM, config={})
    with self.assertRaisesRegex(ValueError, "none of .*'llama3-8b'"):
      self.convert()
    with self.assertRaisesRegex(ValueError, r"none of \['moh-llama3-8b'\]"):
      self.convert("moh-llama3")

  def test_named_model_and_given_config_overrule_config_json(self):
    tiny_llm.write_folder(self.source, tiny_llm.MHA, config={"vocab_size": 1})
    with self.assertRaisesRegex(ValueError, "(?s)hf: .*missing.*shape"):
      self.convert(model="llama3-8b")
    file = "hf/model-00001-of-00001.safetensors"
    run = released_run(tiny_llm.QUERY_NORM, {})
    restored = self.convert(source=file, config=run)
    self.assertEqual(restored.config.model, tiny_llm.QUERY_NORM)


class BadSourceTest(_Case):
  """Nothing is written of a source that is not whole."""

  def setUp(self):
    super().setUp()
    tiny_llm.write_folder(self.source, tiny_llm.MHA, shards=3)
    self.shard = self.source / "model-00002-of-00003.safetensors"

  def _refused(self, regex, kind="llama", error=ValueError, **options):
    with self.assertRaisesRegex(error, regex):
      self.convert(kind, **options)
    self.assertFalse(self.out.exists())

  def test_missing_shard(self):
    self.shard.unlink()
    self._refused(f"{self.shard}: no such file", error=FileNotFoundError)

  def test_missing_and_misshapen_tensors(self):
    tensors = dict(read_tensors(self.shard))
    gone, bent = sorted(tensors)[:2]
    del tensors[gone]
    tensors[bent] = np.zeros((3, 3), np.float32)
    save_tensors(self.shard, tensors)
    (self.source / "model.safetensors.index.json").unlink()
    self._refused(rf"1 missing: {gone}; 1 shape: {bent} \(3, 3\)")

  @parameterized.parameters(
    ({"hidden_act": "relu"}, "llama", "config.json: hidden_act='relu'"),
    (
      {"auto_map": {"AutoModel": "modeling_llama.LlamaModel"}},
      *("llama", "config.json: auto_map=.*--from moh-llama3"),
    ),
    (
      {"num_attention_heads": 1, "num_key_value_heads": 1},
      *("moh-llama3", "no head active"),
    ),
    ({}, "moh-hf", "use --from llama"),
    (None, "moh-hf", "config.json: no such file"),
    ("image_size", "llama", "--image-size 224 is not for family 'llm'"),
  )
  def test_config_of_another_network(self, changes, kind, regex):
    if changes is None:
      (self.source / "config.json").unlink()
      self._refused(regex, kind, FileNotFoundError)
    elif changes == "image_size":
      self._refused(regex, kind, image_size=224)
    else:
      stored = llama_config.to_hf(tiny_llm.MHA) | changes
      (self.source / "config.json").write_text(json.dumps(stored))
      self._refused(regex, kind)


class ExportTest(_Case):
  @parameterized.parameters("float32", "bfloat16")
  def test_gives_back_what_was_converted(self, dtype):
    stored = tiny_llm.write_folder(self.source, tiny_llm.MHA, "bfloat16")
    self.convert()
    folder = self.export(dtype=dtype)
    exported = read_tensors(folder)
    self.assertEqual(exported.keys(), stored.keys())
    for name, want in stored.items():
      self.assertEqual(exported[name].dtype, dtype)
      np.testing.assert_array_equal(exported[name], want.astype(dtype))
    self.assertEqual(_json(folder)["torch_dtype"], dtype)

  @parameterized.parameters(
    ("moh", tiny_llm.MOH), ("query_norm", tiny_llm.QUERY_NORM)
  )
  def test_moh_model_comes_back_as_itself(self, _, model):
    tiny_llm.write_folder(self.source, model)
    with self.assertRaisesRegex(ValueError, "use --from moh-hf"):
      self.convert()
    self.assertEqual(self.convert("moh-hf").config.model, model)
    folder = self.export()
    self.assertEqual(_json(folder)["architectures"], ["MoHLlamaForCausalLM"])
    again = self.convert("moh-hf", "again", "third")
    self.assertEqual(again.config.model, model)
    chex.assert_trees_all_equal(again.params, tiny_llm.random_params(model))

  @parameterized.parameters(
    ("llm", {"license": "a: b"}, "--license 'a: b' must be an id"),
    ("llm", {"to": "released"}, "--to released: .*router.kind"),
    ("vit", {"to": "hf"}, "--to 'hf', for a model of 'vit', must be left out"),
    ("vit", {"license": "mit"}, "--license and --scores .* model of 'vit'"),
  )
  def test_bad_options_are_named_and_nothing_written(
    self, family, options, regex
  ):
    if family == "llm":
      self.save(tiny_llm.MOH)
    else:
      tiny_checkpoint.save(self.out)
    before = _names(self.folder)
    with self.assertRaisesRegex(ValueError, regex):
      self.export(**options)
    self.assertEqual(_names(self.folder), before)

  def test_released_form_goes_there_and_back(self):
    self.save(tiny_llm.QUERY_NORM)
    folder = self.export(to="released")
    stored = _json(folder)
    self.assertEqual(stored["architectures"], ["LlamaForCausalLM"])
    self.assertNotIn("auto_map", stored)
    self.assertEmpty(list(folder.glob("*.py")))
    self.assertIn("MoH-LLaMA3 release", (folder / "README.md").read_text())
    again = self.convert("moh-llama3", "again", "third")
    self.assertEqual(again.config.model, tiny_llm.QUERY_NORM)

  def test_commands(self):
    stored = tiny_llm.write_folder(self.source, tiny_llm.MHA, "bfloat16")
    out, again = str(self.out), str(self.folder / "again")
    source = ["--source", str(self.source)]
    status = main(["convert", "--from", "llama", *source, "--out", out])
    self.assertEqual(status, 0)
    options = ["--dtype", "bfloat16", "--shard-bytes", "1000000"]
    options += ["--to", "hf", "--license", "llama3"]
    status = main(["export", "--checkpoint", out, "--out", again, *options])
    self.assertEqual(status, 0)
    chex.assert_trees_all_equal(read_tensors(again), stored)
    card = pathlib.Path(again, "README.md").read_text()
    self.assertIn("license: llama3", card)
    for size in ("0", "5GB"):
      argv = ["--checkpoint", out, "--out", "b", "--shard-bytes", size]
      with self.assertRaises(SystemExit):
        main(["export", *argv])


class FilesTest(_Case):
  """The code and the tokenizer of an exported folder."""

  def test_routed_model_has_its_code(self):
    self.save(tiny_llm.MOH, train=TrainConfig(balance_weight=0.25))
    folder = self.export()
    self.assertEqual(
      _names(folder),
      sorted([*_CODE, "README.md", "config.json", "model.safetensors"]),
    )
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

  def _source_with(self, **files):
    tiny_llm.write_folder(self.source, _WITH_TEXT)
    for name, content in files.items():
      (self.source / name.replace("__", ".")).write_bytes(content)

  def test_tokenizer_comes_along_there_and_back(self):
    files = {
      "tokenizer.json": _TOKENIZER,
      "tokenizer_config.json": b"{}",
      "generation_config.json": b'{"eos_token_id": [1, 2]}',
      "special_tokens_map.json": b"{}",
      "chat_template.jinja": b"x",
    }
    self._source_with(
      **{name.replace(".", "__"): content for name, content in files.items()}
    )
    self.convert()
    metadata, _ = checkpoint.read_metadata(str(self.out))
    digest = hashlib.sha256(_TOKENIZER).hexdigest()
    self.assertEqual(metadata.tokenizer_sha256, digest)
    folder = self.export()
    for name, content in files.items():
      self.assertEqual((self.out / name).read_bytes(), content)
      self.assertEqual((folder / name).read_bytes(), content)
    stored = _json(folder)
    self.assertEqual(stored["bos_token_id"], _IDS[BEGIN])
    self.assertEqual(stored["eos_token_id"], [1, 2])

  def test_stops_of_config_json_come_along(self):
    self._source_with(tokenizer__json=_TOKENIZER)
    stored = _json(self.source) | {"eos_token_id": [1, 5]}
    (self.source / "config.json").write_text(json.dumps(stored))
    self.convert()
    generation = _json(self.export(), "generation_config.json")
    self.assertEqual(generation, {"eos_token_id": [1, 5]})
    tokenizer = load_checkpoint_tokenizer(str(self.out))
    self.assertEqual(tokenizer.stop_ids, (1, 5))

  @parameterized.parameters(
    ({"tokenizer_config__json": b'{"bos_token": 3}'}, "bos_token=3 must be"),
    ({"tokenizer_config__json": b"{"}, "config.json: not valid JSON"),
    ({"generation_config__json": b'{"eos_token_id": 300}'}, "id 300 must"),
    (
      {"tokenizer__json": train_bpe(["the quick brown fox jumps " * 9], 271)},
      "ids, more than model.vocab_size",
    ),
  )
  def test_damaged_file_is_named_and_nothing_written(self, files, message):
    self._source_with(**{"tokenizer__json": _TOKENIZER, **files})
    with self.assertRaisesRegex(ValueError, message):
      self.convert()
    self.assertFalse(self.out.exists())

  def test_one_that_cannot_be_read_is_copied_all_the_same(self):
    self._source_with(tokenizer__model=b"not a model")
    self.convert()
    folder = self.export()
    self.assertEqual((folder / "tokenizer.model").read_bytes(), b"not a model")
    self.assertIsNone(_json(folder)["eos_token_id"])

  def test_absence_is_said_and_no_obstacle(self):
    self._source_with()
    with self.assertLogs(level=logging.WARNING) as logs:
      self.convert()
    self.assertRegex(" ".join(logs.output), "hf has no tokenizer.json or")
    metadata, _ = checkpoint.read_metadata(str(self.out))
    self.assertEqual(metadata.tokenizer_sha256, "")
    self.assertEqual(
      _names(self.export()), ["README.md", "config.json", "model.safetensors"]
    )


class CardTest(_Case):
  def _card(self, **options) -> str:
    return (self.export(**options) / "README.md").read_text()

  def _check(self, card, *lines):
    for line in lines:
      self.assertIn(line, card)

  def test_header_budget_and_size(self):
    self.save(tiny_llm.MOH)
    card = self._card(license="apache-2.0", dtype="bfloat16")
    self._check(
      card.split("---\n")[1],
      *("license: apache-2.0\n", "library_name: transformers\n"),
      "pipeline_tag: text-generation\n",
    )
    count = sum(x.size for x in tiny_llm.tensors(tiny_llm.MOH).values())
    self._check(
      card,
      "| 0-1 | 6 | 2 | 2 | 66.7% |",
      "| 2 | 6 | 3 | 1 | 66.7% |",
      "| Active heads | 66.7% |",
      "| Stored as | bfloat16 |",
      f"| Parameters | {count:,} |",
      "trust_remote_code=True",
      "not trained further",
    )

  def test_recipe_of_a_run_without_its_paths(self):
    self.save(
      dataclasses.replace(tiny_llm.MOH, shared_heads=(2,) * 3, top_k=(2,) * 3),
      train=TrainConfig(steps=100, init_from="/somewhere/private"),
      optim=OptimConfig(lr=2e-5, final_lr=1e-6, weight_decay=0.1),
      data=TextDataConfig(
        source="tokens",
        path="/somewhere/else",
        mix=("books", "code"),
        ratios=(75.0, 25.0),
        sequence_length=16,
        batch_size=4,
      ),
      tune=TuneConfig(top_k_steps=(0, 10), top_k_values=(3, 2)),
    )
    steps = self.out / "checkpoints"
    (steps / "0").rename(steps / "20")
    card = self._card()
    self._check(
      card,
      "| Steps | 20 of 100 |",
      "| Batch | 4 texts of 16 tokens |",
      "| Tokens | 1,280 |",
      "| Data | books 75 %, code 25 % |",
      "| Start | other weights |",
      "| Learning rate | 2e-05, cosine to 1e-06 after 5 steps of warm-up |",
      "| Optimizer | adamw, weight decay 0.1, gradients up to norm 1 |",
      "| Heads chosen | 3 from step 0, 2 from step 10 |",
    )
    for absent in ("/somewhere", "optim.", "Averaged"):
      self.assertNotIn(absent, card)

  def test_scores(self):
    self.save(tiny_llm.MOH)
    scores = self.folder / "scores.json"
    found = {"runs": [{"text": {"bits": 1.25}}], "loss": 2, "step": 0}
    scores.write_text(json.dumps(found))
    card = self._card(scores=str(scores))
    self._check(card, "| runs.0.text.bits | 1.25 |", "| loss | 2 |")

  @parameterized.parameters(
    ("{", ValueError, "scores.json: not valid JSON"),
    ('{"a": "b"}', ValueError, "scores.json: holds no numbers"),
    (
      '{"a": 1, "step": 7}',
      *(ValueError, "scores of step 7, the checkpoint is of step 0"),
    ),
    (None, FileNotFoundError, "scores.json"),
  )
  def test_bad_scores_are_named_and_nothing_is_written(
    self, text, error, regex
  ):
    self.save(tiny_llm.MOH)
    scores = self.folder / "scores.json"
    if text:
      scores.write_text(text)
    before = _names(self.folder)
    with self.assertRaisesRegex(error, regex):
      self.export(scores=str(scores))
    self.assertEqual(_names(self.folder), before)


class RecordedTest(parameterized.TestCase):
  """What transformers computed with our code, see transformers_checks.py."""

  @parameterized.parameters("released_gates", "paper_gates", "head_order")
  def test_transformers_computed_our_numbers(self, name):
    recorded = np.load(_RECORDED)
    model = transformers_cases.model(name)
    params = transformers_cases.params(model)
    tokens, _ = transformers_cases.inputs()
    with jax.default_matmul_precision("highest"):
      logits, aux = jax.jit(LLM(model).apply)({"params": params}, tokens)
      written = transformers_cases.greedy(model, params)
    for key, ours, atol in (
      ("logits", logits, 1e-4),
      ("balance", aux.balance_loss, 1e-5),
      ("greedy", written, 0),
    ):
      theirs = recorded[f"{name}/{key}"]
      np.testing.assert_allclose(ours, theirs, atol=atol, rtol=0)


if __name__ == "__main__":
  absltest.main()
