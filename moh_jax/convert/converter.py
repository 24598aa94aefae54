"""What a family's converter consists of."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from moh_jax.config import Config, get_family, imported
from moh_jax.convert.rules import Rule

CONFIG_FILE = "config.json"  # what describes the model of a folder


@dataclasses.dataclass(frozen=True)
class Exported:
  """What the files of an exported folder say of its model.

  Attributes:
    form: one of the family's `exports`.
    config: the run.
    step: step of the checkpoint.
    dtype: dtype of the stored weights.
    parameters: number of parameters.
    license: identifier of a licence, "" if none is stated.
    scores: metrics of the model by name.
  """

  form: str
  config: Config
  step: int
  dtype: str
  parameters: int
  license: str = ""
  scores: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Converter:
  """Functions that read and write the public checkpoints of a family.

  Attributes:
    rules: (model section) -> pairs of public tensors and our parameters.
    released_run: (model section, public tensors by name) -> the run that a
      released model stands for; the tensors may be an empty dict.
    is_ignored: (model section, tensor name) -> whether a public tensor has no
      meaning for the model.
    described: (format, path of a config.json, which need not exist) -> the
      model section that it describes, or None: the tensors' shapes must tell.
    folder_files: (`Exported`, folder that holds the tokenizer's files) -> the
      other small files of an exported folder, texts by name; None where one
      file of tensors is exported.
    other_rules: functions as `rules` by form or format, of those that have
      other tensors. They raise ValueError for a model that is not theirs.
    stem: beginning of the names of an exported folder's tensor files.
  """

  rules: Callable[[Any], list[Rule]]
  released_run: Callable[[Any, Mapping[str, Any]], Config]
  is_ignored: Callable[[Any, str], bool] = lambda model, name: False
  described: Callable[[str, pathlib.Path], Any] = lambda kind, path: None
  folder_files: Callable[[Exported, pathlib.Path], Mapping[str, str]] | None = (
    None
  )
  other_rules: Mapping[str, Callable[[Any], list[Rule]]] = dataclasses.field(
    default_factory=dict
  )
  stem: str = "model"


def converter_of(model: Any) -> Converter:
  """The converter of a model section's family.

  Raises:
    NotImplementedError: the family has no public form.
  """
  converter = imported(get_family(model.family).converter)
  if converter is None:
    raise NotImplementedError(
      f"model.family={model.family!r} has no public tensor names to convert "
      "from or export to"
    )
  return converter
