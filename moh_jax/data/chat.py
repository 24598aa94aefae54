"""Chat templates: from messages to the text that a model was tuned on.

A template is a Jinja text of the checkpoint's author, so it runs in a sandbox
that lets it change nothing and read nothing but the messages and the names of
the special tokens: that of transformers, with its filters and tags. Even there
`'a' * 10**10` or loops in loops would take all memory or never end, and nothing
in a process could end them, so templates run in another one with bounds.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moh_jax.data import tokenizers
from moh_jax.data.input_files import import_extra
from moh_jax.runtime.json_files import check_json

Message = Mapping[str, Any]  # "role" and "content", and what templates ask for
Span = tuple[int, int]
ASSISTANT = "assistant"
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_KEY = "chat_template"
_DEFAULT = "default"
_MOST_TEXT = 1 << 22  # characters of a conversation
SECONDS = 5  # of computing, for one conversation
_MEMORY = 1 << 29  # bytes beside what the libraries take
_MOST_MESSAGE = 500  # characters of an error
_CODE = "from moh_jax.data import chat; chat.main()"
_LOCK = threading.Lock()


def libraries() -> tuple[Any, Any]:
  """Jinja, and the part of transformers that renders chat templates.

  Raises:
    ValueError: one of them is missing.
  """
  theirs = "transformers.utils.chat_template_utils"
  return tuple(import_extra(n, "a chat template") for n in ("jinja2", theirs))


class Template:
  """A chat template of a tokenizer.

  Attributes:
    file: that holds it, for messages.
  """

  def __init__(self, tokenizer: tokenizers.Tokenizer, name: str | None = None):
    """Finds the template.

    Args:
      tokenizer: with the files beside it, which hold the template.
      name: of the template where there are several; None is "default".

    Raises:
      ValueError: there is no such template, or a file is damaged.
    """
    found, wanted = _sources(tokenizer.files), name or _DEFAULT
    if not found:
      raise ValueError(
        "the model has no chat template: there is no "
        f"{tokenizers.TEMPLATE} beside its tokenizer and no {_KEY!r} in "
        f"{tokenizers.TOKENIZER_CONFIG}"
      )
    if wanted not in found:
      raise ValueError(
        f"chat template {wanted!r} must be one of {tuple(found)}"
      )
    source, self.file = found[wanted]
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    own = {k: tokenizer.id_to_token(i) for k, i in ids.items() if i is not None}
    tokens = own | tokenizers.named_tokens(tokenizer.files)
    tokens = {key: token for key, token in tokens.items() if token}
    stops = tuple(filter(None, map(tokenizer.id_to_token, tokenizer.stop_ids)))
    self._state = {"source": source, "tokens": tokens, "stops": stops}

  def render(
    self, messages: Sequence[Message], *, add_generation_prompt: bool = True
  ) -> str:
    """Writes a conversation as the text that the model reads.

    Args:
      messages: with "role" and "content", in order.
      add_generation_prompt: end with what begins the assistant's answer.

    Raises:
      ValueError: the template refuses the messages, for example their order,
        fails or takes too long, or a library is missing.
    """
    prompt = {"add_generation_prompt": add_generation_prompt}
    return self._call("render", messages, **prompt)

  def answers(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """Writes a conversation, and finds in it what the assistant wrote.

    A template may mark that itself ({% generation %}). Else an answer begins
    where the messages before it and the prompt for an answer end, and ends with
    the first token that ends a generated text, or where the next message
    begins.

    Returns:
      The text, and the answers' spans (start, stop) in it, in order.

    Raises:
      ValueError: as `render`, or the template, without marks, writes messages
        otherwise where others follow, or changes an answer.
    """
    text, spans = self._call("answers", messages)
    return text, [(start, stop) for start, stop in spans]

  def _call(
    self, method: str, messages: Sequence[Message], **options: Any
  ) -> Any:
    try:
      return _call(method, self._state, messages, **options)
    except (ValueError, TypeError) as error:  # TypeError: no JSON
      raise ValueError(f"{self.file}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Writer:
  """What writes conversations by a template, see `Template`.

  Attributes:
    source: of the template.
    tokens: texts of special tokens by key, such as "bos_token".
    stops: texts of the tokens that end a generated text.
  """

  source: str
  tokens: dict[str, str]
  stops: Sequence[str]

  def render(
    self, messages: Sequence[Message], *, add_generation_prompt: bool = True
  ) -> str:
    """As `Template.render`."""
    prompt = {"add_generation_prompt": add_generation_prompt}
    text, _ = self._run(messages, **prompt)
    return text

  def answers(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """As `Template.answers`."""
    if _MARK.search(self.source):
      text, spans = self._run(messages, return_assistant_tokens_mask=True)
      return text, [(start, stop) for start, stop in spans if start < stop]
    text = self.render(messages, add_generation_prompt=False)
    spans = []
    for index, message in enumerate(messages):
      if message["role"] != ASSISTANT:
        continue
      before = self.render(messages[:index])
      start, stop = len(before), self._stop(text, messages, index, len(before))
      answer = text[start:stop]
      parts = message.get("content") or ""
      parts = [parts] if isinstance(parts, str) else [_part(x) for x in parts]
      is_whole = all(part.strip() in answer for part in parts)
      if not text.startswith(before) or not answer or not is_whole:
        raise ValueError(
          f"does not write message {index} as an answer to those before it, so "
          "what to train is unknown: it needs the marks {% generation %} and "
          "{% endgeneration %} around answers"
        )
      spans.append((start, stop))
    return text, spans

  def _stop(
    self, text: str, messages: Sequence[Message], index: int, start: int
  ) -> int:
    """Where the answer `index` ends that begins at `start`; 0 is unknown."""
    found = [(text.find(stop, start), stop) for stop in self.stops]
    at, stop = min((x for x in found if x[0] >= 0), default=(len(text), ""))
    if index + 1 == len(messages):
      return at + len(stop)
    # The first stop may be that of a later message: then a change of the next
    # one changes text before the stop.
    following = messages[index + 1]
    longer = {**following, "content": _longer(following.get("content"))}
    changed = [*messages[: index + 1], longer, *messages[index + 2 :]]
    other = self.render(changed, add_generation_prompt=False)
    if stop and other[start : at + len(stop)] == text[start : at + len(stop)]:
      return at + len(stop)
    ended = self.render(messages[: index + 1], add_generation_prompt=False)
    return len(ended) if text.startswith(ended) else 0

  def _run(
    self, messages: Sequence[Message], **options: Any
  ) -> tuple[str, list[Span]]:
    """The text of a conversation, and spans where they are asked for."""
    jinja, library = libraries()
    try:
      texts, spans = library.render_jinja_template(
        [messages], chat_template=self.source, **options, **self.tokens
      )
    except jinja.TemplateSyntaxError as error:
      raise ValueError(f"line {error.lineno}: {error}") from error
    except Exception as error:  # whatever a wrong template does
      what = f"fails: {type(error).__name__}"
      if type(error) is jinja.TemplateError:  # of `raise_exception`
        what = "refuses the messages"
      raise ValueError(f"{what}: {error}") from error
    if len(texts[0]) > _MOST_TEXT:
      raise ValueError(f"fails: more than {_MOST_TEXT:,} characters of text")
    return texts[0], spans[0] if spans else []


@functools.cache
def _process(owner: int) -> subprocess.Popen:
  """The process of this one, whose id is `owner`: forks have their own."""
  del owner
  path = os.pathsep.join(map(os.path.abspath, sys.path))
  process = subprocess.Popen(
    [sys.executable, "-P", "-c", _CODE],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    env={**os.environ, "PYTHONPATH": path},
    start_new_session=True,  # Ctrl-C is for the program that asks
  )
  atexit.register(_end, process)
  return process


def _end(process: subprocess.Popen) -> None:
  process.kill()
  with contextlib.suppress(BrokenPipeError), process:
    pass  # closes its pipes


def _ask(request: bytes) -> bytes:
  """Sends a line to `main`; returns its answer."""
  with _LOCK:
    process = _process(os.getpid())
    try:
      with contextlib.suppress(BrokenPipeError):  # then there is no answer
        process.stdin.write(request + b"\n")
        process.stdin.flush()
      if answer := process.stdout.readline():
        return answer
      what = f"its process ended with {process.wait()}"
      if process.returncode == -signal.SIGPROF:
        what = f"it takes more than {SECONDS} seconds"
      raise ValueError(f"fails: {what}")
    except BaseException:  # its next answer would be that of this request
      _end(process)
      _process.cache_clear()
      raise


def _call(method: str, state: dict[str, Any], *args: Any, **given: Any) -> Any:
  """Calls a method of a `Writer` with these fields in the process.

  All values are JSON.

  Raises:
    ValueError: the method fails, or takes too much time or memory.
  """
  request = [method, state, args, given]
  answer = json.loads(_ask(json.dumps(request).encode()))
  if "error" in answer:
    raise ValueError(answer["error"])
  return answer["value"]


def main() -> None:
  """Answers requests, one a line, until there are no more."""
  os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
  with contextlib.suppress(ValueError):  # each call says what is missing
    libraries()
  with contextlib.suppress(OSError, ValueError):  # as on macOS
    with open("/proc/self/statm") as file:
      used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY,) * 2)
  for line in sys.stdin.buffer:
    # Without a handler the signal ends the process whatever it computes.
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
      method, state, args, options = json.loads(line)
      value = getattr(Writer(**state), method)(*args, **options)
      answer = json.dumps({"value": value})
    except (ValueError, MemoryError) as error:
      text = str(error)[:_MOST_MESSAGE] or "fails: MemoryError"
      answer = json.dumps({"error": " ".join(text.split())})
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()


def render_chat(
  tokenizer: tokenizers.Tokenizer,
  messages: Sequence[Message],
  template: str | None = None,
  *,
  add_generation_prompt: bool = True,
) -> str:
  """Writes a conversation as the text that the model reads.

  Args:
    tokenizer: with the files beside it, which hold the template.
    messages: with "role" and "content", in order.
    template: name of the template where there are several; None is "default".
    add_generation_prompt: end with what begins the assistant's answer.

  Raises:
    ValueError: there is no such template, the messages are none, or the
      template refuses them; see `Template`.
  """
  check_messages(messages)
  prompt = {"add_generation_prompt": add_generation_prompt}
  return Template(tokenizer, template).render(messages, **prompt)


def chat_ids(
  tokenizer: tokenizers.Tokenizer,
  messages: Sequence[Message],
  template: str | None = None,
) -> list[int]:
  """Returns the ids of a conversation, up to where the answer begins.

  Args:
    tokenizer: of the model, with the files beside it.
    messages: with "role" and "content", in order.
    template: name of the template where there are several.

  Raises:
    ValueError: there is no such template, or it refuses the messages.
  """
  text = render_chat(tokenizer, messages, template)
  # The template writes the begin of text itself, and no user text is escaped:
  # the name of a special token is that token wherever it stands.
  return tokenizer.encode(text, parse_special=True)


def template_names(tokenizer: tokenizers.Tokenizer) -> tuple[str, ...]:
  """Names of the templates of a tokenizer.

  Raises:
    ValueError: a file that should hold them is damaged.
  """
  return tuple(_sources(tokenizer.files))


def check_messages(messages: Any) -> None:
  """Checks that a value is a conversation.

  Raises:
    ValueError: it is no list of objects with a "role" and a "content".
  """
  is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
  if not is_list or not messages:
    raise ValueError(f"messages={messages!r} must be a list, and not empty")
  for index, message in enumerate(messages):
    check_json(message, _Message, f"message {index}")


class _Message(msgspec.Struct):
  role: str
  content: str | list | None = None


def _sources(files: Mapping[str, bytes]) -> dict[str, tuple[str, str]]:
  """Templates by name, each with the file that holds it."""
  own = {_DEFAULT: tokenizers.TEMPLATE} if tokenizers.TEMPLATE in files else {}
  for path in files:
    folder, _, name = path.rpartition("/")
    if folder == tokenizers.TEMPLATE_FOLDER:
      own[name.removesuffix(".jinja")] = path
  if own:
    return {name: (_text(p, files[p]), p) for name, p in own.items()}
  for file in (tokenizers.TOKENIZER_CONFIG, tokenizers.TEMPLATE_JSON):
    stored = tokenizers.read_json(files, file).get(_KEY)
    if stored is not None:
      return {name: (text, file) for name, text in _named(file, stored).items()}
  return {}


def _named(file: str, stored: Any) -> dict[str, str]:
  """Templates by name, as a JSON file has them: one, a list, or an object."""
  if isinstance(stored, str):
    return {_DEFAULT: stored}
  if isinstance(stored, list) and all(isinstance(x, dict) for x in stored):
    stored = {entry.get("name"): entry.get("template") for entry in stored}
  if isinstance(stored, dict) and all(
    isinstance(x, str) for pair in stored.items() for x in pair
  ):
    return stored
  raise ValueError(
    f"{file}: {_KEY} must be a text, or a list of objects with 'name' and "
    "'template'"
  )


def _part(part: Any) -> str:
  """The text of a part of a content, "" of an image and the like."""
  text = part.get("text") if isinstance(part, Mapping) else None
  return text if isinstance(text, str) else ""


def _longer(content: Any) -> Any:
  """A content with a word more."""
  if isinstance(content, list):
    return [*content, {"type": "text", "text": "x"}]
  return f"{content or ''}x"


def _text(path: str, content: bytes) -> str:
  try:
    return content.decode()
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: not UTF-8: {error}") from error
