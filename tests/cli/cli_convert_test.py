"""`convert` and `export`: options arrive; tests/convert has what they do."""

from unittest import mock

from PIL import Image

from moh_jax.convert import checkpoints
from tests.cli import tiny_checkpoint
from tests.inference import tiny_writer


class ConvertTest(tiny_checkpoint.CommandTest):
  def test_options_reach_the_conversion(self):
    source, out = str(self.root), str(tiny_checkpoint.stored("vit"))
    with mock.patch.object(checkpoints, "convert") as convert:
      convert.return_value = "it", 1234
      told = self.done(
        *("convert", "--from=moh-vit", "--source", source, "--out", out),
        *("--key=ema", "--model=moh-vit-s80", "--image-size=32"),
      )
    self.assertEqual(told, f"it: 1,234 parameters written to {out}\n")
    given = dict(
      key="ema", model="moh-vit-s80", config=None, image_size=32, base=None
    )
    convert.assert_called_once_with("moh-vit", source, out, **given)

  def test_tokenizer_of_a_language_model_is_described(self):
    out = self.root / "out"
    tiny_writer.save_alphabet(out)
    argv = "convert", "--from=llama", "--source", self.root, "--out", out
    for told in (
      "tokenizer.json, .*; chat templates: none",
      "none that can be",
    ):
      with mock.patch.object(checkpoints, "convert", return_value=("it", 1)):
        self.assertRegex(self.done(*argv), rf"\ntokenizer: {told}")
      (out / "tokenizer.json").unlink(missing_ok=True)

  def test_a_folder_is_pushed_where_a_token_is_set(self):
    checkpoint, out = tiny_checkpoint.stored("vit"), str(self.root / "folder")
    argv = "export", "--checkpoint", checkpoint, "--out", out, "--to=folder"
    argv = *argv, "--push=me/digits"
    with mock.patch("huggingface_hub.get_token", return_value="hf_x"):
      file = (word for word in argv if word != "--to=folder")
      self.assert_refused("--push='me/digits' needs a folder: --to", *file)
    with mock.patch("huggingface_hub.get_token", return_value=None):
      self.assert_refused("--push='me/digits' needs a token: hf auth", *argv)
    self.assertFalse((self.root / "folder").exists())
    hub = mock.Mock(**{"upload_folder.return_value": "https://hub/me/digits"})
    with (
      mock.patch("huggingface_hub.get_token", return_value="hf_x"),
      mock.patch("huggingface_hub.HfApi", return_value=hub),
    ):
      self.assertIn("https://hub/me/digits\n", self.done(*argv))
    hub.create_repo.assert_called_once_with("me/digits", exist_ok=True)
    hub.upload_folder.assert_called_once_with(
      repo_id="me/digits", folder_path=out
    )

  def test_commands_read_an_exported_folder(self):
    checkpoint, out = tiny_checkpoint.stored("vit"), self.root / "folder"
    self.done("export", "--checkpoint", checkpoint, "--out", out, "--to=folder")
    image = self.root / "image.png"
    Image.new("RGB", (8, 8)).save(image)
    told, expected = (
      self.done("classify", "--checkpoint", place, image)
      for place in (out, checkpoint)
    )
    self.assertEqual(told, expected)

  def test_commands_read_public_weights_by_their_usual_names(self):
    checkpoint = tiny_checkpoint.stored("vit")
    folder = self.root / "models--Chat-UniVi--MoH-ViT-S-80"
    snapshot = folder / "snapshots" / ("0" * 40)
    file = snapshot / "moh_transnext_small_80.safetensors"
    self.done("export", "--checkpoint", checkpoint, "--out", file)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    image = self.root / "image.png"
    Image.new("RGB", (8, 8)).save(image)
    expected = self.done("classify", "--checkpoint", checkpoint, image)
    cache = mock.patch("huggingface_hub.constants.HF_HUB_CACHE", self.root)
    for place in (file, snapshot, "Chat-UniVi/MoH-ViT-S-80"):
      with cache:
        told = self.done("classify", "--checkpoint", place, image)
      self.assertEqual(told, expected, place)
    with cache:
      for name, hint in (("a/b", "hf download a/b"), ("a", "no such file")):
        argv = "--source", name, "--out", self.root / "out"
        self.assert_refused(hint, "convert", *argv)

  def test_options_reach_the_export(self):
    checkpoint, out = tiny_checkpoint.stored("llm"), str(self.root / "out")
    scores = str(self.root)
    with mock.patch.object(checkpoints, "export", return_value=1234) as export:
      told = self.done(
        *("export", "--checkpoint", checkpoint, "--out", out, "--to=hf"),
        *("--dtype=bfloat16", "--shard-bytes=9", "--license=mit"),
        *("--scores", scores, "--config.eval.use_ema=false"),
      )
    self.assertEqual(told, f"1,234 parameters written to {out}\n")
    given = dict(
      to="hf", step=0, use_ema=False, base="", dtype="bfloat16", shard_size=9
    )
    given |= dict(license="mit", scores=scores)
    export.assert_called_once_with(str(checkpoint), out, **given)
