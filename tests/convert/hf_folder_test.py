"""The folder that `export` makes of a language model."""

import dataclasses
import json
import pathlib

import numpy as np
import tokenizers
from absl.testing import absltest, parameterized

from moh_jax.cli.main import main
from moh_jax.config import OptimConfig, TextDataConfig, TrainConfig
from moh_jax.convert import llama
from moh_jax.convert.checkpoints import convert, export
from moh_jax.convert.llama import released_run
from moh_jax.data.text.tokenizers import BEGIN, END, load_tokenizer, train_bpe
from moh_jax.inference.restore import restore
from moh_jax.runtime import checkpoint
from tests.cli import tiny_checkpoint
from tests.convert import tiny_llm, transformers_cases

_TOKENIZER = train_bpe(["one text", "and another one"], 270)
_RECORDED = pathlib.Path(__file__).parents[1] / "goldens/transformers.npz"
_CODE = ["configuration_moh.py", "modeling_moh.py", "router_moh.py"]


class _Case(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.ours = self.folder / "ours"

  def _save(self, model, **sections):
    config = dataclasses.replace(released_run(model, {}), **sections)
    params = tiny_llm.random_params(model)
    checkpoint.save_params(self.ours, params, checkpoint.Metadata(config))

  def _export(self, name="hf", **options) -> pathlib.Path:
    export(str(self.ours), str(self.folder / name), **options)
    return self.folder / name

  def _json(self, name):
    return json.loads((self.folder / "hf" / name).read_text())


class FilesTest(_Case):
  def test_routed_model_has_its_code(self):
    self._save(tiny_llm.MOH, train=TrainConfig(balance_weight=0.25))
    folder = self._export()
    names = sorted(path.name for path in folder.iterdir())
    self.assertEqual(
      names, sorted([*_CODE, "README.md", "config.json", "model.safetensors"])
    )
    code = pathlib.Path(llama.__file__).parent / "transformers_code"
    for name in _CODE:
      self.assertEqual((folder / name).read_bytes(), (code / name).read_bytes())
    stored = self._json("config.json")
    self.assertEqual(stored["router_aux_loss_coef"], 0.25)
    for place in stored["auto_map"].values():
      module, _, name = place.partition(".")
      self.assertIn(f"class {name}(", (folder / f"{module}.py").read_text())

  def test_plain_model_has_no_code(self):
    self._save(tiny_llm.MHA)
    self._export()
    self.assertNotIn("auto_map", self._json("config.json"))
    self.assertEmpty(list(self.folder.glob("hf/*.py")))

  def test_our_tokenizer_can_be_loaded_and_stops(self):
    self._save(tiny_llm.MOH)
    (self.ours / "tokenizer.json").write_bytes(_TOKENIZER)
    self._export()
    stored = self._json("tokenizer_config.json")
    self.assertEqual(stored["tokenizer_class"], "PreTrainedTokenizerFast")
    self.assertEqual((stored["bos_token"], stored["eos_token"]), (BEGIN, END))
    vocabulary = json.loads(_TOKENIZER)["model"]["vocab"]
    self.assertEqual(
      self._json("generation_config.json"),
      {"bos_token_id": vocabulary[BEGIN], "eos_token_id": vocabulary[END]},
    )

  def test_prompts_begin_in_transformers_as_ours_do(self):
    self._save(tiny_llm.MOH)
    (self.ours / "tokenizer.json").write_bytes(_TOKENIZER)
    folder = self._export()
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = load_tokenizer(self.ours)
    text = "a b"
    self.assertTrue(ours.add_bos)
    self.assertEqual(theirs.encode(text).ids, [ours.bos_id, *ours.encode(text)])
    again = load_tokenizer(folder)
    self.assertTrue(again.add_bos)
    self.assertEqual(again.encode(text), ours.encode(text))

  def test_files_of_the_checkpoint_are_kept(self):
    self._save(tiny_llm.MOH)
    given = {
      "tokenizer.json": _TOKENIZER,
      "tokenizer_config.json": b'{"tokenizer_class": "LlamaTokenizer"}',
      "generation_config.json": b'{"eos_token_id": [1, 2]}',
      "special_tokens_map.json": b"{}",
      "chat_template.jinja": b"{{ messages }}",
    }
    for name, content in given.items():
      (self.ours / name).write_bytes(content)
    folder = self._export()
    for name, content in given.items():
      self.assertEqual((folder / name).read_bytes(), content)

  def test_parent_folders_are_made(self):
    self._save(tiny_llm.MHA)
    self.assertTrue((self._export("new/deep/hf") / "config.json").is_file())


class CardTest(_Case):
  def _card(self, **options) -> str:
    return (self._export(**options) / "README.md").read_text()

  def test_header_budget_and_size(self):
    self._save(tiny_llm.MOH)
    card = self._card(license="apache-2.0", dtype="bfloat16")
    header = card.split("---\n")[1]
    self.assertIn("license: apache-2.0\n", header)
    self.assertIn("library_name: transformers\n", header)
    self.assertIn("pipeline_tag: text-generation\n", header)
    self.assertIn("| 0-1 | 6 | 2 | 2 | 66.7% |", card)
    self.assertIn("| 2 | 6 | 3 | 1 | 66.7% |", card)
    self.assertIn("| Active heads | 66.7% |", card)
    self.assertIn("| Stored as | bfloat16 |", card)
    count = sum(x.size for x in tiny_llm.tensors(tiny_llm.MOH).values())
    self.assertIn(f"| Parameters | {count:,} |", card)
    self.assertIn("trust_remote_code=True", card)
    self.assertIn("not trained further", card)

  def test_license_that_nobody_stated(self):
    self._save(tiny_llm.MHA)
    card = self._card()
    self.assertNotIn("license:", card)
    self.assertIn("| License | not stated |", card)
    self.assertNotIn("trust_remote_code", card)

  def test_recipe_of_a_run_without_its_paths(self):
    self._save(
      tiny_llm.MOH,
      train=TrainConfig(steps=50, init_from="/somewhere/private"),
      optim=OptimConfig(lr=0.125),
      data=TextDataConfig(
        source="tokens",
        path="/somewhere/else",
        mix=("books", "code"),
        ratios=(75.0, 25.0),
        sequence_length=16,
        batch_size=4,
      ),
    )
    steps = self.ours / "checkpoints"
    (steps / "0").rename(steps / "20")
    card = self._card()
    self.assertIn("| Steps | 20 of 50 |", card)
    self.assertIn("| Tokens | 1,280 |", card)
    self.assertIn("| Data | books 75 %, code 25 % |", card)
    self.assertIn("| optim.lr | 0.125 |", card)
    self.assertIn("| Start | other weights |", card)
    self.assertNotIn("/somewhere", card)

  def test_scores(self):
    self._save(tiny_llm.MOH)
    scores = self.folder / "scores.json"
    found = {"runs": [{"text": {"bits": 1.25}}], "loss": 2, "step": 0}
    scores.write_text(json.dumps(found))
    card = self._card(scores=str(scores))
    self.assertIn("| runs.0.text.bits | 1.25 |", card)
    self.assertIn("| loss | 2 |", card)

  @parameterized.parameters(
    ("{", "scores.json: not valid JSON"),
    ('{"a": "b"}', "scores.json: holds no numbers"),
    ('{"a": 1, "step": 7}', "scores of step 7, the checkpoint is of step 0"),
  )
  def test_bad_scores_are_named_and_nothing_is_written(self, text, regex):
    self._save(tiny_llm.MOH)
    scores = self.folder / "scores.json"
    scores.write_text(text)
    with self.assertRaisesRegex(ValueError, regex):
      self._export(scores=str(scores))
    self.assertFalse((self.folder / "hf").exists())

  def test_missing_scores_are_named(self):
    self._save(tiny_llm.MOH)
    with self.assertRaisesRegex(FileNotFoundError, "no.json"):
      self._export(scores=str(self.folder / "no.json"))

  def test_license_that_would_break_the_header(self):
    with self.assertRaisesRegex(ValueError, "--license 'a: b' must be an id"):
      export("nowhere", "out", license="a: b")


class FormsTest(_Case):
  def test_released_form_goes_there_and_back(self):
    self._save(tiny_llm.QUERY_NORM)
    folder = self._export(to="released")
    stored = self._json("config.json")
    self.assertEqual(stored["architectures"], ["LlamaForCausalLM"])
    self.assertNotIn("auto_map", stored)
    self.assertEmpty(list(folder.glob("*.py")))
    self.assertIn("MoH-LLaMA3 release", (folder / "README.md").read_text())
    convert("moh-llama3", str(folder), str(self.folder / "again"))
    again = restore(str(self.folder / "again"))
    self.assertEqual(again.config.model, tiny_llm.QUERY_NORM)

  def test_other_models_have_no_released_form(self):
    self._save(tiny_llm.MOH)
    before = sorted(self.folder.iterdir())
    with self.assertRaisesRegex(ValueError, "--to released: .*router.kind"):
      self._export(to="released")
    self.assertEqual(sorted(self.folder.iterdir()), before)

  @parameterized.parameters(
    ({"to": "hf"}, "--to 'hf', for a model of 'vit', must be left out"),
    ({"license": "mit"}, "--license and --scores .* this is a model of 'vit'"),
  )
  def test_image_models_are_one_file(self, options, regex):
    tiny_checkpoint.save(self.ours)
    with self.assertRaisesRegex(ValueError, regex):
      self._export(**options)

  def test_command(self):
    self._save(tiny_llm.QUERY_NORM)
    checkpoint_, out = str(self.ours), str(self.folder / "hf")
    options = ["--to", "released", "--license", "llama3"]
    command = ["export", "--checkpoint", checkpoint_, "--out", out, *options]
    self.assertEqual(main(command), 0)
    self.assertIn("license: llama3", (self.folder / "hf/README.md").read_text())

  def test_folder_without_config_is_no_moh_folder(self):
    self._save(tiny_llm.MOH)
    folder = self._export()
    (folder / "config.json").unlink()
    with self.assertRaisesRegex(FileNotFoundError, "config.json: no such file"):
      convert("moh-hf", str(folder), str(self.folder / "again"))

  def test_plain_folder_names_its_format(self):
    self._save(tiny_llm.MHA)
    folder = self._export()
    with self.assertRaisesRegex(ValueError, "use --from llama"):
      convert("moh-hf", str(folder), str(self.folder / "again"))


class RecordedTest(parameterized.TestCase):
  """What transformers computed with our code, see transformers_checks.py."""

  @parameterized.parameters("released_gates", "paper_gates", "head_order")
  def test_transformers_computed_our_numbers(self, name):
    recorded = np.load(_RECORDED)
    ours = transformers_cases.results(transformers_cases.model(name))
    for key, tolerance in (("logits", 1e-4), ("balance", 1e-5)):
      np.testing.assert_allclose(
        ours[key], recorded[f"{name}/{key}"], atol=tolerance, rtol=0
      )
    np.testing.assert_array_equal(ours["greedy"], recorded[f"{name}/greedy"])


if __name__ == "__main__":
  absltest.main()
