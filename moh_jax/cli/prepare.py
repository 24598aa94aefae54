"""Turn images or text into what training reads.

A second run of a command that was ended continues what the first one wrote.
"""

import dataclasses
import pathlib
from typing import Annotated, Literal

from moh_jax.cli import command
from moh_jax.config.base import Count, Dtype, Natural, Part, Range, Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(command.BaseOptions):
  """Options of what reads labelled images.

  Attributes:
    data: folder with a folder of images per class, or with train/ and val/ that
      have those; or Parquet or Arrow files of images.
    out: folder of the shards.
    split: read this split alone (default: both).
    val_share: share of the images that becomes val/ where there is none, as
      data.val_share of a run.
    label_column: column of the labels of Parquet or Arrow files (default:
      found).
    bad_images: end at a file that is no image or cannot be made smaller, or
      leave it out. Of files that are copied only the header is read: a
      truncated one is left to data.bad_images of the run.
  """

  data: command.Place
  out: command.OutFolder
  split: Literal["train", "val"] | None = None
  val_share: Share = 0.0
  label_column: str = ""
  bad_images: Literal["raise", "skip"] = "raise"

  def sources(self, *channels: int, class_names=()) -> dict:
    """Opens the images of each split."""
    from moh_jax.data.packed import open_splits
    from moh_jax.data.sources import Selection

    selection = Selection(self.val_share, class_names, self.label_column)
    return open_splits(self.data, self.split, *channels, selection=selection)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackImages(Images):
  """Pack images, in folders or tables, into array_record shards.

  Attributes:
    shorter_side: make images whose shorter side has more pixels smaller, as
      JPEG; 0 copies all files unchanged.
    class_list: labels in the order of this file, which names a class (a folder)
      on each line (default: alphabetical).
  """

  shorter_side: Natural = 0
  class_list: command.InPath | None = None


def pack_images(options: PackImages) -> int:
  """Writes the shards of each split."""
  from moh_jax.data import packed
  from moh_jax.data.sources import listed_classes

  names = listed_classes(options.class_list)
  for split, source in options.sources(class_names=names).items():
    folder = pathlib.Path(options.out) / split
    metadata = packed.pack_images(
      source,
      folder,
      packed_from=options.data,
      shorter_side=options.shorter_side,
      bad_images=options.bad_images,
    )
    classes = f"{len(metadata['class_names']):,} classes in {folder}"
    print(
      f"{split}: {metadata['examples']:,} images of {classes}"
      + _skipped(metadata, folder)
    )
  return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodeLatents(Images):
  """Turn images into latents to train a diffusion model on.

  Attributes:
    vae: weights of the autoencoder.
    image_size: rows and columns of ADM's centre crop.
    batch_size: images that this process's devices encode at a time.
    dtype: of the computation.
  """

  vae: command.Place
  image_size: Count = 256
  batch_size: Count = 32
  dtype: Dtype = "float32"


def encode_latents(options: EncodeLatents) -> int:
  """Writes the latents of each split."""
  from moh_jax.convert.vae import load_vae
  from moh_jax.inference import encode

  config, params = load_vae(options.vae)
  config = dataclasses.replace(config, dtype=options.dtype)
  notes = {"vae": options.vae, "encoded_from": options.data}
  for split, source in options.sources(config.image_channels).items():
    folder = pathlib.Path(options.out) / split
    metadata = encode.encode_latents(
      *(source, folder, config, params),
      image_size=options.image_size,
      batch_size=options.batch_size,
      bad_images=options.bad_images,
      notes=notes,
    )
    shape = " x ".join(str(side) for side in metadata["latent_shape"])
    print(
      f"{folder}: {metadata['examples']:,} images as latents of {shape}"
      + _skipped(metadata, folder)
    )
  return 0


def _skipped(metadata: dict, folder: pathlib.Path) -> str:
  count = metadata["skipped"]
  return f"; {count:,} skipped, see {folder}/skipped.txt" if count else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenize(command.Texts):
  """Turn text files into token sets to train a language model on.

  Attributes:
    tokenizer: a tokenizer.json, a SentencePiece .model, a folder with one of
      them, or 'bytes'.
    out: folder of the token sets; OUT/SPLIT/skipped.txt lists what was skipped.
    held_out: share of the text in val/, the others are train/: documents
      chosen by a hash of their text, and of few files the last lines of one.
    split: put all documents into OUT/NAME instead, such as OUT/train.
    on_error: what to do at a line, row or file that is not JSON, not UTF-8 or
      lacks the field; a damaged file ends the command.
  """

  tokenizer: command.Place
  out: command.OutFolder
  held_out: Part = 0.005
  split: command.Place | None = command.option(metavar="NAME", default=None)
  on_error: Literal["stop", "skip"] = "stop"

  def check(self) -> None:
    """Documents have one way into splits."""
    super().check()
    self.need("held_out", self.split is None, "must not be given with --split")


def tokenize(options: Tokenize) -> int:
  """Writes the token set of each split."""
  from moh_jax.data import tokens
  from moh_jax.data.tokenizers import load_tokenizer

  done = tokens.tokenize(
    options.data,
    load_tokenizer(options.tokenizer),
    options.out,
    options.split,
    held_out=options.held_out if options.split is None else None,
    field=options.field,
    on_error=options.on_error,
  )
  for split, metadata in done.items():
    folder = pathlib.Path(options.out) / split
    print(
      f"{split}: {metadata['documents']:,} documents, "
      f"{metadata['tokens']:,} tokens of {metadata['text_bytes']:,} bytes of "
      f"text in {folder}" + _skipped(metadata, folder)
    )
  return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTokenizer(command.Texts):
  """Train a byte-level BPE tokenizer on text files.

  Attributes:
    vocab_size: entries, among them the 256 bytes, begin and end of text.
    out: for instance tokenizer.json.
    on_error: what to do at a line, row or file that is not JSON, not UTF-8 or
      lacks the field, which is then counted; a damaged file ends the command.
  """

  vocab_size: Annotated[int, Range(258)]
  out: command.OutFile
  on_error: Literal["stop", "skip"] = "stop"

  def check(self) -> None:
    """The file has the name by which tokenizers are found."""
    super().check()
    if not self.out.endswith(".json"):
      self.fail("out", "must end in .json")


def train_tokenizer(options: TrainTokenizer) -> int:
  """Trains a byte-level BPE and writes it."""
  from moh_jax.data.tokenizers import JsonTokenizer, train_bpe
  from moh_jax.runtime.files import write_whole

  skipped: list[str] = []
  texts = options.texts(skipped if options.on_error == "skip" else None)
  content = train_bpe(texts, options.vocab_size)
  write_whole(pathlib.Path(options.out), content)
  entries = JsonTokenizer(content).vocab_size
  told = f"; {len(skipped):,} skipped, first {skipped[0]}" if skipped else ""
  print(f"{options.out}: {entries:,} entries{told}")
  if entries < options.vocab_size:
    print(
      f"the text has no more; --vocab-size={options.vocab_size} is not reached"
    )
  return 0


KINDS = {
  "pack-images": (PackImages, pack_images),
  "encode-latents": (EncodeLatents, encode_latents),
  "tokenize": (Tokenize, tokenize),
  "train-tokenizer": (TrainTokenizer, train_tokenizer),
}
