"""Overrides of config keys on the command line; importable without JAX."""

from collections.abc import Sequence

PREFIX = "--config."


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Takes the overrides of config keys out of a command's arguments.

  Args:
    argv: with overrides "--config.a.b=v" or "--config.a.b", "v".

  Returns:
    The other arguments, and the overrides as `load_config` takes them: "a.b=v".

  Raises:
    ValueError: an override has no value.
  """
  others, overrides = [], []
  rest = iter(argv)
  for arg in rest:
    if not arg.startswith(PREFIX):
      others.append(arg)
      continue
    key, equals, value = arg.removeprefix(PREFIX).partition("=")
    if not equals:
      value = next(rest, None)
      if value is None or value.startswith("--"):
        raise ValueError(f"{arg} needs a value: {arg}=VALUE")
    overrides.append(f"{key}={value}")
  return others, overrides
