"""Older keys of configs: where their values stand now.

Checkpoints keep their config as JSON. Those written when the router, RoPE and
the classifier's targets had no sections of their own are read through
`upgrade`; config files and command lines with an old key get an error that
names the new one.
"""

import copy
from collections.abc import Mapping
from typing import Any

from moh_jax.config.registry import get_family

MOVED = {
  "model.router": "model.router.kind",
  "model.gate_form": "model.router.gate_form",
  "model.two_stage": "model.router.two_stage",
  "model.straight_through": "model.router.straight_through",
  "model.rope_theta": "model.rope.theta",
  "model.rope_scaling": "model.rope.scaling",
  "model.rope_factor": "model.rope.factor",
  "model.rope_low_freq_factor": "model.rope.low_freq_factor",
  "model.rope_high_freq_factor": "model.rope.high_freq_factor",
  "model.rope_original_length": "model.rope.original_length",
  "train.label_smoothing": "classifier.label_smoothing",
  "train.mixup": "classifier.mixup",
  "train.cutmix": "classifier.cutmix",
  "train.cutmix_prob": "classifier.cutmix_prob",
}


def upgrade(stored: Mapping[str, Any]) -> dict[str, Any]:
  """A stored config with every value under its present key.

  Args:
    stored: sections of a run as a checkpoint holds them, of this version or an
      older one.
  """
  sections = copy.deepcopy(dict(stored))
  for old, new in MOVED.items():
    section, name = old.split(".")
    value = sections.get(section, {}).get(name)
    if value is None or isinstance(value, Mapping):
      continue
    del sections[section][name]
    *path, name = new.split(".")
    place = sections
    for part in path:
      place = place.setdefault(part, {})
      if not isinstance(place, dict):
        raise ValueError(f"{section}.{part}={place!r} must be a section")
    place[name] = value
  data = sections.get("data", {})
  if data.get("decode") == "reduced":
    # Now a part of "fast". Such a run cannot go on, since its stream is another
    # one, but its evaluation always decoded as "exact".
    data["decode"] = "exact"
  # Other families' runs held the classifier's fields too, and did not use them.
  family = sections.get("model", {}).get("family")
  if family is not None and "classifier" not in get_family(family).sections:
    sections.pop("classifier", None)
  return sections
