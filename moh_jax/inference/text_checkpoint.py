"""The tokenizer that belongs to a checkpoint."""

from moh_jax.config import check_command
from moh_jax.data.tokenizers import (
  BytesTokenizer,
  JsonTokenizer,
  SentencePieceTokenizer,
  Tokenizer,
  read_tokenizer,
)
from moh_jax.runtime import checkpoint, location


def load_checkpoint_tokenizer(
  directory: str, step: int | None = None, *, verify: bool = True
) -> Tokenizer:
  """Opens the tokenizer of a language model.

  Args:
    directory: a working directory of train.py or an output of `convert`.
    step: which checkpoint; None is the newest.
    verify: compare its metadata with its checksum first.

  Raises:
    FileNotFoundError: there is no such checkpoint, or no tokenizer beside it.
    ValueError: the checkpoint is no language model, or the tokenizer is not the
      one that it was trained with.
  """
  metadata, _ = checkpoint.read_metadata(directory, step, verify=verify)
  check_command(metadata.config.model, "generate", directory)
  expected = metadata.tokenizer_sha256
  if expected == BytesTokenizer.sha256:
    return BytesTokenizer()
  folder = location.workdir(directory)
  refused = []
  for kind in (JsonTokenizer, SentencePieceTokenizer):
    file = folder / kind.file_name
    if not file.exists():
      continue
    try:
      return read_tokenizer(kind.kind, file, expected, "the checkpoint")
    except ValueError as error:  # the right one may lie beside it
      refused.append(str(error))
  if refused:
    raise ValueError("; ".join(refused))
  raise FileNotFoundError(
    f"{folder} holds no {JsonTokenizer.file_name} or "
    f"{SentencePieceTokenizer.file_name}; put the model's tokenizer there"
  )
