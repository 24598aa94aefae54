"""`python -m moh_jax convert`."""

import dataclasses

from moh_jax.cli import command
from moh_jax.config import public_formats
from moh_jax.runtime.alive import alive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.RunConfig):
  """Turn a public checkpoint into one of ours.

  Attributes:
    from_: format of the source (default: as its name or config.json tells). Of
      image classifiers: moh-vit, transnext; of diffusion models: moh-dit, dit,
      diffusers; of language models: llama, moh-llama3, moh-hf, and peft,
      adapters of one.
    source: file of safetensors, .pth, .pt or .bin, a folder of them, or a
      repository that is in the cache of the Hugging Face Hub, such as
      Chat-UniVi/MoH-ViT-S-80; a folder of transformers says in its config.json
      which model it is, a file of `export` in its metadata.
    out: folder of the checkpoint.
    key: entry of a .pth that holds the weights (default: found).
    model: released model (default: the one that the source names, or the one
      whose shapes fit).
    config: config file of another model.
    base: checkpoint of the model that adapters of PEFT were trained on.
    overwrite: replace a folder that holds something; one that is as
      convert left it is replaced in any case.
  """

  from_: str | None = None
  source: str
  out: command.Place
  key: str | None = None
  model: str | None = None
  config: command.Place | None = None
  base: command.Place | None = None
  overwrite: bool = False

  def check(self) -> None:
    """The format is known, and one option says which model it is."""
    super().check()
    if self.from_ not in (None, *public_formats()):
      self.fail("from_", f"must be one of {public_formats()}")
    if self.model is not None and self.config is not None:
      self.fail("model", "must not be given with --config")
    for name in "key", "model", "config":
      self.need(name, self.from_ != "peft", "has no effect on adapters")


@alive("converting")
def run(options: Options) -> int:
  """Writes the converted checkpoint, and says what was taken."""
  from moh_jax.convert.checkpoints import convert, written_over
  from moh_jax.data.chat import template_names
  from moh_jax.inference.restore import load_checkpoint_tokenizer
  from moh_jax.runtime import checkpoint

  reads = options.source, options.base
  with written_over(options.out, reads, options.overwrite) as out:
    name, count = convert(
      options.from_,
      options.source,
      out,
      key=options.key,
      model=options.model,
      config=options.loaded if options.config else None,
      base=options.base,
    )
  print(f"{name}: {count:,} parameters written to {options.out}")
  metadata, _ = checkpoint.read_metadata(options.out, None)
  if metadata.config.model.READS_TEXT:
    try:
      tokenizer = load_checkpoint_tokenizer(options.out)
      begin = "with" if tokenizer.add_bos else "without"
      # A padded vocabulary has ids without a token.
      stops = ", ".join(
        f"{tokenizer.id_to_token(i) or 'no token'} ({i})"
        for i in tokenizer.stop_ids
      )
      templates = ", ".join(template_names(tokenizer))
      print(
        f"tokenizer: {tokenizer.file_name}, {tokenizer.vocab_size:,} ids; "
        f"texts begin {begin} begin of text; generated texts stop at "
        f"{stops or 'no token'}; chat templates: {templates or 'none'}"
      )
    except FileNotFoundError:
      print("tokenizer: none")
  return 0
