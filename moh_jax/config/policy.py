"""Policies of random operations on training images, named as timm names them.

"rand-m9-mstd0.5-inc1" is RandAugment, "3a" three-augment.
"""

import dataclasses
import re

from moh_jax.config.checks import shown

THREE_AUGMENT = "3a"
# Sections of the text: field, type, smallest and largest value.
_SECTIONS = {
  "m": ("magnitude", int, 0, 30),
  "n": ("layers", int, 1, 15),
  "p": ("probability", float, 0, 1),
  "mstd": ("spread", float, 0, 1e9),
  "mmax": ("limit", int, 1, 30),
  "inc": ("increasing", int, 0, 1),
}
_SECTION = re.compile(r"([a-z]+)([0-9]{1,9}(?:\.[0-9]{1,9})?)")
_UNIFORM_ABOVE = 100  # a spread above it means uniform magnitudes


@dataclasses.dataclass(frozen=True)
class RandAugmentPolicy:
  """RandAugment (arXiv:1909.13719) with the options of timm.

  Attributes:
    magnitude: strength of an operation before the spread; at 10 its argument
      is at the end of its range.
    layers: operations that are sampled for an image, with replacement.
    probability: of each of them to be applied.
    spread: standard deviation of the magnitude; infinite is uniform between 0
      and `magnitude`.
    limit: largest magnitude after the spread; the smallest is 0.
    increasing: whether every operation changes more at larger magnitudes.
      Otherwise posterize and solarize change less, and color, contrast,
      brightness and sharpness change nothing at 5.
  """

  magnitude: int = 10
  layers: int = 2
  probability: float = 0.5
  spread: float = 0.0
  limit: int = 10
  increasing: bool = False


def parse_policy(text: str, field: str) -> RandAugmentPolicy | None:
  """Parses the text of a policy.

  Args:
    text: "rand" and sections "-KEYVALUE" in any order, "3a" or "".
    field: where it stands, for the message.

  Returns:
    The options of RandAugment; None for "3a" and "".

  Raises:
    ValueError: the text is none of these.
  """
  if text in ("", THREE_AUGMENT):
    return None
  name, *parts = text.split("-")
  keys = ", ".join(_SECTIONS)
  if name != "rand":
    raise ValueError(
      f"{field}={shown(text)} must be '', '3a', or 'rand' with sections "
      f"-KEYVALUE, such as 'rand-m9-mstd0.5-inc1'; keys are {keys}"
    )
  values: dict[str, float] = {}
  for part in parts:
    match = _SECTION.fullmatch(part)
    if not match or match[1] not in _SECTIONS:
      raise ValueError(
        f"{field}={shown(text)}: section {shown(part)} must be one of the keys "
        f"{keys} and a number"
      )
    target, kind, low, high = _SECTIONS[match[1]]
    if target in values:
      raise ValueError(f"{field}={shown(text)}: key {match[1]!r} comes twice")
    is_whole = kind is int
    if (is_whole and "." in match[2]) or not low <= float(match[2]) <= high:
      number = "a whole number" if is_whole else "a number"
      raise ValueError(
        f"{field}={shown(text)}: {part!r} must have {number} in [{low}, {high}]"
      )
    values[target] = kind(match[2])
  if values.get("spread", 0) > _UNIFORM_ABOVE:
    values["spread"] = float("inf")
  values["increasing"] = bool(values.get("increasing", 0))
  return RandAugmentPolicy(**values)
