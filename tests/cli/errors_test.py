"""What a command cannot do is one line that names it, status 2, no output.

Checkpoints: {vit}, a classifier of 6 classes; {dit}, of digits; {text}, a
routed language model; {llm}, one that writes the alphabet. {here} is a folder
of the other files.
"""

import json
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from moh_jax import config as config_lib
from tests.cli import tiny_checkpoint
from tests.inference import tiny_text_model, tiny_vae, tiny_writer

_RUN = """
def get_config():
  return {
    "model": {
      "family": "llm", "max_length": 64, "width": 64, "mlp_dim": 64,
      "num_heads": (4, 4), "num_kv_heads": 4, "head_dim": 16,
      "shared_heads": (2, 2), "top_k": (1, 1),
    },
    "data": {
      "source": "tokens", "path": "no/such/folder", "batch_size": 64,
      "sequence_length": 64,
    },
  }
"""
_EVALUATE = "evaluate --checkpoint"
_GENERATE = "generate --checkpoint {llm}"
_PROMPT = f"{_GENERATE} --prompt=a"
_SAMPLE = "sample --checkpoint {dit} --out {here}/x.png"
_FID = "fid --samples {here}/samples.npz --batch-size 8"
_INSPECT = "inspect"
_PLAN = "plan --config {here}/run.py --no-compile --topology"
_PACK = "prepare pack-images --data {here}/images --out {here}/new"
_ENCODE = "prepare encode-latents --data {here}/images --out {here}/new"
_TOKENIZE = "prepare tokenize --workers=1 --out {here}/new --field=body"
_BYTES = f"{_TOKENIZE} --tokenizer=bytes --data {{here}}"
_BPE = "prepare train-tokenizer --vocab-size"
_COMPARE = "compare --config {here}/run.py --workdir {here}/new"


class ErrorsTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.places = {n: root / n for n in ("vit", "dit", "text", "llm", "here")}
    tiny_checkpoint.save(root / "vit")
    tiny_checkpoint.save_dit(root / "dit")
    routed = config_lib.apply_overrides(
      tiny_text_model.CONFIG, "model", top_k=(1, 2)
    )
    tiny_text_model.save(root / "text", routed)
    tiny_writer.save_alphabet(root / "llm")
    here = root / "here"
    (here / "empty").mkdir(parents=True)
    tiny_vae.save_images(here / "images")
    tiny_vae.save(here / "vae")
    pixels = np.random.RandomState(0).randint(0, 256, (5, 8, 8, 3), np.uint8)
    Image.fromarray(pixels[0]).save(here / "good.png")
    (here / "cut.png").write_bytes((here / "good.png").read_bytes()[:60])
    np.savez(here / "samples.npz", pixels)
    np.savez(here / "one.npz", pixels[:1])
    np.savez(here / "half.npz", pixels, mu=np.zeros(2048))
    stats = {"mu": np.zeros(2048), "sigma": np.eye(2048)}
    np.savez(here / "stats.npz", **stats)
    for name, text in (
      *(("run.py", _RUN), ("text.png", "text"), ("one.txt", "text")),
      *(("bad.jsonl", '{"body": 1}\n'), ("empty.txt", "")),
      ("a.jsonl", "\n".join(json.dumps({"body": f"a {i}"}) for i in range(9))),
    ):
      (here / name).write_text(text)

  @parameterized.parameters(
    # bench
    ("bench", "KIND"),
    ("bench layer", "invalid choice: 'layer'"),
    ("bench attention --shares 90", "--shares 90 must be a whole number of"),
    ("bench attention --modes back", "'back' must be one of ('forward'"),
    ("bench attention --kv-heads 3", "--kv-heads=3 must divide --heads 32"),
    ("bench attention --implementations kernel", "kernel needs an accelerator"),
    ("bench model --model nope", "model 'nope' must be one of"),
    ("bench model --config.data.sequence_length=16", "data.sequence_length"),
    ("bench model --config.data.batch_size=0", "data.batch_size=0 must be at"),
    ("bench model --config x --checkpoint y", "exclude each other"),
    # classify
    ("classify --checkpoint {vit} {here}/gone.png", "gone.png: no such file"),
    ("classify --checkpoint {vit} {here}/text.png", "text.png: not an image"),
    ("classify --checkpoint {vit} {here}/cut.png", "cut.png: damaged"),
    ("classify --checkpoint {vit} {here}/empty", "empty holds no image"),
    ("classify --checkpoint {vit} {here}/good.png --top-k=9", "top_k=9"),
    ("classify --checkpoint {vit} {here} --top=0", "--top=0 must be at least"),
    ("classify --checkpoint {dit} {here}", "`classify` needs 'vit'"),
    # compare
    (f"{_COMPARE} --rounds -1", "--rounds=-1 must be at least 0"),
    (f"{_COMPARE} --variants mha,moe", "variant 'moe' must be config, mha"),
    (f"{_COMPARE} --plot {{here}}/x.pdf", "must end in .png or .svg"),
    # convert, export, train
    ("convert --from dit --source nope --out {here}/x", "nope: no such file"),
    ("export --checkpoint nope --out {here}/x", "nope holds no checkpoint"),
    ("train --config nope --workdir {here}/x", "nope: no such config file"),
    # evaluate
    (
      f"{_EVALUATE} {{vit}} --top-k 1 --top-k 2 --per-class {{here}}/x.csv",
      "x.csv' takes one --top-k",
    ),
    (f"{_EVALUATE} {{vit}} --top-k 4", "top_k=4 must be in [0, 3]"),
    (f"{_EVALUATE} {{vit}} --top-k 1,1", "must have one value per stage"),
    (
      f"{_EVALUATE} {{vit}} --top-k=1 --config.model.router.top_p=0.5",
      "top_p=0.5 selects heads by score, so",
    ),
    (
      f"{_EVALUATE} {{vit}} --config.eval.batch_size=9",
      "eval.batch_size=9 must be a multiple of",
    ),
    (f"{_EVALUATE} {{vit}} --step 7", "no checkpoint of step 7; it has [0]"),
    (f"{_EVALUATE} {{vit}} --data /nope", "data.path='/nope'"),
    (f"{_EVALUATE} {{vit}} --data a b", "--data=('a', 'b') must be one direct"),
    (f"{_EVALUATE} {{vit}} --tasks piqa", "--tasks: "),
    (f"{_EVALUATE} {{vit}} --limit 2", "--limit=2 needs --tasks"),
    (f"{_EVALUATE} {{vit}} --plot {{here}}/x.svg", "needs several --top-k"),
    (f"{_EVALUATE} {{vit}} --plot {{here}}/x.jpg", "must end in .png"),
    (f"{_EVALUATE} {{dit}} --per-class {{here}}/x.csv", "needs 'vit'"),
    (f"{_EVALUATE} {{text}} --data /nope/*.txt", "/nope/*.txt: no such file"),
    (
      f"{_EVALUATE} {{text}} --data {{here}}/one.txt --top-k 1,4",
      "top_k=4 must be in [0, 3]",
    ),
    (
      f"{_EVALUATE} {{text}} --data {{here}}/one.txt "
      "--config.eval.batch_size=7",
      "batch_size=7 must be a multiple",
    ),
    (f"{_EVALUATE} {{text}} --tasks a,,b", "task 'a' is none of the harness's"),
    (
      f"{_EVALUATE} {{text}} --data {{here}}/one.txt --top-k=1 --top-k=2 "
      "--plot={here}/x.svg",
      "must be of a data set",
    ),
    (
      f"{_EVALUATE} {{llm}} --data {{here}}/one.txt --top-k=1",
      "has no routed heads, model.router.kind='none'",
    ),
    # fid
    (f"{_FID} --metrics fid,pr", "need --reference"),
    (f"{_FID} --metrics kid", "'kid' must be one of ('fid', 'sfid', 'is', 'pr"),
    (f"{_FID} --batch-size 9", "--batch-size=9 must be a multiple of 8"),
    (f"{_FID} --reference {{here}}/stats.npz --metrics pr", "arr_0"),
    (f"{_FID} --reference {{here}}/stats.npz --metrics sfid", "mu_s"),
    (f"{_FID} --reference {{here}}/none.npz", "none.npz: no such file"),
    (f"{_FID} --reference {{here}}/one.npz", "at least 4 samples"),
    (f"{_FID} --reference {{here}}/one.npz --metrics fid", "at least 2"),
    (f"{_FID} --reference {{here}}/half.npz", "lacks"),
    (f"{_FID} --save-stats {{here}}", "is a directory"),
    (f"{_FID} --inception no.pth", "pt_inception-2015-12-05-6726825d"),
    (_FID, "no --inception was given; "),
    # generate
    (_GENERATE, "one of --prompt, --messages, --prompt-file, --interactive is"),
    (f"{_PROMPT} --interactive", "--interactive must not be given with"),
    (f"{_GENERATE} --prompt-file {{here}}/one.txt", "must be given together"),
    (f"{_PROMPT} --out={{here}}/b", "--prompt and --messages have --json"),
    (f"{_GENERATE} --interactive --json=-", "needs --prompt or --messages"),
    (f"{_GENERATE} --interactive --distributed", "needs prompts"),
    (f"{_GENERATE} --prompt-file=no.jsonl --out={{here}}/b", "no such file"),
    (f"{_GENERATE} --prompt-file=a --out=/no/b", "no directory /no"),
    (f"{_PROMPT}A --max-new-tokens=99", "has 2 tokens; with max_new_"),
    (f"{_PROMPT} --stop=", "stop='' must not be empty"),
    (f"{_PROMPT} --step=7", "no checkpoint of step 7; it has [0]"),
    (f"{_PROMPT} --top-k=9,9", "top_k=(9, 9): the model has no routed"),
    (f"{_PROMPT} --system a", "--system='a' needs --chat"),
    (f"{_PROMPT} --chat-template a", "--chat-template='a' needs"),
    (f"{_PROMPT} --chat --no-bos", "must be of plain prompts"),
    (f"{_PROMPT} --chat", "the model has no chat template"),
    (f"{_GENERATE} --messages nowhere.json", "nowhere.json: no such file"),
    (f"{_GENERATE} --messages {{here}}/one.txt", "Expecting value"),
    ("generate --checkpoint {vit} --prompt=a", "`generate` needs 'llm'"),
    # heads
    ("heads --checkpoint {vit} --against {dit}", "--data for both"),
    ("heads --checkpoint {vit} --against {vit}", "must be another checkpoint"),
    ("heads --checkpoint {vit} --data a b", "must be one directory"),
    ("heads --checkpoint {vit} --data MISSING", "MISSING"),
    ("heads --checkpoint {vit} --out {here}/one.txt", "must be a folder"),
    ("heads --checkpoint {text} --data {here}/empty.txt", "fewer than two tok"),
    # inspect
    (_INSPECT, "one of --checkpoint, --config and --data must be given"),
    (f"{_INSPECT} --data x --config y", "one of --checkpoint, --config and"),
    (f"{_INSPECT} --data x", "--data='x' needs --checksums or --batch"),
    (f"{_INSPECT} --data x --batch {{here}}/y.png", "needs --vae"),
    (f"{_INSPECT} --config x --vae x", "--vae='x' needs --data and"),
    (f"{_INSPECT} --config x --checksums", "needs --checkpoint or --data al"),
    (f"{_INSPECT} --config x --batch {{here}}/y.jpg", "must end in .png"),
    (
      f"{_INSPECT} --checksums --checkpoint {{vit}} --config.optim.lr=1",
      "--checksums compares files",
    ),
    (f"{_INSPECT} --config nope.py", "nope.py: no such config file"),
    (f"{_INSPECT} --config configs/vit.py:huge", "'huge' must be one of"),
    (f"{_INSPECT} --checkpoint nope", "nope holds no checkpoint"),
    (
      f"{_INSPECT} --data {{here}}/images --vae {{here}}/vae --batch "
      "{here}/y.png",
      "prepare encode-latents` makes it",
    ),
    # plan
    (f"{_PLAN}=v9-8", "topology='v9-8' must be one of a100"),
    (f"{_PLAN}=h100:8 --config.mesh.fsdp=3", "must divide the 8"),
    (f"{_PLAN}=h100:8 --config.optim.accumulation=3", "must be a multiple of"),
    (f"{_PLAN}=h100:8 --config.eval.batch_size=100", "a multiple of 8: "),
    (f"{_PLAN}=h100:8 --config.model.router.top_p=0.5", "must be 0 in trai"),
    (f"{_PLAN}=h100:8 --config.mesh.tensor=8", "key/value heads"),
    # prepare
    (f"{_PACK} --label-column=x", "--label-column='x' must be '': "),
    (f"{_PACK} --shorter-side=-5", "--shorter-side=-5 must be at least 0"),
    (f"{_PACK} --data={{here}}/empty", "holds no image"),
    (f"{_PACK} --data=nope", "no such dir"),
    (f"{_ENCODE} --vae {{here}}/vae --process=2/2", "'2/2' must be I/N"),
    (f"{_ENCODE} --vae {{here}}/vae --process=1", "'1' must be I/N"),
    (f"{_ENCODE} --vae {{here}}/vae --process=a/b", "'a/b' must be I/N"),
    (f"{_ENCODE} --vae nope", "--vae PATH"),
    (f"{_BYTES}/bad.jsonl", "bad.jsonl, line 1: 'body' is int"),
    (f"{_BYTES}/*.csv", "*.csv: no such file"),
    (
      f"{_TOKENIZE} --tokenizer=no.json --data {{here}}/a.jsonl",
      "no.json: no such tokenizer",
    ),
    (f"{_BYTES}/a.jsonl --held-out=1", "--held-out=1.0 must be in (0, 1)"),
    (f"{_BYTES}/one.txt --held-out=0.2", "1 document, and documents are not"),
    (f"{_BYTES}/a.jsonl --held-out=0.1 --split=val", "not be given with"),
    (
      f"{_BPE} 100 --data {{here}}/one.txt --out {{here}}/new.json",
      "vocab_size=100 must be at least 258",
    ),
    (
      f"{_BPE} 400 --data {{here}}/bad.jsonl --out {{here}}/new.json",
      "bad.jsonl, line 1: no field 'text'",
    ),
    (f"{_BPE} 400 --data x --out {{here}}/a.model", "must end in .json"),
    (f"{_BPE} 400 --data x --out {{here}}/no/a.json", "no directory"),
    # sample
    (f"{_SAMPLE} --strength=0.5", "--strength=0.5 needs --start"),
    (f"{_SAMPLE} --start={{here}}/good.png", "must be above 0 and below 1"),
    (f"{_SAMPLE} --start={{here}}/empty --strength=0.5", "holds no image"),
    (f"{_SAMPLE} --start={{here}}/text.png --strength=0.5", "text.png: not an"),
    (f"{_SAMPLE} --labels=3,10", "label 10 must be in [0, 9], or none"),
    (f"{_SAMPLE} --labels=--5", "'--5' must be a number, none, or one of the"),
    (f"{_SAMPLE} --seed=-1", "seed=-1 must be in [0, 2147483647]"),
    (f"{_SAMPLE} --config.sample.cfg_interval=9,3", "cfg_interval=(9, 3) must"),
    (f"{_SAMPLE} --config.sample.steps=51", "asks for 51 of the 50 timesteps"),
    (f"{_SAMPLE} --top-k=1,9", "top_k=9 must be in"),
    (f"{_SAMPLE} --vae=sd-vae", "'sd-vae': the model does not work on latents"),
    (f"{_SAMPLE} --out={{here}}/x.jpg", "x.jpg' must end in .png or .npz"),
    (f"{_SAMPLE} --out={{here}}/no/x.png", "no directory"),
    ("sample --checkpoint {vit} --out {here}/x.npz", "`sample` needs 'dit'"),
  )  # fmt: skip
  def test_is_one_line_and_writes_nothing(self, argv, message):
    argv = [part.format(**self.places) for part in argv.split()]
    before = sorted(self.places["here"].rglob("*"))
    status, out, err = tiny_checkpoint.call(*argv)
    self.assertEqual((status, out), (2, ""))
    self.assertLen(err.splitlines(), 1)
    self.assertStartsWith(err, "error: ")
    self.assertIn(message, err)
    self.assertEqual(sorted(self.places["here"].rglob("*")), before)


if __name__ == "__main__":
  absltest.main()
