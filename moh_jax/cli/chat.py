"""Conversations that the options of a command describe."""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

from moh_jax.data.chat import check_messages
from moh_jax.runtime.json_files import read_json


def is_chat(args: argparse.Namespace) -> bool:
  """Whether prompts go through the model's chat template.

  Raises:
    ValueError: an option of conversations is given without one.
  """
  chat = bool(args.chat or args.messages)
  if args.system is not None and not args.chat:
    raise ValueError(f"--system {args.system!r} needs --chat")
  if args.system is not None and args.messages:
    raise ValueError(
      f"--system {args.system!r}: --messages holds the whole conversation"
    )
  if args.chat_template is not None and not chat:
    raise ValueError(
      f"--chat-template {args.chat_template!r} needs --chat or --messages"
    )
  for name, given in (
    ("--no-bos", args.no_bos),
    ("--parse-special", args.parse_special),
  ):
    if given and chat:
      raise ValueError(
        f"{name} is of plain prompts: a chat template writes its own special "
        "tokens"
      )
  return chat


def conversations(args: argparse.Namespace) -> list[list[dict[str, Any]]]:
  """The conversation of each prompt, or that of --messages.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it holds no conversation.
  """
  if args.messages:
    return [read_messages(args.messages)]
  return [conversation(args, [text]) for text in args.prompt]


def conversation(
  args: argparse.Namespace, turns: Sequence[str]
) -> list[dict[str, Any]]:
  """The messages of a conversation.

  Args:
    args: of the command.
    turns: texts of the user and of the model in turns.
  """
  before = []
  if args.system is not None:
    before = [{"role": "system", "content": args.system}]
  roles = itertools.cycle(("user", "assistant"))
  texts = zip(roles, turns)
  return before + [{"role": role, "content": text} for role, text in texts]


def read_messages(path: str) -> list[dict[str, Any]]:
  """Reads a conversation.

  Args:
    path: of a JSON list of objects with "role" and "content".

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no such list.
  """
  try:
    messages = read_json(path, list[dict])
  except (FileNotFoundError, ValueError) as error:
    raise type(error)(f"--messages {error}") from error
  try:
    check_messages(messages)
  except ValueError as error:
    raise ValueError(f"--messages {path}: {error}") from error
  return messages
