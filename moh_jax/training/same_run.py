"""Checks that a run can continue the checkpoint in its working directory."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from etils import epath

from moh_jax import config as config_lib
from moh_jax.data.identity import Identity, differences
from moh_jax.runtime.checkpoint import Metadata, read_metadata
from moh_jax.runtime.steps import read_json_item

_LOG = logging.getLogger(__name__)
# Fields that determine the training stream, the random choices and what the
# optimizer keeps.
_SAME_FIELDS = (
  ("optim", "name"),
  ("train", "seed"),
  ("data", "source"),
  ("data", "batch_size"),
  ("data", "repeats"),
  ("data", "mix"),
  ("data", "ratios"),
  ("data", "sequence_length"),
  ("data", "separate_documents"),
)
# Fields of which only zero or not matters: it decides the state's structure.
_STRUCTURE_FIELDS = (
  ("optim", "ema_decay"),
  ("optim", "clip_norm"),
  ("optim", "b1"),
)


def check_same_run(
  workdir: str | epath.Path,
  step: int,
  ours: Metadata,
  stream: Mapping[str, Identity],
  verify: bool = True,
) -> None:
  """Checks that a run would continue a checkpoint, and says what changes.

  Args:
    workdir: working directory.
    step: step of the checkpoint that is to be continued.
    ours: metadata of the run that continues it.
    stream: identity of its data, by source.
    verify: compare the metadata with their checksums first.

  Raises:
    ValueError: parameters, order of the data or random choices would differ
      (the message names the fields), or the checkpoint is beyond the run's end.
  """
  metadata, _ = read_metadata(workdir, step, verify=verify)
  config, stored = ours.config, metadata.config
  if step > config.train.steps:
    raise ValueError(
      f"workdir {workdir} is at step {step}, beyond train.steps="
      f"{config.train.steps}"
    )
  fields = _differing(config.model, stored.model, "model")
  for name in sorted(config.sections.keys() & stored.sections.keys()):
    fields += _differing(config.sections[name], stored.sections[name], name)
  if ours.tokenizer_sha256 != metadata.tokenizer_sha256:
    fields.append(
      f"sha256 of the tokenizer: {ours.tokenizer_sha256[:16]!r} here, "
      f"{metadata.tokenizer_sha256[:16]!r} there"
    )
  for section, name in (*_STRUCTURE_FIELDS, *_SAME_FIELDS):
    here, there = (  # a field that the family's section lacks is None twice
      getattr(getattr(run, section), name, None) for run in (config, stored)
    )
    as_stored = bool if (section, name) in _STRUCTURE_FIELDS else lambda x: x
    if as_stored(here) != as_stored(there):
      fields.append(f"{section}.{name}: {here!r} here, {there!r} there")
  if not fields:  # the same config, so that the data should be the same too
    stored_stream = read_json_item(workdir, step, "data").get("stream")
    if stored_stream is not None:
      fields = differences(stream, stored_stream)
  if fields:
    raise ValueError(
      f"workdir {workdir} holds another run's checkpoint; "
      f"{'; '.join(fields)}. Choose another workdir, or the same config and "
      "data"
    )
  before = stored.by_name()
  changed = [
    line
    for name, section in config.by_name().items()
    for line in config_lib.differing_fields(section, before[name], name)
  ]
  if changed:
    _LOG.info("from step %d on, changed: %s", step, "; ".join(changed))


def _differing(ours: Any, theirs: Any, section: str) -> list[str]:
  """Describes fields that differ and that a continued run must not change."""
  if type(theirs) is type(ours):
    runtime = getattr(ours, "RUNTIME_FIELDS", ())
    same = {name: getattr(ours, name) for name in runtime}
    theirs = dataclasses.replace(theirs, **same)
  return config_lib.differing_fields(ours, theirs, section)
