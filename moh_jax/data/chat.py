"""Chat templates: from messages to the text that a model was tuned on.

A template is a Jinja text of the checkpoint's author, so it runs in a sandbox
that lets it change nothing and read nothing but the messages and the names of
the special tokens: that of transformers, with its filters and tags, in another
process with bounds (`template_process`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from moh_jax.data import tokenizers
from moh_jax.data.template_process import ASSISTANT, Message, call
from moh_jax.data.tokenizer_files import (
  TEMPLATE,
  TEMPLATE_FOLDER,
  TEMPLATE_JSON,
  TOKENIZER_CONFIG,
  named_tokens,
  read_json,
)
from moh_jax.runtime.json_files import check_json

_KEY = "chat_template"
_DEFAULT = "default"
# Fields of rows or messages that change what is read or trained, and that few
# templates know. Thoughts have several names, and transformers gives them all.
FIELDS = (
  "tools functions function_call tool_choice documents context system_prompt "
  "image images video videos audio audios train training loss mask"
).split()
_RARE = *zip(FIELDS), ("reasoning_content", "thinking", "reasoning")


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
        f"{TEMPLATE} beside its tokenizer and no {_KEY!r} in "
        f"{TOKENIZER_CONFIG}"
      )
    if wanted not in found:
      raise ValueError(
        f"chat template {wanted!r} must be one of {tuple(found)}"
      )
    source, self.file = found[wanted]
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    own = {k: tokenizer.id_to_token(i) for k, i in ids.items() if i is not None}
    tokens = own | named_tokens(tokenizer.files)
    tokens = {key: token for key, token in tokens.items() if token}
    stops = tuple(filter(None, map(tokenizer.id_to_token, tokenizer.stop_ids)))
    self._state = {"source": source, "tokens": tokens, "stops": stops}

  def answers(self, messages: Sequence[Message], **options: Any) -> tuple:
    """Writes a conversation, and finds in it what the assistant wrote.

    A template may mark that itself ({% generation %}). Else an answer begins
    where the messages before it and the prompt for an answer end, and ends with
    the first token that ends a generated text, or where the next message
    begins. An answer of "weight" 0 is left out; without marks, one that has no
    question is too.

    Args:
      messages: with "role" and "content", in order.
      **options: what the template gets beside them: "tools", a list of JSON
        schemas, "enable_thinking" and so on.

    Returns:
      The text, and the answers' spans (start, stop) in it, in order.

    Raises:
      ValueError: as `call`, or the template, without marks, writes messages
        otherwise where others follow, changes an answer, or leaves out calls.
    """
    return tuple(self.call("answers", messages, options))

  def call(
    self, method: str, messages: Sequence[Message], options: Any, **given: Any
  ) -> Any:
    """What a method of `template_process.Writer` makes of a conversation.

    Raises:
      ValueError: the template refuses the messages, for example their order,
        knows no tools, fails or takes too long, or a library is missing.
    """
    state = {**self._state, "tokens": self._state["tokens"] | options}
    pairs = [pair for x in (options, *messages) for pair in x.items()]
    for names in _RARE:
      said = [k for k, x in pairs if k in names and x not in (None, "", [])]
      if said and not re.search(rf"\b({'|'.join(names)})\b", state["source"]):
        raise ValueError(f"{self.file}: does not know {said[0]!r}")
    try:
      return call(method, state, messages, **given)
    except (ValueError, TypeError) as error:  # TypeError: no JSON
      raise ValueError(f"{self.file}: {error}") from error


def render_chat(
  tokenizer: tokenizers.Tokenizer,
  messages: Sequence[Message],
  template: str | None = None,
  *,
  add_generation_prompt: bool = True,
  **options: Any,
) -> str:
  """Writes a conversation as the text that the model reads.

  Args:
    tokenizer: with the files beside it, which hold the template.
    messages: with "role" and "content", in order.
    template: name of the template where there are several; None is "default".
    add_generation_prompt: end with what begins the assistant's answer.
    **options: what the template gets beside the messages, such as "tools".

  Raises:
    ValueError: there is no such template, the messages are none, or the
      template refuses them; see `Template`.
  """
  check_messages(messages)
  how = {"add_generation_prompt": add_generation_prompt}
  return Template(tokenizer, template).call("render", messages, options, **how)


def chat_ids(
  tokenizer: tokenizers.Tokenizer,
  messages: Sequence[Message],
  template: str | None = None,
  **options: Any,
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
  text = render_chat(tokenizer, messages, template, **options)
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
    if message.get("weight") and message["role"] != ASSISTANT:
      raise ValueError(f"message {index}: 'weight' 1 is of {ASSISTANT!r} alone")


class _Message(msgspec.Struct):
  role: str
  content: str | list | None = None
  tool_calls: list[dict] | None = None
  weight: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None


class _Entry(msgspec.Struct):
  name: str
  template: str


def _sources(files: Mapping[str, bytes]) -> dict[str, tuple[str, str]]:
  """Templates by name, each with the file that holds it."""
  own = {_DEFAULT: TEMPLATE} if TEMPLATE in files else {}
  for path in files:
    folder, _, name = path.rpartition("/")
    if folder == TEMPLATE_FOLDER:
      name = name.removesuffix(".jinja")
      if name in own:
        raise ValueError(f"{path}: {own[name]} is a template {name!r} too")
      own[name] = path
  if own:
    return {name: (_text(p, files[p]), p) for name, p in own.items()}
  for file in (TOKENIZER_CONFIG, TEMPLATE_JSON):
    stored = read_json(files, file).get(_KEY)
    if stored is not None:
      return {name: (text, file) for name, text in _named(file, stored).items()}
  return {}


def _named(file: str, stored: Any) -> dict[str, str]:
  """Templates by name, as a JSON file has them: one, a list, or an object."""
  check_json(stored, str | list[_Entry] | dict[str, str], f"{file}: {_KEY}")
  if isinstance(stored, str):
    return {_DEFAULT: stored}
  if isinstance(stored, dict):
    return stored
  found = {entry["name"]: entry["template"] for entry in stored}
  if len(found) < len(stored):
    raise ValueError(f"{file}: {_KEY} has two templates of one name")
  return found


def _text(path: str, content: bytes) -> str:
  try:
    return content.decode()
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: not UTF-8: {error}") from error
