"""The record of a family of models.

A record is everything that the package must know of a family: its config
sections, its network, its training task, how its public checkpoints are read.
No other module asks which family a model belongs to. Families of other packages
are registered with `register_family` and then work with every command.

Configs are parsed before JAX is imported, so records import networks, losses
and converters inside the methods that need them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from moh_jax.config.heads import HeadBudget
from moh_jax.config.image_data import DataConfig
from moh_jax.config.run import Config

if TYPE_CHECKING:
  import flax.linen as nn
  import jax
  import numpy as np
  from jax.sharding import Mesh

  from moh_jax.analysis.probe import Probe
  from moh_jax.convert.rules import Converter
  from moh_jax.models.generation import Decode
  from moh_jax.training.task import Evaluate, TaskBuilder


class Family:
  """A family of models: subclass it, and register one instance.

  A family must set `name` and `model` and define `make_model` and `tasks`;
  the other methods have defaults for a network that no public checkpoint
  exists of.

  The model section is a frozen dataclass with the fields `family` (the name),
  `router`, `attention_impl`, `dtype` and `remat`, a class attribute
  `RUNTIME_FIELDS` (fields that a resumed run may change), and a method
  `layer_groups()`. `config.RoutedLayers` declares all but the method, and
  `config.LayerStack` has it for networks whose layers form one stack.

  Attributes:
    name: value of `model.family`.
    model: dataclass of the section `model`.
    data: dataclass of the section `data`.
    sections: further sections that only this family has, name to dataclass.
    commands: commands that work with this family but not with all: "classify",
      "evaluate-lm", "generate", "sample".
    position_bias: whether attention logits get a learned bias per head, which
      rules out some attention forms.
    reads_text: whether a tokenizer belongs to a checkpoint.
    formats: formats that `convert` reads, each with the beginnings of the names
      of the released models that have it.
    exports: forms that `export` writes, the default first: "" is one file of
      tensors, the others are folders.
    inputs: first names in the paths of the parameters before the first layer,
      see `training.layer_decay`.
    class_axes: axis of the classes in parameters that have one, by path. A run
      that starts from a model of other classes initialises these anew.
  """

  name: ClassVar[str]
  model: ClassVar[type]
  data: ClassVar[type] = DataConfig
  sections: ClassVar[Mapping[str, type]] = {}
  commands: ClassVar[frozenset[str]] = frozenset()
  position_bias: ClassVar[bool] = False
  reads_text: ClassVar[bool] = False
  formats: ClassVar[Mapping[str, tuple[str, ...]]] = {}
  exports: ClassVar[tuple[str, ...]] = ("",)
  inputs: ClassVar[frozenset[str]] = frozenset({"embed"})
  class_axes: ClassVar[Mapping[tuple[str, ...], int]] = {}

  # Config.

  def check(self, config: Config) -> None:
    """Raises ValueError where the sections of a config do not fit together."""

  def released(self) -> Mapping[str, Any]:
    """Released models: name to model section."""
    return {}

  def bench_run(self, model: Any, batch: int) -> Config:
    """A run on random data, for `bench model`.

    Args:
      model: the model section.
      batch: examples per step.
    """
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

  def inherited(
    self, trained: Config, stated: Mapping[str, Any]
  ) -> dict[str, dict[str, Any]]:
    """What a run takes from the model that it starts from, unless stated.

    Args:
      trained: config of that model.
      stated: fields of the section `model` that the run states.

    Returns:
      Fields by section.
    """
    return {"model": dataclasses.asdict(trained.model)}

  def with_model(self, config: Config, model: Any) -> Config:
    """The same run of a model with other budgets of heads, or no router.

    Args:
      config: the run.
      model: its model section, changed.

    Raises:
      ValueError: another section of the run does not fit that model.
    """
    return dataclasses.replace(config, model=model)

  # Network.

  def stack_names(self, model: Any) -> tuple[str, ...]:
    """First names in the paths of the layers' parameters, by layer group."""
    return tuple(f"blocks{i}" for i in range(len(model.layer_groups())))

  def layer_budgets(self, model: Any) -> dict[str, HeadBudget]:
    """The head split of every layer, by its stack and place: "blocks0.1"."""
    return {
      f"{name}.{place}": group.budget
      for name, group in zip(self.stack_names(model), model.layer_groups())
      for place in range(group.depth)
    }

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

    return jax.tree.map(lambda x: x.dtype, params)

  # Training and evaluation.

  def tasks(self) -> TaskBuilder:
    """What builds the training task and the evaluation: often a module."""
    raise NotImplementedError(f"family {self.name!r} has no tasks")

  def further_metrics(
    self, config: Config, mesh: Mesh, decode: Decode | None
  ) -> Evaluate | None:
    """Metrics that a run's evaluations have beside those of its task.

    Args:
      config: the run.
      mesh: the devices.
      decode: latents to images, where the run has it.

    Returns:
      (params, mesh) -> metrics; None where the config asks for none.
    """
    return None

  def probe(self, model: nn.Module, config: Config) -> Probe:
    """How `heads` runs the network on a held-out batch, and groups examples.

    Args:
      model: the network.
      config: the run.

    Raises:
      NotImplementedError: the family does not say.
    """
    raise NotImplementedError(
      f"model.family={self.name!r} has no probe: head statistics need one"
    )

  def head_importance(
    self, model: nn.Module, config: Config, params: Any, batches: Iterable[Any]
  ) -> np.ndarray | None:
    """Importance of every head [layers, H]; None where nothing measures it.

    Args:
      model: the network.
      config: the run.
      params: parameters of the network.
      batches: as `probe` gets them.
    """
    return None

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
    return [], {}

  # Public checkpoints.

  def converter(self) -> Converter:
    """How public checkpoints are read and written.

    Raises:
      NotImplementedError: the family has no public form.
    """
    raise NotImplementedError(
      f"model.family={self.name!r} has no public tensor names to convert from "
      "or export to"
    )

  def resized(self, config: Config, size: int) -> Config:
    """The same classifier for square images of another size, in pixels.

    Raises:
      ValueError: the family has no such form.
    """
    raise ValueError(
      f"--image-size {size}: only image classifiers change their size, not "
      f"model.family={config.model.family!r}"
    )
