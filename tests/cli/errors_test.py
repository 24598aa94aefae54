"""What a command cannot do is one line that names it, status 2, no output.

{vit}, {dit}, {text} and {llm} are checkpoints of `tiny_checkpoint.stored`;
{here} is a folder of other files.
"""

import jax
import numpy as np
from absl.testing import parameterized

from moh_jax.runtime import checkpoint
from tests.cli import tiny_checkpoint
from tests.data.tiny_images import put
from tests.training import tiny

# Commands, options that are added to them, and what is said of these.
_REFUSED = {
  "bench": {
    "model --model nope": "model 'nope' must be one of",
    "model --config.data.sequence_length=16": "data.sequence_length",
  },
  "classify --checkpoint": {
    "{vit} {here}/cut.png": "cut.png: damaged",
    "{vit} {here}/empty": "empty holds no image",
    "{vit} nope": "'nope' must be a file or folder",
    "{vit} {here}/good.png --json {here}/one.txt/x": "/one.txt cannot be writ",
    "{vit} {here}/good.png --json {here}": "must be a file, not a folder",
    "{vit} {here}/good.png --step newer": "must be a number or newest",
    "{dit} {here}": "`classify` needs 'vit'",
  },
  "compare --config configs/llm_stdlib.py --workdir {here}/new": {
    "--variants mha,moe": "variant 'moe' must be config, mha",
    "--plot {here}/x.pdf": "must end in .png or .svg",
  },
  "convert --out {here}/x": {
    "--from dit --source {here} --model a --config b": "not be given with --c"
  },
  "export --out {here}/x --checkpoint": {
    "{vit} --config.model.dtype=bfloat16": "only eval.use_ema and train.init",
    "{vit} --out gs://bucket/x": "--out='gs://bucket/x' must be local",
    "{vit} --to hf": "must be absent, as --license for",
    "{vit} --out {here}/folder.npz": "folder.npz: is a folder, must be a file",
  },
  "train --workdir {here}/x --config": {
    "configs/dit_digits.py --vae=sd-vae": "'sd-vae': the model does not work",
    "configs/images.py --config.data.path=/nope/images": "/nope/images",
  },
  "evaluate --checkpoint {vit}": {
    "--config.eval.batch_size=9": "eval.batch_size=9 must be a multiple of",
    "--data /nope": "data.path='/nope'",
    "--data a b": "--data=('a', 'b') must be one direct",
    "--limit 2": "--limit=2 needs --tasks",
    "--field a": "--field='a' needs --data",
    "--top-k 1 --top-k 1": "must differ",
  },
  "fid --samples {here}/samples.npz --inception no.pth": {
    "--metrics fid,pr": "need --reference",
    "--reference {here}/stats.npz --metrics sfid": "mu_s",
    "--reference {here}/stats.npz --metrics pr": "images (arr_0) in",
    "": "pt_inception-2015-12-05-6726825d",
  },
  "generate --checkpoint": {
    "{vit} --prompt=a": "`generate` needs 'llm'",
    "{llm}": "one of --prompt, --messages, --prompt-file, --interactive is",
    "{llm} --prompt-file {here}/one.txt": "must be given together",
    "{llm} --out {here}/x --prompt-file {here}/one.txt": "must be .jsonl",
    "{llm} --out {here}/x --prompt-file {here}/a.jsonl": "no field 'prompt'",
    "{llm} --interactive --json=-": "needs prompts",
    "{llm} --messages {here}/one.txt": "Expecting value",
  },
  "generate --checkpoint {llm} --prompt=a": {
    "--interactive": "--interactive must not be given with",
    "--system a": "--system='a' needs --chat",
    "--top-p=0.5": "--top-p=0.5 needs --temperature above 0",
  },
  "heads --checkpoint": {"{vit} --out {here}/one.txt": "must be a folder"},
  "inspect": {
    "": "one of --checkpoint and --config must be given",
    "--config tests/faults/tiny_run.py:llm --batch {here}/y.png": "pixels",
    "--config configs/dit.py:s2_90 --batch {here}/y.png": "pixels",
    "--config x --batch {here}/y.jpg": "must end in .png",
    "--checkpoint {vit} --batch {here}/y.png": "needs --config",
  },
  "plan --config configs/llm_stdlib.py --topology": {
    "v9-8": "topology='v9-8' must be one of a100"
  },
  "prepare pack-images --data {here} --out {here}/new": {
    "--data={here}/empty": "holds no image",
    "--out={here}/one.txt": "must be a folder, not a file",
  },
  "prepare tokenize --out {here}/new --data {here}/a.jsonl": {
    "--tokenizer=bytes --held-out=1": "--held-out=1.0 must be in (0, 1)",
    "--tokenizer=bytes --held-out=0.1 --split=val": "not be given with",
  },
  "prepare train-tokenizer --data {here}/a.jsonl --out": {
    "{here}/new.json --vocab-size=100": "--vocab-size=100 must be at least 258",
    "{here}/a.model --vocab-size=400": "must end in .json",
  },
  "sample --checkpoint {vit}": {"--out {here}/x.npz": "`sample` needs 'dit'"},
  "sample --checkpoint {dit} --out {here}/x.png": {
    "--labels=--5": "'--5' must be a number, none, or one of the",
    "--out={here}/x.jpg": "x.jpg' must end in .png or .npz",
  },
}


class ErrorsTest(tiny_checkpoint.CommandTest):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    here = cls.shared_folder()
    cls.places = {n: tiny_checkpoint.stored(n) for n in tiny_checkpoint.SAVED}
    cls.places["here"] = here
    (here / "empty").mkdir()
    (here / "folder.npz").mkdir()
    (good,) = put(here, "good.png", size=(8, 8))
    (here / "cut.png").write_bytes(good.read_bytes()[:60])
    np.savez(here / "samples.npz", np.zeros((5, 8, 8, 3), np.uint8))
    np.savez(here / "stats.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    (here / "one.txt").write_text("text")
    (here / "a.jsonl").write_text('{"body": "a"}\n' * 9)

  @parameterized.parameters(
    (f"{command} {options}", message)
    for command, rows in _REFUSED.items()
    for options, message in rows.items()
  )
  def test_is_one_line_and_writes_nothing(self, argv, message):
    argv = [part.format(**self.places) for part in argv.split()]
    before = sorted(self.places["here"].rglob("*"))
    self.assert_refused(message, *argv)
    self.assertEqual(sorted(self.places["here"].rglob("*")), before)


class NanTest(tiny_checkpoint.CommandTest):
  @parameterized.parameters(
    ("vit", np.nan, "classify {image} --checkpoint"),
    ("vit", 1e30, "evaluate --checkpoint"),
    ("vit", 1e30, "heads --json - --checkpoint"),
    ("dit", 1e30, "sample --out {here}/x.png --checkpoint"),
    ("text", np.nan, "generate --prompt a --checkpoint"),
  )
  def test_numbers_that_are_not_finite_are_a_line_and_status_1(
    self, name, factor, command
  ):
    metadata, _ = checkpoint.read_metadata(tiny_checkpoint.stored(name))
    params = tiny.random_params(metadata.config)
    params = jax.tree.map(lambda x: x * factor, params)
    checkpoint.save_params(self.root / "run", params, metadata)
    (image,) = put(self.root, "a.png")
    argv = command.format(image=image, here=self.root).split()
    status, out, err = self.call(*argv, self.root / "run")
    self.assertEqual((status, out), (1, ""), err)
    self.assertRegex(err, r"\Aerror: .*(NaN|infinite).*\n\Z")
    self.assertCountEqual(
      [p.name for p in self.root.iterdir()], ["run", "a.png"]
    )
