"""Which timesteps a sampler of fewer steps visits."""

import re


def spaced_timesteps(num_steps: int, spacing: str) -> list[int]:
  """Timesteps that a shorter process keeps, ascending.

  Args:
    num_steps: timesteps of the training process.
    spacing: "N", N of them spread evenly from the first to the last; "ddimN",
      N at a fixed stride from the first (arXiv:2010.02502); or "N,M,...", that
      many from each of equal sections. "10,5" of 100 timesteps are 10 of the
      first 50 and 5 of the last 50.

  Raises:
    ValueError: more steps than the process (or a section) has, or a stride
      that no integer gives.
  """
  if spacing.startswith("ddim"):
    return _strided(num_steps, _count(spacing.removeprefix("ddim"), spacing))
  counts = [_count(part, spacing) for part in spacing.split(",")]
  size, extra = divmod(num_steps, len(counts))
  kept, start = [], 0
  for section, count in enumerate(counts):
    length = size + (section < extra)
    if count > length:
      raise ValueError(
        f"steps={spacing!r} asks for {count} of the {length} timesteps in "
        f"section {section + 1} of {len(counts)}; the process has {num_steps}"
      )
    stride = (length - 1) / (count - 1) if count > 1 else 1.0
    place = 0.0  # accumulated and rounded half to even, as released
    for _ in range(count):
      kept.append(start + round(place))
      place += stride
    start += length
  return kept


def _strided(num_steps: int, count: int) -> list[int]:
  for stride in range(1, num_steps + 1):
    kept = range(0, num_steps, stride)
    if len(kept) == count:
      return list(kept)
  raise ValueError(
    f"steps='ddim{count}' must be the number of steps that an integer stride "
    f"takes through {num_steps} timesteps"
  )


def _count(text: str, spacing: str) -> int:
  if not re.fullmatch(r"\s*[0-9]+\s*", text) or int(text) < 1:
    raise ValueError(
      f"steps={spacing!r} must be N, 'ddimN' or 'N,M,...' with numbers of at "
      "least 1"
    )
  return int(text)
