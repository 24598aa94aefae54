"""Whether a run can continue the checkpoint in its working directory."""

import dataclasses
from typing import Any

from etils import epath

from moh_jax import config as config_lib
from moh_jax.runtime.checkpoint import Metadata, read_metadata

# What the position in the training stream and the random choices depend on.
_STREAM_FIELDS = (
  ("train", "seed"),
  ("data", "source"),
  ("data", "batch_size"),
  ("data", "mix"),
  ("data", "ratios"),
  ("data", "sequence_length"),
  ("data", "separate_documents"),
)


def check_same_run(workdir: str | epath.Path, ours: Metadata) -> None:
  """Refuses to continue a run that this one could not follow exactly.

  Args:
    workdir: directory whose newest checkpoint would be continued.
    ours: of the run that wants to.

  Raises:
    ValueError: the parameters, the data order or the random choices would
      differ (the fields are named), or the run is already longer.
  """
  metadata, step = read_metadata(workdir)
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
  if bool(config.optim.ema_decay) != bool(stored.optim.ema_decay):
    fields.append(
      f"optim.ema_decay: {config.optim.ema_decay} here, "
      f"{stored.optim.ema_decay} there"
    )
  if bool(config.optim.clip_norm) != bool(stored.optim.clip_norm):
    fields.append(
      f"optim.clip_norm: {config.optim.clip_norm} here, "
      f"{stored.optim.clip_norm} there"
    )
  for section, name in _STREAM_FIELDS:
    here, there = (  # a section that has no such field has None twice
      getattr(getattr(run, section), name, None) for run in (config, stored)
    )
    if here != there:
      fields.append(f"{section}.{name}: {here!r} here, {there!r} there")
  if fields:
    raise ValueError(
      f"workdir {workdir} holds another run's checkpoint; "
      f"{'; '.join(fields)}. Choose another workdir or the same config"
    )


def _differing(ours: Any, theirs: Any, section: str) -> list[str]:
  """Fields that differ, but for those that a continued run may change."""
  if type(theirs) is type(ours):
    runtime = getattr(ours, "RUNTIME_FIELDS", ())
    same = {name: getattr(ours, name) for name in runtime}
    theirs = dataclasses.replace(theirs, **same)
  return config_lib.differing_fields(ours, theirs, section)
