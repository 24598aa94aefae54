"""Text generation with a key/value cache, and completions of whole files."""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tqdm
from jax.sharding import Mesh

from moh_jax.config import LLMConfig, MeshConfig, check_command
from moh_jax.config.llm import Sampling
from moh_jax.data.chat import Message, chat_ids
from moh_jax.data.tokenizers import Tokenizer, check_vocabulary
from moh_jax.inference import decoding
from moh_jax.inference.restore import (
  Restored,
  fingerprint,
  load_checkpoint_tokenizer,
  restore,
)
from moh_jax.models.llm import LLM, unroll
from moh_jax.models.registry import serving_dtypes
from moh_jax.runtime.batches import gather, pad_to_shards, put_batch
from moh_jax.runtime.files import same_settings, strict_json, write_whole
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.runtime.processes import ask_first_process

Prompt = str | Sequence[int]

_SPAN = 16  # tokens between two looks at what was written
_GREEDY = Sampling()
_SMALLEST_BUCKET = 16
# Batches of a file whose prompts are sorted by length and written together.
_CHUNK_BATCHES = 8


class Generator:
  """Writes on from prompts.

  Programs are compiled once per bucket: prompt lengths, cache slots and batch
  are rounded up (`length_bucket`, `batch_bucket`).

  Attributes:
    config: the model section.
    tokenizer: text to ids.
    batch_size: texts written at one time.
  """

  def __init__(
    self,
    restored: Restored,
    tokenizer: Tokenizer,
    *,
    mesh: Mesh | None = None,
    batch_size: int = 8,
  ):
    """Prepares the parameters.

    Args:
      restored: a language model.
      tokenizer: the one it was trained with.
      mesh: devices that share the work; the one that `restored` lies on. None
        is one device.
      batch_size: texts written at one time.

    Raises:
      ValueError: it is not a language model, or the tokenizer has ids that
        it does not have.
    """
    config = restored.config.model
    check_command(config, "generate", "the checkpoint")
    check_vocabulary(tokenizer.vocab_size, config.vocab_size, "tokenizer")
    self.config, self.tokenizer = config, tokenizer
    self.batch_size = batch_size
    mesh = mesh or make_mesh(MeshConfig(), jax.local_devices()[:1])
    # Gates are the same whatever gradients pass them; "all" would make layers
    # compute every head for theirs.
    served = dataclasses.replace(
      config,
      router=dataclasses.replace(config.router, straight_through="selected"),
    )
    model = LLM(served, unrolled=True)
    with use_mesh(mesh):
      params = serving_params(restored.params, config)
    self._params, self._mesh = params, mesh
    self._prefill = decoding.make_prefill(model, default_cache_dtype(config))
    self._decode = decoding.make_decode(model, tokenizer.stop_ids, _SPAN)

  @classmethod
  def from_checkpoint(
    cls,
    directory: str,
    *,
    mesh: Mesh | None = None,
    batch_size: int = 8,
    **options: Any,
  ) -> "Generator":
    """Restores a language model and the tokenizer that lies beside it.

    Args:
      directory: a working directory of `train` or an output of `convert`.
      mesh: as in the constructor.
      batch_size: as in the constructor.
      **options: of `restore`, such as `top_k` or `dtype`.

    Raises:
      FileNotFoundError: there is no checkpoint, or no tokenizer beside it.
      ValueError: the checkpoint is no language model, or `restore` does not
        know an option.
    """
    tokenizer = load_checkpoint_tokenizer(directory, options.get("step"))
    restored = restore(directory, mesh=mesh, **options)
    return cls(restored, tokenizer, mesh=mesh, batch_size=batch_size)

  def fingerprint(self) -> str:
    """Identifies the model by its content; reads all parameters."""
    return fingerprint(self.config, self._params)

  def chat(
    self,
    messages: Sequence[Message],
    sampling: Sampling = _GREEDY,
    template: str | None = None,
    **options: Any,
  ) -> decoding.Completion:
    """Writes the assistant's answer to a conversation.

    Args:
      messages: objects with "role" and "content", in order.
      sampling: how tokens are sampled.
      template: name of the chat template where the model has several.
      **options: what the template gets beside the messages: "tools", a list of
        JSON schemas, "enable_thinking" and so on.

    Raises:
      ValueError: the model has no such template, the template refuses the
        messages, or they are too long for the model.
    """
    prompt = chat_ids(self.tokenizer, messages, template, **options)
    return self.generate([prompt], sampling)[0]

  def generate(
    self,
    prompts: Sequence[Prompt],
    sampling: Sampling = _GREEDY,
    *,
    first: int = 0,
  ) -> list[decoding.Completion]:
    """Writes on from every prompt.

    Args:
      prompts: texts, before which the begin of text is put where the tokenizer
        says so, or ids as they are.
      sampling: how tokens are sampled.
      first: number of the first prompt, where these are some of many: prompt i
        of all of them has samples of its own.

    Returns:
      One completion a prompt.

    Raises:
      ValueError: `prompts` is one text, or a prompt is empty, holds an id
        beyond the vocabulary, or is too long for the model with what is to be
        written.
    """
    if isinstance(prompts, str):
      raise ValueError(f"prompts={prompts!r} must be a list of prompts")
    ids = [self.encode(i, p, sampling) for i, p in enumerate(prompts, first)]
    if not ids:
      return []
    *_, writers = self._write(ids, sampling, first=first)
    return [writer.completion() for writer in writers]

  def stream(
    self, prompt: Prompt, sampling: Sampling = _GREEDY
  ) -> Iterator[str]:
    """Writes on from one prompt, and gives the text as it grows.

    Args:
      prompt: a text or ids, see `generate`.
      sampling: how tokens are sampled.

    Yields:
      Pieces of the text; together they are what `generate` gives.
    """
    ids = self.encode(0, prompt, sampling)
    for (writer,) in self._write([ids], sampling, span=1):
      if piece := writer.new_text():
        yield piece

  def encode(self, index: int, prompt: Prompt, sampling: Sampling) -> list[int]:
    """The tokens of a prompt.

    Args:
      index: number of the prompt, for messages.
      prompt: a text or ids.
      sampling: how tokens will be sampled.

    Raises:
      ValueError: as for `generate`.
    """
    if isinstance(prompt, str):
      bos = self.tokenizer.bos_id
      begins = self.tokenizer.add_bos and bos is not None
      ids = [bos] * begins + self.tokenizer.encode(prompt)
    else:
      ids = [int(token) for token in prompt]
    name = f"prompt {index}"
    if not ids:
      raise ValueError(f"{name} is empty, and no begin of text is added")
    if beyond := [t for t in ids if not 0 <= t < self.config.vocab_size]:
      raise ValueError(
        f"{name}: token {beyond[0]} must be in [0, {self.config.vocab_size})"
      )
    needed = len(ids) + sampling.max_new_tokens
    if needed > self.config.max_length:
      raise ValueError(
        f"{name} has {len(ids)} tokens; with max_new_tokens="
        f"{sampling.max_new_tokens} that is more than model.max_length="
        f"{self.config.max_length}"
      )
    return ids

  def _write(
    self,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    first: int = 0,
    span: int = _SPAN,
  ) -> Iterator[list[decoding.CompletionWriter]]:
    """Gives the writers of all prompts after every `span` tokens."""
    writers = [
      decoding.CompletionWriter(self.tokenizer, sampling, p) for p in prompts
    ]
    # Batches of about one length.
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for start in range(0, len(order), self.batch_size):
      rows = order[start : start + self.batch_size]
      state = self._read(prompts, rows, first, sampling)
      for written in range(0, sampling.max_new_tokens, span):
        count = min(span, sampling.max_new_tokens - written)
        numbers = decoding.span_numbers(sampling, count)
        with use_mesh(self._mesh):
          state, *new = self._decode(
            self._params, state, numbers, sampling.greedy, sampling.cut
          )
        for i, *row in zip(rows, *gather(new)):
          for token, log_prob in itertools.islice(zip(*row), count):
            writers[i].add(int(token), float(log_prob))
        yield writers
        if all(writers[i].finish_reason for i in rows):
          break

  def _read(
    self,
    prompts: Sequence[list[int]],
    rows: Sequence[int],
    first: int,
    sampling: Sampling,
  ) -> decoding.Decoding:
    """Reads the prompts of a batch into a new cache."""
    size = batch_bucket(len(rows), self.config)
    size = len(pad_to_shards(np.zeros(size), self._mesh))
    length = length_bucket(len(prompts[rows[0]]))  # the longest
    slots = length_bucket(length + sampling.max_new_tokens)
    tokens = np.zeros((size, length), np.int32)
    padding = np.full(size, length - 1, np.int32)
    numbers = np.zeros(size, np.int32)
    for row, i in enumerate(rows):
      padding[row], numbers[row] = length - len(prompts[i]), first + i
      tokens[row, padding[row] :] = prompts[i]
    inputs = tokens, padding, numbers, np.arange(size) >= len(rows)
    inputs = [put_batch(x, self._mesh) for x in inputs]
    with use_mesh(self._mesh):
      return self._prefill(self._params, *inputs, slots)


def batch_bucket(texts: int, config: LLMConfig) -> int:
  """Batch size that `texts` prompts are padded to."""
  on_cpu = jax.devices()[0].platform == "cpu"
  # A single row is a matrix-vector product, which XLA keeps off the CPU's
  # bfloat16 units: two rows take a fraction of its time.
  smallest = 2 if on_cpu and config.dtype == "bfloat16" else 1
  return max(smallest, _power(texts))


def length_bucket(tokens: int) -> int:
  """Slots for so many tokens: 4 to 7 times a power of two, at most 1/4 free.

  Every token that is written reads all slots, and every bucket is a program.
  """
  step = max(4, _power(tokens) // 8)
  return max(_SMALLEST_BUCKET, -(-tokens // step) * step)


def _power(size: int) -> int:
  """The power of two that is at least `size`."""
  return 1 << (size - 1).bit_length()


def default_cache_dtype(config: LLMConfig) -> str:
  """The dtype of the key/value cache; a CPU attends fastest in float32."""
  on_cpu = jax.devices()[0].platform == "cpu"
  return "float32" if on_cpu else config.dtype


def serving_params(params: Any, config: LLMConfig) -> Any:
  """Parameters for decoding: layers by themselves, matrices in `dtype`.

  Args:
    params: as trained.
    config: the model.
  """

  def prepare(params: Any) -> Any:
    dtypes = serving_dtypes(params, config)
    cast = jax.tree.map(lambda x, dtype: x.astype(dtype), params, dtypes)
    return unroll(cast, config)

  return jax.jit(prepare)(params)


def complete_file(
  generator: Generator,
  prompts: Sequence[str],
  out: str | os.PathLike,
  sampling: Sampling,
  *,
  settings: dict[str, Any],
  prompt_of: Callable[[Sequence[str]], Prompt] = lambda turns: turns[-1],
) -> int:
  """Writes on from many prompts into a file, where a killed call continues.

  OUT gets a line of JSON for each prompt, in order: "index" (from 0), "prompt"
  and the fields of `Completion`. OUT.settings.json says what it was made with.
  Prompt i has the samples of prompt i in one call of `Generator.generate`,
  whatever the batches.

  Args:
    generator: the model; its `batch_size` texts are written at one time.
    prompts: the texts.
    out: file to write, or to continue.
    sampling: how tokens are sampled.
    settings: what else the texts depend on, as JSON values, such as the
      checkpoint; a later call must have the same.
    prompt_of: from a text, alone in a list, to the prompt.

  Returns:
    Number of completions that were there before.

  Raises:
    ValueError: a prompt is too long for the model, or `out` holds completions
      of other settings or something else.
    OSError: a line cannot be written; those before it are whole.
  """
  out, size = pathlib.Path(out), _CHUNK_BATCHES * generator.batch_size
  stated = out.with_name(out.name + ".settings.json")
  for index, prompt in enumerate(prompts):
    generator.encode(index, prompt_of([prompt]), sampling)
  sha256 = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()
  settings = {"prompts": sha256, **settings, **dataclasses.asdict(sampling)}

  def begin() -> list[int]:
    """Cuts off a part of a chunk; returns the number of lines that stay."""
    lines = out.read_bytes().splitlines(True) if out.exists() else []
    if not same_settings(stated, settings, f"{out} holds completions"):
      if lines:
        raise ValueError(
          f"{out} exists, and no {stated.name} beside it says what it was made "
          "with; choose another --out"
        )
      write_whole(stated, json.dumps(settings, indent=2).encode())
    count = sum(line.endswith(b"\n") for line in lines)
    if count < len(prompts):
      count -= count % size  # so that batches are what they would have been
    out.touch()
    os.truncate(out, sum(map(len, lines[:count])))
    return [count]

  (done,) = ask_first_process(begin, 1)
  is_first = jax.process_index() == 0
  with tqdm.tqdm(
    total=len(prompts),
    initial=done,
    unit="prompt",
    disable=not is_first or None,
  ) as bar:
    for first in range(done, len(prompts), size):
      chunk = prompts[first : first + size]
      made = generator.generate(
        [prompt_of([text]) for text in chunk], sampling, first=first
      )
      if is_first:
        rows = (
          {"index": index, "prompt": text, **dataclasses.asdict(completion)}
          for index, (text, completion) in enumerate(zip(chunk, made), first)
        )
        text = "".join(f"{strict_json(row)}\n" for row in rows)
        try:
          with out.open("a") as file:
            file.write(text)
        except OSError as error:
          raise OSError(
            f"{out} cannot be written: {error}; the lines before are whole"
          ) from error
      bar.update(len(chunk))
  return done
