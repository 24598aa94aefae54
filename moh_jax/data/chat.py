"""Chat templates: from messages to the text that a model was tuned on.

A template is a Jinja text of the checkpoint's author. It runs in transformers'
sandbox, with its filters and tags, which lets it change nothing and read
nothing but the messages and the names of the special tokens.
"""

import copy
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from moh_jax.data import tokenizers
from moh_jax.data.files import import_extra
from moh_jax.data.tokenizers import Tokenizer
from moh_jax.runtime.files import check_json

Message = Mapping[str, Any]  # "role" and "content", and what templates ask for
Messages = Sequence[Message]
Options = Mapping[str, Any]  # what a template gets beside the messages
Span = tuple[int, int]
_Answers = tuple[str, list[Span]]  # a conversation, and where they are in it
ASSISTANT = "assistant"
_DEFAULT = "default"
# Fields of rows or messages that change what is read or trained, and that few
# templates know. Thoughts have several names, and transformers gives them all.
FIELDS = (
  "tools functions function_call tool_choice documents context system_prompt "
  "image images video videos audio audios train training loss mask"
).split()
_RARE = *zip(FIELDS), ("reasoning_content", "thinking", "reasoning")
# The marks of templates around what is trained, and ours within: a character,
# and a tag that trims the text beside it as theirs did.
_BEGIN = re.compile(r"(\{%[-+]?\s*generation\s*)([-+]?%\})")
_END = re.compile(r"(\{%[-+]?)(\s*endgeneration\s*[-+]?%\})")
_OURS = (
  r"\1%%}{{ '%s' }}{%% set moh_jax_mark = 0 \2",
  r"\1 set moh_jax_mark = 0 %%}{{ '%s' }}{%%\2",
)
_Write = Callable[..., str]  # of messages, by a template with its options
_CHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))  # that stand for nothing


# A template for tokenizers without one, with their own begin and end of text
# around each message.
CHATML = "chatml"
_CHATML = """\
{% for message in messages %}
{{ bos_token or eos_token }}{{ message.role }}
{{ message.content }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
{{ bos_token or eos_token }}assistant
{% endif %}
"""


def chatml_files() -> dict[str, bytes]:
  """The template "chatml" as the one of a tokenizer, and by its name."""
  named = f"{tokenizers.TEMPLATE_FOLDER}/{CHATML}.jinja"
  return dict.fromkeys((tokenizers.TEMPLATE, named), _CHATML.encode())


class Template:
  """A chat template of a tokenizer.

  Attributes:
    file: that holds it, for messages.
  """

  def __init__(self, tokenizer: Tokenizer, name: str = ""):
    """Finds the template.

    Args:
      tokenizer: with the files beside it, which hold the template.
      name: of the template where there are several; "" is "default".

    Raises:
      ValueError: there is no such template, or a file is damaged.
    """
    found, wanted = _sources(tokenizer.files), name or _DEFAULT
    if wanted not in found:
      has = f"only {', '.join(found)}" if found else "nor any other"
      raise ValueError(
        f"no chat template {wanted!r} beside the tokenizer, {has}; training "
        f"with --config.data.template={CHATML} gives it one"
      )
    self._source, self.file = found[wanted]
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    own = {k: tokenizer.id_to_token(i) for k, i in ids.items() if i is not None}
    tokens = own | tokenizers.named_tokens(tokenizer.files)
    self._tokens = {key: token for key, token in tokens.items() if token}
    # Texts of the tokens that end a generated text.
    stops = map(tokenizer.id_to_token, tokenizer.stop_ids)
    self._stops = [stop for stop in stops if stop]

  def render(
    self, messages: Messages, *, prompt: bool = True, **options: Any
  ) -> str:
    """Writes a conversation as the text that the model reads.

    Args:
      messages: with "role" and "content", in order.
      prompt: end with what begins the assistant's answer.
      **options: what the template gets beside the messages: "tools", a list of
        JSON schemas, "enable_thinking" and so on.

    Raises:
      ValueError: the template refuses the messages, for example their order,
        knows no tools or fails; or a library is missing.
    """
    self._check_fields(messages, options)
    return self._write(messages, options, prompt=prompt)

  def answers(self, messages: Messages, **options: Any) -> _Answers:
    """Writes a conversation, and finds in it what the assistant wrote.

    A template may mark that itself ({% generation %}). Else an answer begins
    where the messages before it and the prompt for an answer end, and ends with
    the first token that ends a generated text, or where the next message
    begins. An answer of "weight" 0 is left out; without marks, one that has no
    question is too.

    Args:
      messages: with "role" and "content", in order.
      **options: as for `render`.

    Returns:
      The text, and the answers' spans (start, stop) in it, in order.

    Raises:
      ValueError: as `render`, or the template, without marks, writes messages
        otherwise where others follow, changes an answer, or leaves out calls.
    """
    self._check_fields(messages, options)
    wanted = [x.get("weight", 1) for x in messages if x["role"] == ASSISTANT]
    messages = [{k: x[k] for k in x if k != "weight"} for x in messages]
    write = functools.partial(self._write, options=options)
    find = self._marked if _BEGIN.search(self._source) else self._unmarked
    text, spans = find(messages, write)
    self._check_contents(messages, text, spans)
    self._check_calls(messages, write)
    if not all(wanted):
      if len(spans) != len(wanted):
        raise self._refusal("marks other parts than answers, which have weight")
      spans = list(itertools.compress(spans, wanted))
    return text, [(start, stop) for start, stop in spans if start < stop]

  def _refusal(self, what: str) -> ValueError:
    return ValueError(f"{self.file}: {what}")

  def _write(
    self,
    messages: Messages,
    options: Options,
    *,
    prompt: bool = False,
    source: str = "",
  ) -> str:
    # Else transformers says that PyTorch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    name = "transformers.utils.chat_template_utils"
    library = import_extra(name, "a chat template")
    try:
      (text,), _ = library.render_jinja_template(
        [messages],
        chat_template=source or self._source,
        add_generation_prompt=prompt,
        **{**self._tokens, **options},
      )
      text.encode()  # halves of surrogate pairs are no text
    except Exception as error:  # whatever a wrong template does
      line = f", line {error.lineno}" if hasattr(error, "lineno") else ""
      text = " ".join(f"{type(error).__name__}: {error}".split())
      raise ValueError(f"{self.file}{line}: {text}") from error
    return text

  def _check_fields(self, messages: Messages, options: Options) -> None:
    """Refuses fields that say something and that the template never reads."""
    pairs = [pair for x in (options, *messages) for pair in x.items()]
    for names in _RARE:
      said = [k for k, x in pairs if k in names and x not in (None, "", [])]
      if said and not re.search(rf"\b({'|'.join(names)})\b", self._source):
        raise self._refusal(f"does not know {said[0]!r}")

  def _check_contents(
    self, messages: Messages, text: str, spans: Sequence[Span]
  ) -> None:
    """Refuses contents that are no text and stand as Python writes them."""
    answers = [i for i, x in enumerate(messages) if x["role"] == ASSISTANT]
    own = dict(zip(answers, spans)) if len(answers) == len(spans) else {}
    for index, message in enumerate(messages):
      content = message.get("content", "")
      answer = text[slice(*own.get(index, (0, 0)))].lstrip()
      # A text may say "None", so it is looked for where this answer begins.
      place = text if content else answer[: len("None")]
      if not isinstance(content, str) and str(content) in place:
        raise self._refusal(
          f"writes the content of message {index} as Python does: {content}"
        )

  def _check_calls(self, messages: Messages, write: _Write) -> None:
    """Refuses calls of tools whose names are not written."""
    # OpenAI's form of a call has the other one within it.
    renamed, forms = copy.deepcopy(messages), {"function", "arguments"}
    calls = [c for x in renamed for c in x.get("tool_calls") or ()]
    called = [c.get("function", c) for c in calls if forms.intersection(c)]
    for number, one in enumerate(called):
      one["name"] = f"moh_jax_{number}_"
    text = called and write(renamed)
    if any(one["name"] not in text for one in called):
      raise self._refusal("does not write all 'tool_calls'")

  def _unmarked(self, messages: Messages, write: _Write) -> _Answers:
    """Finds the answers by writing parts and changed copies of a conversation.

    The span of an answer without a question is empty: some templates cannot
    write what is before it.
    """
    text, spans = write(messages), []
    for index, message in enumerate(messages):
      if message["role"] != ASSISTANT:
        continue
      before = self._before(messages[:index], write)
      if before is None:
        spans.append((0, 0))
        continue
      start = len(before)
      stop = self._stop(text, messages, index, start, write)
      answer, content = text[start:stop], message.get("content") or ""
      end = next(filter(answer.endswith, self._stops), "")
      is_whole = isinstance(content, str) and (
        content.strip().removesuffix(end) in answer.removesuffix(end)
      )
      if not text.startswith(before) or not answer or not is_whole:
        raise self._refusal(
          f"does not write message {index} as an answer to those before it: it "
          "needs {% generation %} and {% endgeneration %} around answers"
        )
      spans.append((start, stop))
    return text, spans

  def _before(self, messages: Messages, write: _Write) -> str | None:
    """What a model reads before it answers; None if that cannot be written."""
    try:
      return write(messages, prompt=True) if messages else None
    except ValueError:
      if any(message["role"] == "user" for message in messages):
        raise
      return None

  def _stop(
    self, text: str, messages: Messages, index: int, start: int, write: _Write
  ) -> int:
    """Where the answer `index` ends that begins at `start`; 0 is unknown."""
    found = [(text.find(stop, start), stop) for stop in self._stops]
    at, stop = min((x for x in found if x[0] >= 0), default=(len(text), ""))
    end = at + len(stop)
    is_last = index + 1 == len(messages)
    ended = text if is_last else write(messages[: index + 1])
    is_alike = text.startswith(ended)
    if is_alike and (not stop or end <= len(ended)):
      return min(end, len(ended))
    # The stop follows what is written of these messages alone. It is that of a
    # later message if other text stands between, or if a change of the next
    # message changes text before it.
    following = messages[index + 1]
    longer = {**following, "content": f"x{following.get('content') or ''}x"}
    other = write([*messages[: index + 1], longer, *messages[index + 2 :]])
    is_shown = other != text  # else the change says nothing
    is_next = not (is_alike and text[len(ended) : at].strip())
    if stop and is_next and is_shown and other[start:end] == text[start:end]:
      return end
    return len(ended) if is_alike else 0

  def _marked(self, messages: Messages, write: _Write) -> _Answers:
    """A conversation and its answers, where the template marks them itself.

    transformers counts characters as they are written, which misplaces marks
    in macros, filters and set blocks; characters in the text move with it.
    """
    text = write(messages)
    begin, end = [x for x in _CHARACTERS if x not in text + self._source][:2]
    source = _BEGIN.sub(_OURS[0] % begin, self._source)
    source = _END.sub(_OURS[1] % end, source)
    # Text, mark, text, ...
    parts = re.split(f"([{begin}{end}])", write(messages, source=source))
    marks = "".join(parts[1::2])
    if "".join(parts[::2]) != text or marks.replace(begin + end, ""):
      raise self._refusal(
        "writes otherwise with a character at each {% generation %}, which may "
        "not be nested nor quoted, nor what it encloses be cut or counted"
      )
    ends = list(itertools.accumulate(map(len, parts[::2])))
    return text, list(zip(ends[::2], ends[1::2]))


def chat_ids(
  tokenizer: Tokenizer, messages: Messages, template: str = "", **options: Any
) -> list[int]:
  """Returns the ids of a conversation, up to where the answer begins.

  Args:
    tokenizer: of the model, with the files beside it.
    messages: with "role" and "content", in order.
    template: name of the template where there are several.
    **options: what the template gets beside the messages, such as "tools".

  Raises:
    ValueError: there is no such template, or it refuses the messages.
  """
  check_messages(messages)
  text = Template(tokenizer, template).render(messages, **options)
  # The template writes the begin of text itself, and no user text is escaped:
  # the name of a special token is that token wherever it stands.
  return tokenizer.encode(text, parse_special=True)


def template_names(tokenizer: Tokenizer) -> tuple[str, ...]:
  """Names of the templates of a tokenizer."""
  return tuple(_sources(tokenizer.files))


class _Message(msgspec.Struct):
  role: str
  content: str | list | None = None
  tool_calls: list[dict] | None = None
  weight: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None


def check_messages(messages: Any) -> None:
  """Checks that a value is a conversation.

  Raises:
    ValueError: it is no list of objects with a "role" and a "content".
  """
  if not isinstance(messages, Sequence) or not messages:
    raise ValueError(f"messages={messages!r} must be a list, and not empty")
  for index, message in enumerate(messages):
    check_json(message, _Message, f"message {index}")
    if message.get("weight") and message["role"] != ASSISTANT:
      raise ValueError(f"message {index}: 'weight' 1 is of {ASSISTANT!r} alone")


def _sources(files: Mapping[str, bytes]) -> dict[str, tuple[str, str]]:
  """Templates by name, each with the file that holds it."""
  own = {_DEFAULT: tokenizers.TEMPLATE} if tokenizers.TEMPLATE in files else {}
  more = (path for path in files if path.startswith(tokenizers.TEMPLATE_FOLDER))
  own |= {pathlib.PurePath(path).stem: path for path in more}
  if own:
    return {name: (files[path].decode(), path) for name, path in own.items()}
  file = tokenizers.TOKENIZER_CONFIG
  stored = tokenizers.read_json(files, file).get("chat_template") or {}
  if isinstance(stored, str):
    stored = {_DEFAULT: stored}
  elif isinstance(stored, list):
    stored = {entry["name"]: entry["template"] for entry in stored}
  return {name: (text, file) for name, text in stored.items()}
