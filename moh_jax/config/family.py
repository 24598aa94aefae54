"""The record of a family of models, and the registry of all families.

A record is everything that the package must know of a family: its config
sections, its network, its training task, how its public checkpoints are read.
No other module asks which family a model belongs to. Families of other packages
are registered with `register_family` and then work with every command.

Configs are parsed before JAX is imported, so records import networks, losses
and converters inside the methods that need them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from moh_jax.config.sections import DataConfig

if TYPE_CHECKING:
  import flax.linen as nn
  import jax

  from moh_jax.config.parse import Config
  from moh_jax.convert.rules import Rule
  from moh_jax.models.generation import Decode
  from moh_jax.training.task import Evaluate, Task

# Entry point group in which installed packages name modules that call
# `register_family` when they are imported.
ENTRY_POINTS = "moh_jax.families"
_BUILT_IN = ("vit", "dit", "llm")


class Family:
  """A family of models: subclass it, and register one instance.

  A family must set `name` and `model` and define `make_model` and `make_task`;
  the other methods have defaults for a network that no public checkpoint
  exists of.

  The model section is a frozen dataclass with the fields `family` (the name),
  `router`, `attention_impl`, `dtype` and `remat`, a class attribute
  `RUNTIME_FIELDS` (fields that a resumed run may change), and a method
  `layer_groups()`; `config.LayerStack` provides the last for networks whose
  layers form one stack.

  Attributes:
    name: value of `model.family`.
    model: dataclass of the section `model`.
    data: dataclass of the section `data`.
    sections: further sections that only this family has, name to dataclass.
    commands: commands that work with this family but not with all: "classify",
      "evaluate-lm", "generate", "heads", "sample".
    position_bias: whether attention logits get a learned bias per head, which
      rules out some attention forms.
    reads_text: whether a tokenizer belongs to a checkpoint.
    formats: formats that `convert` reads, each with the beginnings of the names
      of the released models that have it.
  """

  name: ClassVar[str]
  model: ClassVar[type]
  data: ClassVar[type] = DataConfig
  sections: ClassVar[Mapping[str, type]] = {}
  commands: ClassVar[frozenset[str]] = frozenset()
  position_bias: ClassVar[bool] = False
  reads_text: ClassVar[bool] = False
  formats: ClassVar[Mapping[str, tuple[str, ...]]] = {}

  # Config.

  def check(self, config: Config) -> None:
    """Raises ValueError where the sections of a config do not fit together."""

  def released(self) -> Mapping[str, Any]:
    """Released models: name to model section."""
    return {}

  def released_run(self, model: Any, tensors: Mapping[str, Any]) -> Config:
    """The run that a released model stands for.

    Args:
      model: its section.
      tensors: its public tensors by name, with shapes; may be empty.
    """
    from moh_jax.config.parse import Config

    del tensors
    return Config(model=model, data=self.data())

  def bench_run(self, model: Any, batch: int) -> Config:
    """A run on random data, for `bench model`.

    Args:
      model: the model section.
      batch: examples per step.
    """
    from moh_jax.config.parse import Config

    return Config(model=model, data=self.data(batch_size=batch))

  def with_length(self, config: Config, length: int) -> Config:
    """The same run on sequences of `length` tokens, for `bench --lengths`.

    Raises:
      ValueError: the model has one input size only.
    """
    raise ValueError(
      f"--lengths {length} is for language models: a model of family "
      f"{config.model.family!r} reads inputs of one size"
    )

  def data_at(self, config: Config, path: str) -> dict[str, Any]:
    """Fields of the section `data` that read another directory.

    Args:
      config: of the run.
      path: directory with data of the same kind as the run's.
    """
    return {"source": config.data.source, "path": path}

  # Network.

  def make_model(
    self, config: Config
  ) -> tuple[nn.Module, tuple[jax.ShapeDtypeStruct, ...]]:
    """The network and its abstract positional inputs, with a batch of one.

    The network returns (output, ModelAux).
    """
    raise NotImplementedError(f"family {self.name!r} has no make_model")

  def fit_params(self, params: Any, trained: Config, wanted: Config) -> Any:
    """Parameters of a trained model in the layout of another config of it.

    Args:
      params: the parameter tree of `trained`.
      trained: config that the parameters were trained with.
      wanted: config of the model that will use them.
    """
    del trained, wanted
    return params

  def serving_config(self, config: Config) -> Config:
    """The config to serve a checkpoint with: the run's, less what only trains.

    By default it is the run's own.
    """
    return config

  def serving_dtypes(self, params: Any, config: Config) -> Any:
    """Dtypes that parameters can be stored in without changing any output.

    Args:
      params: arrays or ShapeDtypeStructs.
      config: of the run.

    Returns:
      A tree of dtypes. By default every parameter keeps its own.
    """
    import jax

    del config
    return jax.tree.map(lambda x: x.dtype, params)

  # Training and evaluation.

  def make_task(self, config: Config, decode: Decode | None = None) -> Task:
    """Opens the data and builds the training task.

    Args:
      config: of the run.
      decode: latents to images, for previews of latent diffusion.

    Raises:
      FileNotFoundError: data is missing.
      ValueError: the data does not fit the model.
    """
    raise NotImplementedError(f"family {self.name!r} has no make_task")

  def make_evaluate(
    self,
    model: nn.Module,
    config: Config,
    *,
    class_names: tuple[str, ...] = (),
    tokenizer_sha256: str = "",
  ) -> Evaluate:
    """Opens the held-out data alone and prepares its evaluation.

    Args:
      model: the network.
      config: of the run.
      class_names: that the model was trained with; empty if unknown.
      tokenizer_sha256: of the tokenizer it was trained with; "" if unknown.
    """
    del model, class_names, tokenizer_sha256
    return self.make_task(config).evaluate

  def measure_inference(
    self, options: Any, run: Config, models: Mapping[str, Any]
  ) -> tuple[list[Any], dict[str, Any]]:
    """Further measurements of `bench model`, such as decoding or sampling.

    Args:
      options: the `speed.model.ModelOptions`.
      run: the measured run.
      models: name of each variant to its model section; "mha" is the baseline.

    Returns:
      Rows, and other results by name.
    """
    del options, run, models
    return [], {}

  # Public checkpoints.

  def conversion_rules(self, model: Any) -> list[Rule]:
    """Pairs of public tensors and our parameters.

    Raises:
      NotImplementedError: the family has no public form.
    """
    raise NotImplementedError(
      f"model.family={self.name!r} has no public tensor names to convert from "
      "or export to"
    )

  def is_ignored(self, model: Any, name: str) -> bool:
    """Whether a public tensor has no meaning for the model."""
    del model, name
    return False

  def described(self, kind: str, config_file: Any) -> Any | None:
    """The model section that a public config.json describes.

    Args:
      kind: one of `formats`.
      config_file: path, which need not exist.

    Returns:
      The section, or None where the tensors' shapes must tell.
    """
    del kind, config_file
    return None

  def public_config(
    self, model: Any, *, dtype: str, **ids: int | None
  ) -> dict[str, Any]:
    """The config.json of an exported folder, for families that read text.

    Args:
      model: the section.
      dtype: of the stored tensors.
      **ids: `bos_id` and `eos_id` of the tokenizer, where known.
    """
    del model, dtype, ids
    raise NotImplementedError(f"family {self.name!r} exports no folder")

  def resized(self, config: Config, size: int) -> Config:
    """The same classifier for square images of another size, in pixels.

    Raises:
      ValueError: the family has no such form.
    """
    raise ValueError(
      f"--image-size {size}: only image classifiers change their size, not "
      f"model.family={config.model.family!r}"
    )


_registry: dict[str, Family] = {}


def register_family(family: Family) -> Family:
  """Makes a family known to configs, checkpoints and commands.

  Args:
    family: the record. Registering an equal class again replaces it.

  Returns:
    The same record.

  Raises:
    ValueError: another family has its name, or a required attribute is missing.
  """
  for attribute in ("name", "model"):
    if not hasattr(family, attribute):
      raise ValueError(f"{type(family).__name__}.{attribute} must be set")
  known = _registry.get(family.name)
  taken = family.name in _BUILT_IN and not _is_built_in(family)
  if taken or (known and type(known).__qualname__ != type(family).__qualname__):
    raise ValueError(f"family name={family.name!r} is taken by another family")
  _registry[family.name] = family
  return family


def get_family(name: str) -> Family:
  """The record of a family.

  Raises:
    ValueError: there is no such family; the known ones are listed.
  """
  if name not in _registry and name in _BUILT_IN:
    importlib.import_module(f"moh_jax.families.{name}")
  if name not in _registry:
    _load_entry_points()
  if name not in _registry:
    raise ValueError(
      f"model.family={name!r} must be one of {family_names()}; a family of "
      "another package must be imported first (--import MODULE)"
    )
  return _registry[name]


def family_names() -> tuple[str, ...]:
  """Names of the built-in families and of those registered so far."""
  return (*_BUILT_IN, *(name for name in _registry if name not in _BUILT_IN))


def families() -> tuple[Family, ...]:
  """All records, the built-in ones first."""
  return tuple(get_family(name) for name in family_names())


def check_command(config: Config, command: str, where: str) -> Family:
  """The record of a checkpoint's family, if a command works with it.

  Args:
    config: of the checkpoint.
    command: its name, such as "sample".
    where: the checkpoint, for the message.

  Raises:
    ValueError: the family does not have the command; those that do are listed.
  """
  family = get_family(config.model.family)
  if command not in family.commands:
    able = [other.name for other in families() if command in other.commands]
    raise ValueError(
      f"{where} holds a model of family {family.name!r}; `{command}` needs one "
      f"of {able}"
    )
  return family


def released_model(name: str) -> Any:
  """The model section of a released model.

  Raises:
    ValueError: an unknown name; the known ones are listed.
  """
  models = released_models()
  if name not in models:
    raise ValueError(f"model {name!r} must be one of {tuple(models)}")
  return models[name]


def released_models() -> Mapping[str, Any]:
  """All released models: name to model section."""
  return {
    name: model
    for family in families()
    for name, model in family.released().items()
  }


def public_formats() -> tuple[str, ...]:
  """Formats of public checkpoints that `convert` reads."""
  return tuple(kind for family in families() for kind in family.formats)


def family_of_format(kind: str) -> Family:
  """The family that reads a format.

  Raises:
    ValueError: none does; the known formats are listed.
  """
  for family in families():
    if kind in family.formats:
      return family
  raise ValueError(f"--from {kind!r} must be one of {public_formats()}")


def _is_built_in(family: Family) -> bool:
  return type(family).__module__.startswith("moh_jax.families.")


def _load_entry_points() -> None:
  for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
    point.load()
