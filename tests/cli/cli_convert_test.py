"""`convert` and `export`: options arrive; tests/convert has what they do."""

import shutil
from unittest import mock

from moh_jax.convert import checkpoints
from tests.cli import tiny_checkpoint
from tests.inference import tiny_writer


def _copies(folder, count):
  """Stands for `convert`: what it writes is a copy."""

  def convert(kind, source, out, **options):
    shutil.copytree(folder, out)
    return "it", count

  return mock.Mock(side_effect=convert)


class ConvertTest(tiny_checkpoint.CommandTest):
  def test_options_reach_the_conversion(self):
    source, out = str(self.root), str(self.root / "out")
    copies = _copies(tiny_checkpoint.stored("vit"), 1234)
    with mock.patch.object(checkpoints, "convert", copies) as convert:
      told = self.done(
        *("convert", "--from=moh-vit", "--source", source, "--out", out),
        *("--key=ema", "--model=moh-vit-s80"),
      )
    self.assertEqual(told, f"it: 1,234 parameters written to {out}\n")
    given = dict(key="ema", model="moh-vit-s80", config=None, base=None)
    convert.assert_called_once_with("moh-vit", source, out, **given)

  def test_what_they_wrote_is_written_again_and_the_rest_on_request(self):
    checkpoint, out = tiny_checkpoint.stored("llm"), self.root / "out"
    again = self.root / "again"
    argv = "export", "--checkpoint", checkpoint, "--out", out
    then = "convert", "--source", out, "--out", again
    for _ in range(2):
      self.done(*argv)
      self.done(*then)
    for command, folder, edited in (
      (argv, out, "config.json"), (then, again, "tokenizer.json"),
    ):  # fmt: skip
      for change in (
        lambda f: (f / "eval.json").write_text("{}"),
        lambda f: (f / "mine").mkdir(),  # such as another model
        lambda f, e=edited: (f / e).write_text((f / e).read_text() + "\n"),
      ):
        change(folder)
        self.assert_refused("or --overwrite", *command)
        self.done(*command, "--overwrite")
        self.done(*command)
      self.assertFalse((folder / "eval.json").exists())
    names = {path.name for path in self.root.iterdir()}
    self.assertEqual(names, {"out", "again"})

  def test_a_file_takes_the_place_of_a_folder_on_request_alone(self):
    argv = "export", "--checkpoint", tiny_checkpoint.stored("vit"), "--out"
    folder = self.root / "exports"
    for name in "a.safetensors", "b.safetensors":
      self.done(*argv, folder / name)
    self.assert_refused("exports: is a folder, must be a file", *argv, folder)
    self.assertLen([*folder.iterdir()], 2)
    self.done(*argv, folder, "--overwrite")
    self.assertTrue(folder.is_file())

  def test_what_is_read_is_not_replaced(self):
    run = self.root / "run"
    shutil.copytree(tiny_checkpoint.stored("llm"), run)
    for out in (run, self.root):
      argv = "export", "--checkpoint", run, "--out", out
      self.assert_refused("no new or empty folder", *argv, "--overwrite")

  def test_a_base_is_not_replaced_by_its_adapters(self):
    base = self.root / "base"
    shutil.copytree(tiny_checkpoint.stored("llm"), base)
    for overwrites in (False, True):
      with checkpoints.written_over(
        str(base), ["adapters", str(base)], overwrites
      ) as out:
        self.assertEqual(out, str(base))
    with checkpoints.written_over(str(base), ["x", None], True) as out:
      shutil.copytree(base, out)
      self.assertNotEqual(out, str(base))

  def test_tokenizer_of_a_language_model_is_described(self):
    out = self.root / "out"
    tiny_writer.save_alphabet(out)
    argv = "convert", "--from=llama", "--source", self.root, "--out", out
    for told in ("tokenizer.json, .*; chat templates: none", "none"):
      with mock.patch.object(checkpoints, "convert", _copies(out, 1)):
        said = self.done(*argv, "--overwrite")
        self.assertRegex(said, rf"\ntokenizer: {told}")
      (out / "tokenizer.json").unlink(missing_ok=True)

  def test_repositories_in_the_hubs_cache_are_sources(self):
    checkpoint = tiny_checkpoint.stored("vit")
    folder = self.root / "models--Chat-UniVi--MoH-ViT-S-80"
    snapshot = folder / "snapshots" / ("0" * 40)
    file = snapshot / "moh_transnext_small_80.safetensors"
    self.done("export", "--checkpoint", checkpoint, "--out", file)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    out = "--out", self.root / "out", "--source"
    with mock.patch("huggingface_hub.constants.HF_HUB_CACHE", self.root):
      told = self.done("convert", *out, "Chat-UniVi/MoH-ViT-S-80")
      self.assertStartsWith(told, "the exported model: ")
      for name, hint in (("a/b", "hf download a/b"), ("a", "no such file")):
        self.assert_refused(hint, "convert", *out, name)

  def test_options_reach_the_export(self):
    checkpoint, out = tiny_checkpoint.stored("llm"), str(self.root / "out")
    with mock.patch.object(checkpoints, "export", return_value=1234) as export:
      told = self.done(
        *("export", "--checkpoint", checkpoint, "--out", out, "--to=hf"),
        *("--dtype=bfloat16", "--license=mit"),
        "--config.eval.use_ema=false",
      )
    self.assertEqual(told, f"1,234 parameters written to {out}\n")
    given = {"to": "hf", "step": 0, "use_ema": False, "base": ""}
    given |= {"dtype": "bfloat16", "license": "mit"}
    export.assert_called_once_with(str(checkpoint), out, **given)
