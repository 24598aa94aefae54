"""`python -m moh_jax convert`."""

import dataclasses

from moh_jax.cli.options import InPath, OutPath, Place, RunConfig
from moh_jax.config import family_of_format, imported, public_formats
from moh_jax.config.base import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunConfig):
  """Turn a public checkpoint into one of ours.

  Attributes:
    from_: format of the source. Of image classifiers: moh-vit, transnext; of
      diffusion models: moh-dit, dit, diffusers; of language models: llama,
      moh-llama3, moh-hf.
    source: safetensors file or folder, or .pth/.pt; a folder of transformers
      says in its config.json which model it is, a file of `export` in its
      metadata.
    out: folder of the checkpoint.
    key: entry of a .pth that holds the weights (default: found).
    model: released model (default: the one that the source names, or the one
      whose shapes fit).
    config: config file of another model.
    image_size: input size of a classifier in pixels, instead of the model's;
      the relative coordinates keep the pre-training size.
  """

  from_: str
  source: InPath
  out: OutPath
  key: str | None = None
  model: str | None = None
  config: Place | None = None
  image_size: Count | None = None

  def check(self) -> None:
    """The format is known, and one option says which model it is."""
    super().check()
    if self.from_ not in public_formats():
      self.fail("from_", f"must be one of {public_formats()}")
    if self.model is not None and self.config is not None:
      self.fail("model", "must not be given with --config")


def run(options: Options) -> int:
  """Writes the converted checkpoint, and says what was taken."""
  from moh_jax.convert.checkpoints import convert
  from moh_jax.data.infer import resolve
  from moh_jax.data.tokenizers import TokenizerFileError
  from moh_jax.inference.restore import load_checkpoint_tokenizer

  name, count = convert(
    options.from_,
    options.source,
    options.out,
    key=options.key,
    model=options.model,
    config=resolve(options.loaded) if options.config else None,
    image_size=options.image_size,
  )
  print(f"{name}: {count:,} parameters written to {options.out}")
  if imported(family_of_format(options.from_).model).READS_TEXT:
    try:
      print(_describe(load_checkpoint_tokenizer(options.out)))
    except (FileNotFoundError, TokenizerFileError):
      print("tokenizer: none that can be read")
  return 0


def _describe(tokenizer) -> str:
  """How texts begin and end, and how conversations are written."""
  from moh_jax.data.chat import template_names

  def named(token: int) -> str:
    return f"{tokenizer.id_to_token(token)} ({token})"

  begin = "texts begin without"
  if tokenizer.add_bos:
    begin = f"texts begin with {named(tokenizer.bos_id)}"
  stops = ", ".join(map(named, tokenizer.stop_ids)) or "no token"
  templates = ", ".join(template_names(tokenizer)) or "none"
  return (
    f"tokenizer: {tokenizer.file_name}, {tokenizer.vocab_size:,} ids; {begin}; "
    f"generated texts stop at {stops}; chat templates: {templates}"
  )
