"""A model ready for inference, from its checkpoint alone."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import xxhash
from flax import traverse_util
from jax.sharding import Mesh

from moh_jax.config import Config, apply_overrides, check_command
from moh_jax.config.parse import changed
from moh_jax.data import tokenizers
from moh_jax.inference.classify import ImageLike, Prediction, classify
from moh_jax.models.registry import fit_params, make_model, serving_dtypes
from moh_jax.models.stored import read_params
from moh_jax.ops.placement import check_heads
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.batches import gather
from moh_jax.runtime.parameters import abstract_on, abstract_params, unbox


@dataclasses.dataclass(frozen=True)
class Restored:
  """A restored model.

  Attributes:
    config: the run's config, overrides applied.
    model: the Linen module; `model.apply({"params": params}, ...)`.
    params: parameters on the device or mesh. Matrices of a language model have
      its compute dtype: half the memory in bfloat16, and the same outputs.
      `restore(..., dtype="float32")` gives them as they were trained.
    step: optimizer steps they were trained for.
    class_names: names of the outputs, empty where there are none.
    tokenizer_sha256: of the tokenizer's file, empty where there is none.
  """

  config: Config
  model: nn.Module
  params: Any
  step: int
  class_names: tuple[str, ...]
  tokenizer_sha256: str = ""

  def __repr__(self) -> str:
    count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
    family = self.config.model.family
    return f"Restored({family!r}, step={self.step}, parameters={count:,})"

  def at_top_k(self, top_k: Sequence[int]) -> "Restored":
    """The same parameters with other numbers of routed heads.

    Args:
      top_k: one for each layer (ViT: stage), or one for all.

    Raises:
      ValueError: the model has no such heads.
    """
    wanted = with_top_k(self.config, top_k)
    params = fit_params(self.params, self.config.model, wanted.model)
    model = _network(wanted, params, [f"model.top_k={top_k}"])
    return dataclasses.replace(self, config=wanted, model=model, params=params)

  def predict(
    self, images: Sequence[ImageLike] | ImageLike, **options: int
  ) -> list[list[Prediction]]:
    """Classifies images, such as ["3.png"], with an image classifier.

    Args:
      images: paths, Pillow images or uint8 arrays [X, Y, channels]; one of
        these is as a list of it.
      **options: `top` and `batch_size`, see `classify`.

    Returns:
      Per image, its most probable classes.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: an image cannot be used, or the model classifies no images.
    """
    settings = {"class_names": self.class_names, **options}
    return classify(self.model, self.params, self.config, images, **settings)


def restore(
  directory: str,
  *,
  step: int | None = None,
  use_ema: bool = True,
  mesh: Mesh | None = None,
  changes: Sequence[str] = (),
  **model_overrides: Any,
) -> Restored:
  """Restores a checkpoint for inference.

  Args:
    directory: a working directory of train.py or an output of `convert`.
    step: which checkpoint; None is the newest.
    use_ema: prefer averaged parameters where the checkpoint has them.
    mesh: devices to shard the parameters over; None is one device.
    changes: keys of the config to change, as on command lines:
      "sample.steps=50"; `model_overrides` come after them.
    **model_overrides: model fields to change, for instance `top_k` to serve
      one training at several activated shares, `router={"gate_form": "paper"}`,
      `dtype`, or `attention_impl`. A `top_k` of one number holds for every
      layer (ViT: stage). None leaves a field as it was trained.

  Returns:
    The model, its parameters and its config.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: the checkpoint is damaged, or an override does not fit the
      model.
  """
  stored, step = checkpoint.read_metadata(directory, step)
  overrides = {k: v for k, v in model_overrides.items() if v is not None}
  config = _served_config(stored.config, changes, overrides)
  # The stored tree is the trained model's: an override such as top_k = 0 may
  # use fewer parameters than the checkpoint holds.
  trained, inputs = make_model(stored.config)
  if mesh is not None:
    check_heads(config.model, mesh)
  abstract = abstract_on(trained, inputs, mesh)
  abstract = jax.tree.map(
    lambda x, dtype: x.update(dtype=dtype),
    abstract,
    serving_dtypes(abstract, config.model),
  )
  fit = functools.partial(
    fit_params, trained=stored.config.model, wanted=config.model
  )
  told = [key for key in changes if key.startswith("model.")]
  told += [f"model.{name}={value!r}" for name, value in overrides.items()]
  model = _network(config, jax.eval_shape(fit, abstract), told)
  # Where the base of adapters is now may be among the changes.
  metadata = dataclasses.replace(
    stored, config=dataclasses.replace(stored.config, train=config.train)
  )
  params = read_params(
    metadata, directory, step, abstract, mesh, use_ema=use_ema
  )
  names, sha256 = stored.class_names, stored.tokenizer_sha256
  return Restored(config, model, fit(params), step, names, sha256)


def _served_config(
  config: Config, changes: Sequence[str], model: Mapping[str, Any]
) -> Config:
  """The config of a run with other keys for serving.

  Args:
    config: of the run.
    changes: keys, as on command lines: "sample.steps=50".
    model: fields of the section `model`, which come after them.

  Raises:
    ValueError: a field is unknown, or a value does not fit the model.
  """
  for change in changes:
    if change.startswith("tune."):
      raise ValueError(
        f"--config.{change}: tune.* is for training; adapters are a part of "
        "the weights that are served"
      )
  others = {k: v for k, v in model.items() if k != "top_k"}
  config = changed(config.served(), changes)
  config = apply_overrides(config, "model", **others)
  return with_top_k(config, model["top_k"]) if "top_k" in model else config


def with_top_k(config: Config, top_k: int | Sequence[int]) -> Config:
  """A config with other numbers of routed heads.

  Args:
    config: of a model to serve.
    top_k: one for each layer (ViT: stage), or one for all.

  Raises:
    ValueError: the model has no such heads.
  """
  values = tuple(top_k) if isinstance(top_k, list | tuple) else (top_k,)
  router = config.model.router
  if values and not router.selects:
    raise ValueError(
      f"top_k={values}: the model has no routed heads, "
      f"model.router.kind={router.kind!r}"
    )
  if len(values) == 1:
    values *= len(config.model.top_k)
  return apply_overrides(config, "model", top_k=values)


def _network(
  config: Config, params: Any, overrides: Sequence[str]
) -> nn.Module:
  """The network of a config, which must use no parameters but the given ones.

  Raises:
    ValueError: overrides need parameters that were never trained.
  """
  model, inputs = make_model(config)
  needed = traverse_util.flatten_dict(unbox(abstract_params(model, inputs)))
  there = traverse_util.flatten_dict(params)
  if unmet := [
    "/".join(path)
    for path, leaf in needed.items()
    if path not in there or there[path].shape != leaf.shape
  ]:
    raise ValueError(
      f"{', '.join(overrides)} must fit the checkpoint: it has no "
      f"{', '.join(unmet)} of that shape"
    )
  return model


def fingerprint(config: Any, params: Any) -> str:
  """Identifies a model by what it computes with, wherever it was stored.

  Args:
    config: its section.
    params: its parameters, as they are used.
  """
  state = xxhash.xxh3_128(repr(config).encode())
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    array = gather(leaf)
    state.update(f"{path} {array.dtype} {array.shape}".encode())
    state.update(array.tobytes())
  return state.hexdigest()


def load_checkpoint_tokenizer(
  directory: str, step: int | None = None
) -> tokenizers.Tokenizer:
  """Opens the tokenizer that belongs to the checkpoint of a language model.

  Args:
    directory: a working directory of train.py or an output of `convert`.
    step: which checkpoint; None is the newest.

  Raises:
    FileNotFoundError: there is no such checkpoint, or no tokenizer beside it.
    ValueError: the checkpoint is no language model, or the tokenizer is not the
      one that it was trained with.
  """
  metadata, _ = checkpoint.read_metadata(directory, step)
  check_command(metadata.config.model, "generate", directory)
  return tokenizers.load_tokenizer(
    steps.workdir(directory), metadata.tokenizer_sha256, "the checkpoint"
  )
