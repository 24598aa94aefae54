"""Reads JSON that other programs, or a damaged disk, may have written.

Content is bounded in bytes and depth before anything uses it, and checked
against a schema: a type that msgspec understands, most often a `Struct`. What
comes back are plain values, so that fields which the schema does not name stay.
A schema with `forbid_unknown_fields=True` refuses them. What is written for
other programs is strict JSON, see `strict_json`.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import xxhash

from moh_jax.runtime.files import check_once, read_bytes

MAX_BYTES = 64 << 20  # no metadata of ours or of a public model is that large
MAX_DEPTH = 64
_MOST_DIGITS = 300  # of an integer: it fits a float
_AT = re.compile(r"(?P<what>.*) - at `\$(?P<path>.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")

# Numbers and texts that schemas share.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]  # of an array's axis
Text = Annotated[str, msgspec.Meta(max_length=1 << 20)]
# Hexadecimal, or empty where there is none.
Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
_NAME = r"\A(?!\.{1,2}\Z)[^/\\\x00]+\Z"
# A file that lies in the folder of the JSON, not in one below it.
FileName = Annotated[str, msgspec.Meta(pattern=_NAME, max_length=255)]
# msgspec's words -> ours; of a pattern nobody wants to read the text.
_WORDS = (
  (r"`str` matching regex .*", "a text of the right form"),
  (r"Object missing required field (.*)", r"has no entry \1"),
  (r"Object contains unknown field (.*)", r"unknown entry \1"),
  (r"Expected (.*), got `(.*)`", r"must be \1, not \2"),
  (r"Expected ", r"must be "),
  (r"(`)", "'"),
)


def read_json(
  path: str | os.PathLike, kind: Any = dict, max_bytes: int = MAX_BYTES
) -> Any:
  """Reads a local JSON file; see `parse_json`.

  Raises:
    FileNotFoundError: there is no such file.
    OSError: it cannot be read.
    ValueError: it is no JSON of that kind, or too large.
  """
  content = read_bytes(pathlib.Path(path), max_bytes)
  return parse_json(content, kind, os.fspath(path), max_bytes)


def parse_json(
  content: bytes | str,
  kind: Any = dict,
  where: str = "JSON",
  max_bytes: int = MAX_BYTES,
) -> Any:
  """Parses JSON and checks it.

  Args:
    content: UTF-8.
    kind: type that the values must fit, as `msgspec.convert` takes it.
    where: what the content is, for messages: most often the file.
    max_bytes: of the content.

  Returns:
    Dicts, lists, texts, numbers, booleans and None.

  Raises:
    ValueError: the content is no JSON, too large or too deep, or does not fit;
      the message begins with `where` and names field and value.
  """
  if len(content) > max_bytes:
    raise ValueError(
      f"{where}: {len(content):,} bytes, must be at most {max_bytes:,}"
    )
  try:
    # The standard library's, since names of files may hold half a surrogate
    # pair ("\\udcff" is a byte that is no UTF-8), which msgspec does not parse.
    value = json.loads(
      content,
      parse_float=_finite,
      parse_constant=_finite,
      parse_int=_whole,
      object_pairs_hook=_without_twins,
    )
  except RecursionError:
    raise _too_deep(where) from None
  except ValueError as error:
    raise ValueError(f"{where}: not valid JSON: {error}") from error
  return check_json(value, kind, where)


def check_json(value: Any, kind: Any, where: str = "") -> Any:
  """Checks parsed JSON as `parse_json` does, and returns it."""
  _check_depth(value, where)
  try:
    msgspec.convert(value, kind)
  except msgspec.ValidationError as error:
    what = _explain(str(error), value)
    raise ValueError(f"{where}: {what}" if where else what) from error
  except UnicodeError as error:  # half a surrogate pair where no text may be
    raise ValueError(f"{where}: not valid JSON: {error}") from error
  return value


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) < len(pairs):
    check_once(key for key, _ in pairs)
  return value


def _whole(text: str) -> int:
  if len(text.removeprefix("-")) > _MOST_DIGITS:
    raise ValueError(f"{text[:20]}... has more than {_MOST_DIGITS} digits")
  return int(text)


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"{text} is no finite number")
  return value


def plain(value: Any) -> Any:
  """Values as JSON gives them back: tuples become lists."""
  return json.loads(json.dumps(value))


def differences(wanted: dict[str, Any], stored: dict[str, Any]) -> str:
  """The entries that differ, as "seed: 1 here, 0 there"; "" if none does.

  Args:
    wanted: settings of this call.
    stored: those of an earlier call, parsed from JSON.
  """
  wanted = plain(wanted)
  return "; ".join(
    f"{name}: {wanted.get(name)!r} here, {stored.get(name)!r} there"
    for name in sorted({**wanted, **stored})
    if wanted.get(name) != stored.get(name)
  )


def same_settings(
  path: pathlib.Path, settings: dict[str, Any], what: str
) -> bool:
  """Whether a file says with which settings something was begun.

  Args:
    path: the file; entries whose names begin with "_" are notes beside them.
    settings: of this call.
    what: was begun, for the message: "out.jsonl holds completions".

  Raises:
    ValueError: it says others; they are named.
  """
  if not path.exists():
    return False
  stored = {k: v for k, v in read_json(path).items() if k[:1] != "_"}
  if differing := differences(settings, stored):
    raise ValueError(
      f"{what} of other settings; {differing}. Choose another --out or the "
      "same settings"
    )
  return True


def strict_json(value: Any, indent: int | None = None) -> str:
  """Text of a value that every reader takes: NaN and infinity become null."""
  finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
  return json.dumps(finite, indent=indent, allow_nan=False)


def _check_depth(value: Any, where: str) -> None:
  level = [[value]]
  for _ in range(MAX_DEPTH + 1):
    level = [
      part
      for parent in level
      for part in (parent.values() if isinstance(parent, dict) else parent)
      if isinstance(part, dict | list)
    ]
    if not level:
      return
  raise _too_deep(where)


def _too_deep(where: str) -> ValueError:
  return ValueError(f"{where}: nested more than {MAX_DEPTH} deep")


def _explain(message: str, value: Any) -> str:
  """Adds the value to a message of msgspec, which names its place alone."""
  found = _AT.fullmatch(message)
  what, path = (found["what"], found["path"]) if found else (message, "")
  for theirs, ours in _WORDS:
    what = re.sub(theirs, ours, what, flags=re.DOTALL)
  place = path.lstrip(".")
  if "missing" in message or "unknown field" in message or not place:
    return f"{place}: {what}" if place else what
  if "[...]" in place:  # msgspec does not tell the key of an object
    return f"{place} {what}"
  for key, index in _STEP.findall(path):
    value = value[int(index)] if index else value[key]
  shown = repr(value)
  shown = shown if len(shown) < 60 else f"{shown[:60]}..."
  return f"{place}={shown} {what}"


def json_checksum(values: dict[str, Any]) -> str:
  """The checksum that a file of JSON holds of its other fields, "checksum"."""
  others = {n: value for n, value in values.items() if n != "checksum"}
  return xxhash.xxh3_128_hexdigest(json.dumps(others, sort_keys=True).encode())
