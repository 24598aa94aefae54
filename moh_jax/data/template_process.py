"""Chat templates in a process of their own, with bounds.

A template runs in the sandbox of transformers, where `'a' * 10**10` or loops in
loops would still take all memory or never end, and nothing in a process could
end them.
"""

import atexit
import contextlib
import dataclasses
import functools
import itertools
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

from moh_jax.data.input_files import import_extra

Message = Mapping[str, Any]  # "role" and "content", and what templates ask for
Span = tuple[int, int]
ASSISTANT = "assistant"
# The marks of templates around what is trained, and ours within: a character,
# and a tag that trims the text beside it as theirs did.
_BEGIN = re.compile(r"(\{%[-+]?\s*generation\s*)([-+]?%\})")
_END = re.compile(r"(\{%[-+]?)(\s*endgeneration\s*[-+]?%\})")
_OURS = (
  r"\1%%}{{ '%s' }}{%% set moh_jax_mark = 0 \2",
  r"\1 set moh_jax_mark = 0 %%}{{ '%s' }}{%%\2",
)
_CHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # that stand for nothing
_MOST_TEXT = 1 << 22  # characters of a conversation
SECONDS = 5  # of computing, for one conversation
_MEMORY = 1 << 29  # bytes beside what the libraries take
_MOST_MESSAGE = 500  # characters of an error
_CODE = "from moh_jax.data import template_process; template_process.main()"
_LOCK = threading.Lock()


def libraries() -> tuple[Any, Any]:
  """Jinja, and the part of transformers that renders chat templates.

  Raises:
    ValueError: one of them is missing.
  """
  theirs = "transformers.utils.chat_template_utils"
  return tuple(import_extra(n, "a chat template") for n in ("jinja2", theirs))


@dataclasses.dataclass(frozen=True)
class Writer:
  """What writes conversations by a template, see `chat.Template`.

  Attributes:
    source: of the template.
    tokens: what the template gets beside the messages: texts of special tokens
      by key, such as "bos_token", "tools" and so on.
    stops: texts of the tokens that end a generated text.
  """

  source: str
  tokens: dict[str, Any]
  stops: Sequence[str]

  def render(
    self, messages: Sequence[Message], *, add_generation_prompt: bool = True
  ) -> str:
    """Writes a conversation as the text that the model reads."""
    jinja, library = libraries()
    try:
      (text,), _ = library.render_jinja_template(
        [messages],
        chat_template=self.source,
        add_generation_prompt=add_generation_prompt,
        **self.tokens,
      )
    except jinja.TemplateSyntaxError as error:
      raise ValueError(f"line {error.lineno}: {error}") from error
    except Exception as error:  # whatever a wrong template does
      what = f"fails: {type(error).__name__}"
      if type(error) is jinja.TemplateError:  # of `raise_exception`
        what = "refuses the messages"
      raise ValueError(f"{what}: {error}") from error
    if len(text) > _MOST_TEXT:
      raise ValueError(f"fails: more than {_MOST_TEXT:,} characters of text")
    text.encode()  # halves of surrogate pairs are no text, but JSON joins them
    return text

  def answers(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """As `chat.Template.answers`."""
    wanted = [x.get("weight", 1) for x in messages if x["role"] == ASSISTANT]
    messages = [{k: x[k] for k in x if k != "weight"} for x in messages]
    if _BEGIN.search(self.source):
      text, spans = self._marked(messages)
    else:
      text, spans = self._unmarked(messages)
    self._check_contents(messages, text, spans)
    self._check_calls(messages)
    if not all(wanted):
      if len(spans) != len(wanted):
        raise ValueError("marks other parts than answers, which have weights")
      spans = itertools.compress(spans, wanted)
    return text, [(start, stop) for start, stop in spans if start < stop]

  def _check_contents(
    self, messages: Sequence[Message], text: str, spans: Sequence[Span]
  ) -> None:
    """Refuses contents that are no text and stand as Python writes them."""
    answers = [i for i, x in enumerate(messages) if x["role"] == ASSISTANT]
    own = dict(zip(answers, spans)) if len(answers) == len(spans) else {}
    for index, message in enumerate(messages):
      if isinstance(content := message.get("content", ""), str):
        continue
      python, answer = str(content), text[slice(*own.get(index, (0, 0)))]
      begins = answer.lstrip().startswith(python)
      if begins or (content and python in text):
        raise ValueError(
          f"writes the content of message {index}, which is no text, as Python "
          f"does: {python[:40]}"
        )

  def _check_calls(self, messages: Sequence[Message]) -> None:
    """Refuses calls of tools whose names are not written."""
    # OpenAI's form of a call has the other one within it.
    renamed, forms = json.loads(json.dumps(messages)), {"function", "arguments"}
    calls = [c for x in renamed for c in x.get("tool_calls") or ()]
    called = [c.get("function", c) for c in calls if forms.intersection(c)]
    for number, one in enumerate(called):
      one["name"] = f"moh_jax_{number}_"
    text = called and self.render(renamed, add_generation_prompt=False)
    if any(one["name"] not in text for one in called):
      raise ValueError("does not write all 'tool_calls'")

  def _unmarked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """A conversation, and the answers in it, by what others would change.

    The span of an answer without a question is empty: some templates cannot
    write what is before it.
    """
    text = self.render(messages, add_generation_prompt=False)
    spans = []
    for index, message in enumerate(messages):
      if message["role"] != ASSISTANT:
        continue
      spans.append((0, 0))
      before, asked = None, any(x["role"] == "user" for x in messages[:index])
      with contextlib.suppress(*() if asked else (ValueError,)):
        before = self.render(messages[:index]) if index else None
      if before is None:
        continue
      start, stop = len(before), self._stop(text, messages, index, len(before))
      answer = text[start:stop]
      is_whole = _holds(answer, message.get("content") or "", self.stops)
      if not text.startswith(before) or not answer or not is_whole:
        raise ValueError(
          f"does not write message {index} as an answer to those before it, so "
          "what to train is unknown: it needs the marks {% generation %} and "
          "{% endgeneration %} around answers"
        )
      spans[-1] = start, stop
    return text, spans

  def _stop(
    self, text: str, messages: Sequence[Message], index: int, start: int
  ) -> int:
    """Where the answer `index` ends that begins at `start`; 0 is unknown."""
    found = [(text.find(stop, start), stop) for stop in self.stops]
    at, stop = min((x for x in found if x[0] >= 0), default=(len(text), ""))
    end = at + len(stop)
    ended = text
    if index + 1 < len(messages):
      ended = self.render(messages[: index + 1], add_generation_prompt=False)
    is_alike = text.startswith(ended)
    if is_alike and (not stop or end <= len(ended)):
      return min(end, len(ended))
    # The stop follows what is written of these messages alone. It is that of a
    # later message if other text stands between, or if a change of the next
    # message changes text before it.
    following = messages[index + 1]
    longer = {**following, "content": _longer(following.get("content"))}
    changed = [*messages[: index + 1], longer, *messages[index + 2 :]]
    other = self.render(changed, add_generation_prompt=False)
    is_shown = other != text  # else the change says nothing
    is_next = not (is_alike and text[len(ended) : at].strip())
    if stop and is_next and is_shown and other[start:end] == text[start:end]:
      return end
    return len(ended) if is_alike else 0

  def _marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
    """A conversation, and what the template marks in it.

    transformers counts characters as they are written, which misplaces marks
    in macros, filters and set blocks; characters in the text move with it.
    """
    for _ in range(2):  # a template may tell the time
      text = self.render(messages, add_generation_prompt=False)
      begin, end = [x for x in _CHARACTERS if x not in text + self.source][:2]
      source = _BEGIN.sub(_OURS[0] % begin, self.source)
      source = _END.sub(_OURS[1] % end, source)
      writer = dataclasses.replace(self, source=source)
      written = writer.render(messages, add_generation_prompt=False)
      parts = re.split(f"([{begin}{end}])", written)  # text, mark, text, ...
      marks = "".join(parts[1::2])
      if "".join(parts[::2]) == text and not marks.replace(begin + end, ""):
        ends = list(itertools.accumulate(map(len, parts[::2])))
        spans = zip(ends[::2], ends[1::2])
        return text, list(spans)
    raise ValueError(
      "writes otherwise with a character at each {% generation %} and {% "
      "endgeneration %}, so what to train is unknown: these tags may not be "
      "nested, nor quoted, nor what they enclose be cut or counted"
    )


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


def call(method: str, state: dict[str, Any], *args: Any, **given: Any) -> Any:
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


def _part(part: Any) -> str:
  """The text of a part of a content, "" of an image and the like."""
  text = part.get("text") if isinstance(part, Mapping) else None
  return text if isinstance(text, str) else ""


def _holds(answer: str, content: Any, stops: Sequence[str]) -> bool:
  """Whether an answer has all texts of a content, in order, before its stop."""
  stop = next(filter(answer.endswith, stops), "")
  place, end = 0, len(answer) - len(stop)
  for part in [content] if isinstance(content, str) else map(_part, content):
    part = part.strip().removesuffix(stop)
    if (found := answer.find(part, place, end)) < 0:
      return False
    place = found + len(part)
  return True


def _longer(content: Any) -> Any:
  """A content with a word more on both sides."""
  if isinstance(content, list):
    word = {"type": "text", "text": "x"}
    return [word, *content, word]
  return f"x{content or ''}x"
