"""Text generation with a key/value cache, and completions of whole files."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import tqdm
import xxhash
from jax.sharding import Mesh

from moh_jax.config import CACHE_DTYPES, LLMConfig, MeshConfig, check_command
from moh_jax.config.llm import Sampling
from moh_jax.data.chat import Message, chat_ids
from moh_jax.data.tokenizers import Tokenizer, check_vocabulary
from moh_jax.inference import decoding
from moh_jax.inference.batch import Batch, Programs
from moh_jax.inference.restore import (
  Restored,
  fingerprint,
  load_checkpoint_tokenizer,
  restore,
)
from moh_jax.models.llm import LLM, unroll
from moh_jax.models.registry import serving_dtypes
from moh_jax.runtime import sharding
from moh_jax.runtime.files import (
  check_regular,
  disk_errors,
  only_writer,
  write_whole,
)
from moh_jax.runtime.json_files import (
  parse_json,
  read_json,
  same_settings,
  strict_json,
)
from moh_jax.runtime.processes import ask_first_process

Prompt = str | Sequence[int]

_SPAN = 16  # tokens between two looks at what was written
_GREEDY = Sampling()
# Of a completion that a file holds.
_KEYS = {"index", "prompt", *decoding.Completion.__dataclass_fields__}
_MOST_LINE_BYTES = 1 << 28
_NOTE = "_written"  # beside the settings
# Batches of a file whose prompts are sorted by length and written together.
_CHUNK_BATCHES = 8
_OPTIONS = ("cache_dtype", "batch_size", "add_bos", "parse_special")


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
    cache_dtype: str | None = None,
    batch_size: int = 8,
    add_bos: bool | None = None,
    parse_special: bool = False,
  ):
    """Prepares the parameters.

    Args:
      restored: a language model.
      tokenizer: the one it was trained with.
      mesh: devices that share the work; the one that `restored` lies on. None
        is one device.
      cache_dtype: of keys and values: "float32" or "bfloat16"; None is
        the compute dtype, on a CPU float32.
      batch_size: texts written at one time.
      add_bos: whether prompts begin with the begin of text; None does what the
        tokenizer says.
      parse_special: whether names of special tokens in a prompt become these
        tokens; False takes them as text.

    Raises:
      ValueError: the model is none of language, the tokenizer has ids that it
        does not have, or an argument is none of the allowed.
    """
    config = restored.config.model
    check_command(restored.config.model, "generate", "the checkpoint")
    cache_dtype = cache_dtype or default_cache_dtype(config)
    if cache_dtype not in CACHE_DTYPES:
      raise ValueError(
        f"cache_dtype={cache_dtype!r} must be one of {CACHE_DTYPES}"
      )
    if batch_size < 1:
      raise ValueError(f"batch_size={batch_size} must be at least 1")
    check_vocabulary(tokenizer, config.vocab_size)
    if add_bos and tokenizer.bos_id is None:
      raise ValueError("add_bos=True: the tokenizer has no begin of text")
    self.config, self.tokenizer = config, tokenizer
    self._add_bos, self._parse_special = add_bos, parse_special
    self.batch_size = batch_size
    one = jax.local_devices()[:1]
    mesh = mesh or sharding.make_mesh(MeshConfig(), one)
    # Gates are the same whatever gradients pass them; "all" would make layers
    # compute every head for theirs.
    served = dataclasses.replace(
      config,
      router=dataclasses.replace(config.router, straight_through="selected"),
    )
    model = LLM(served, unrolled=True)
    with sharding.use_mesh(mesh):
      params = serving_params(restored.params, config)
    self._programs = Programs(
      config,
      params,
      decoding.make_prefill(model, cache_dtype),
      decoding.make_decode(model, tokenizer.stop_ids, _SPAN),
      mesh,
      shares=cache_dtype in (config.dtype, "float32")
      and config.rope.scaling != "dynamic",
    )

  @classmethod
  def from_checkpoint(
    cls, directory: str, *, mesh: Mesh | None = None, **options: Any
  ) -> "Generator":
    """Restores a language model and the tokenizer that lies beside it.

    Args:
      directory: a working directory of `train` or an output of `convert`.
      mesh: as in the constructor.
      **options: `cache_dtype`, `batch_size`, `add_bos` and `parse_special` of
        the constructor; others are of `restore`, such as `top_k` or `dtype`.

    Raises:
      FileNotFoundError: there is no checkpoint, or no tokenizer beside it.
      ValueError: the checkpoint is no language model, or an option is none of
        the allowed.
    """
    tokenizer = load_checkpoint_tokenizer(directory)
    ours = {name: options.pop(name) for name in _OPTIONS if name in options}
    restored = restore(directory, mesh=mesh, **options)
    return cls(restored, tokenizer, mesh=mesh, **ours)

  def fingerprint(self) -> str:
    """Identifies the model by its content; reads all parameters."""
    return fingerprint(self.config, self._programs.params)

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
      prompts: texts, before which the begin of text is put where `add_bos` and
        the tokenizer say so, or ids as they are.
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
      ids = decoding.prompt_ids(
        self.tokenizer,
        prompt,
        add_bos=self._add_bos,
        parse_special=self._parse_special,
      )
    else:
      ids = [int(token) for token in prompt]
    name = f"prompt {index}"
    if not ids:
      raise ValueError(f"{name} is empty, and no begin of text is added")
    beyond = [t for t in ids if not 0 <= t < self.config.vocab_size]
    if beyond:
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
    batch = Batch(
      self._programs,
      prompts,
      writers,
      sampling,
      size=self.batch_size,
      first=first,
      span=span,
    )
    while not all(writer.finish_reason for writer in writers):
      batch.write()
      yield writers


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

  return jax.jit(prepare)(nn.unbox(params))


def complete_file(
  generator: Generator,
  prompts: Sequence[str],
  out: str | os.PathLike,
  sampling: Sampling,
  *,
  settings: dict[str, Any],
  prompt_of: Callable[[Sequence[str]], Prompt] = lambda turns: turns[-1],
) -> int:
  """Writes on from every prompt of a file.

  OUT gets a line of JSON for each prompt, in order: "index" (from 0), "prompt"
  and the fields of `Completion`. A call that was killed goes on after the last
  whole line, and the file ends as if nothing had happened. OUT.settings.json
  says what it was made with. Prompt i has the samples of prompt i in one call
  of `Generator.generate`, whatever the batches.

  Args:
    generator: the model; its `batch_size` texts are written at one time.
    prompts: of the file.
    out: file to write, or to continue.
    sampling: how tokens are sampled.
    settings: what else the texts depend on, as JSON values, such as the
      checkpoint; a later call must have the same.
    prompt_of: from the row's text, alone in a list, to the prompt.

  Returns:
    Number of completions that were there before.

  Raises:
    ValueError: a prompt is too long for the model, or `out` holds completions
      of other settings or something else.
    OSError: a line cannot be written; those before it are whole.
  """
  out = pathlib.Path(out)
  settings = {
    "prompts": xxhash.xxh3_128_hexdigest(json.dumps(list(prompts)).encode()),
    **settings,
    **dataclasses.asdict(sampling),
  }
  for index, prompt in enumerate(prompts):
    generator.encode(index, prompt_of([prompt]), sampling)
  with contextlib.ExitStack() as held:  # the file, by the first process
    written = _Written(out, settings)
    (done,) = ask_first_process(lambda: [_open(written, prompts, held)], 1)
    is_first = jax.process_index() == 0
    size = _CHUNK_BATCHES * generator.batch_size
    # A chunk that is half written is made again, with the same batches.
    first = done // size * size if done < len(prompts) else done
    texts = itertools.islice(prompts, first, None)
    with tqdm.tqdm(
      total=len(prompts),
      initial=done,
      unit="prompt",
      disable=not is_first or None,
    ) as bar:
      while chunk := list(itertools.islice(texts, size)):
        made = generator.generate(
          [prompt_of([text]) for text in chunk], sampling, first=first
        )
        rows = [
          {"index": index, "prompt": text, **dataclasses.asdict(completion)}
          for index, text, completion in zip(
            itertools.count(first), chunk, made
          )
        ][max(done - first, 0) :]
        if is_first:
          with disk_errors(str(out), "the lines before are"):
            written.append(rows)
        bar.update(len(rows))
        first += len(chunk)
    return done


class _Written:
  """A file of completions, and beside it settings and checksum of its lines."""

  def __init__(self, out: pathlib.Path, settings: dict[str, Any]):
    self.out, self.settings = out, settings
    self.stated = out.with_name(out.name + ".settings.json")
    self.size, self._sum = 0, xxhash.xxh3_128()

  def note(self) -> dict[str, Any]:
    """What identifies the lines so far."""
    return {"bytes": self.size, "xxh3": self._sum.hexdigest()}

  def add(self, line: bytes) -> None:
    """Counts a line that is in the file."""
    self._sum.update(line)
    self.size += len(line)

  def append(self, rows: Sequence[dict[str, Any]]) -> None:
    """Writes lines; killed before the note, the file has more than it says."""
    with self.out.open("ab") as file:
      for row in rows:
        line = strict_json(row).encode() + b"\n"
        file.write(line)
        self.add(line)
      file.flush()
      os.fsync(file.fileno())
    self.state()

  def state(self) -> None:
    """Writes settings and note."""
    text = json.dumps({**self.settings, _NOTE: self.note()}, indent=2)
    write_whole(self.stated, f"{text}\n".encode())


def _open(
  written: _Written, prompts: Sequence[str], held: contextlib.ExitStack
) -> int:
  """Starts the file, or cuts off a half-written line; returns whole lines."""
  out, stated = written.out, written.stated
  if out.exists():
    check_regular(out)
  out.touch()
  held.enter_context(only_writer(out))
  if not out.stat().st_size:
    with disk_errors(str(stated), "nothing else is"):
      written.state()
  if not same_settings(stated, written.settings, f"{out} holds completions"):
    raise ValueError(
      f"{out} exists, and no {stated.name} beside it says what it was made "
      "with; choose another --out"
    )
  # Versions before left none.
  note, notes = read_json(stated).get(_NOTE), [written.note()]
  lines, texts = 0, iter(prompts)
  with out.open("r+b") as file:
    while line := file.readline(_MOST_LINE_BYTES):
      if line.endswith(b"\n") or len(line) == _MOST_LINE_BYTES:
        with contextlib.suppress(ValueError, TypeError, KeyError):
          row = parse_json(line, max_bytes=_MOST_LINE_BYTES)
          wanted = [(lines, text) for text in itertools.islice(texts, 1)]
          is_index = type(row["index"]) is int and row.keys() == _KEYS
          if is_index and [(row["index"], row["prompt"])] == wanted:
            written.add(line)
            notes.append(written.note())
            lines += 1
            continue
        raise ValueError(
          f"{out}, line {lines + 1}: not what was written for prompt {lines}; "
          "remove the file, or choose another --out"
        )
    if note is not None and note not in notes:
      raise ValueError(
        f"{out}: its lines are not what was written; remove the file, or "
        "choose another --out"
      )
    file.truncate(written.size)
  return lines
