"""A model ready for inference, from its checkpoint alone."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import xxhash
from flax import traverse_util
from jax.sharding import Mesh

from moh_jax import config as config_lib
from moh_jax.config import Config, check_command
from moh_jax.config.parse import changed
from moh_jax.data.tokenizers import (
  BytesTokenizer,
  JsonTokenizer,
  SentencePieceTokenizer,
  Tokenizer,
  read_tokenizer,
)
from moh_jax.inference.classify import Classifier, ImageLike, Prediction
from moh_jax.models.registry import make_model
from moh_jax.models.restack import fit_params, serving_dtypes
from moh_jax.ops.head_layout import check_heads
from moh_jax.runtime import checkpoint, sharding, steps
from moh_jax.runtime.params import abstract_on, abstract_params, unbox
from moh_jax.runtime.sharding import check_tree


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

  def __getstate__(self) -> dict[str, Any]:
    # A compiled function cannot be pickled; a copy compiles its own.
    return {k: v for k, v in vars(self).items() if k != "_classifier"}

  def at_top_k(self, top_k: Sequence[int]) -> "Restored":
    """The same parameters with other numbers of routed heads.

    Args:
      top_k: one for each layer (ViT: stage), or one for all.

    Raises:
      ValueError: the model has no such heads.
    """
    wanted = with_top_k(self.config, top_k)
    model, inputs = make_model(wanted)
    params = fit_params(self.params, self.config.model, wanted.model)
    _check_parameters(
      unbox(abstract_params(model, inputs)), params, {"top_k": top_k}
    )
    return dataclasses.replace(self, config=wanted, model=model, params=params)

  def predict(
    self, images: Sequence[ImageLike] | np.ndarray, **options: int
  ) -> list[list[Prediction]]:
    """Classifies images with an image classifier, such as ["3.png"].

    Args:
      images: paths, Pillow images or uint8 arrays [X, Y, channels].
      **options: `top` and `batch_size`, see `Classifier.predict`.

    Returns:
      Per image, its most probable classes.

    Raises:
      FileNotFoundError: a file does not exist.
      ValueError: an image cannot be used, or the model classifies no images.
    """
    return self._classifier.predict(images, **options)

  @functools.cached_property
  def _classifier(self) -> Classifier:
    return Classifier(self.model, self.params, self.config, self.class_names)


def restore(
  directory: str,
  *,
  step: int | None = None,
  use_ema: bool = True,
  mesh: Mesh | None = None,
  sample: Mapping[str, Any] | None = None,
  verify: bool = True,
  changes: Sequence[str] = (),
  **model_overrides: Any,
) -> Restored:
  """Restores a checkpoint for inference.

  Args:
    directory: a working directory of train.py or an output of `convert`.
    step: which checkpoint; None is the newest.
    use_ema: prefer averaged parameters where the checkpoint has them.
    mesh: devices to shard the parameters over; None is one device.
    sample: fields of the section `sample` to change, for diffusion models.
    verify: compare what is read with its checksums first.
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
  metadata, step = checkpoint.read_metadata(directory, step, verify=verify)
  overrides = {k: v for k, v in model_overrides.items() if v is not None}
  config = changed(metadata.config.served(), changes)
  others = {k: v for k, v in overrides.items() if k != "top_k"}
  if others:
    config = config_lib.apply_overrides(config, "model", **others)
  if "top_k" in overrides:
    config = with_top_k(config, overrides["top_k"])
  if sample:
    if "sample" not in config.sections:
      raise ValueError(
        f"model.family={config.model.family!r} has no section 'sample' to "
        f"change {sorted(sample)} of"
      )
    config = config_lib.apply_overrides(config, "sample", **sample)
  if mesh is not None:
    check_heads(config.model, mesh)
  # The stored tree is the trained model's: an override such as top_k = 0 may
  # use fewer parameters than the checkpoint holds.
  trained, inputs = make_model(metadata.config)
  abstract = abstract_on(trained, inputs, mesh)
  abstract = jax.tree.map(
    lambda x, dtype: x.update(dtype=dtype),
    abstract,
    serving_dtypes(abstract, config.model),
  )
  model, _ = make_model(config)
  fit = functools.partial(
    fit_params, trained=metadata.config.model, wanted=config.model
  )
  _check_parameters(
    unbox(abstract_params(model, inputs)),
    jax.eval_shape(fit, abstract),
    overrides or list(changes),
  )
  check_tree(abstract, f"the parameters of {directory}")
  params = fit(
    checkpoint.restore_params(
      directory, step, abstract, use_ema=use_ema, verify=verify
    )
  )
  return Restored(
    config,
    model,
    params,
    step,
    metadata.class_names,
    metadata.tokenizer_sha256,
  )


def fingerprint(config: Any, params: Any, mesh: Mesh) -> str:
  """Identifies a model by what it computes with, wherever it was stored.

  Args:
    config: its section.
    params: its parameters, as they are used.
    mesh: that they lie on.
  """
  state = xxhash.xxh3_128(repr(config).encode())
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    array = sharding.gather(leaf, mesh)
    state.update(f"{path} {array.dtype} {array.shape}".encode())
    state.update(array.tobytes())
  return state.hexdigest()


def with_top_k(config: Config, top_k: int | Sequence[int]) -> Config:
  """A config with other numbers of routed heads.

  Args:
    config: of a model to serve.
    top_k: one for each layer (ViT: stage), or one for all.

  Raises:
    ValueError: the model has no such heads.
  """
  values = (top_k,) if isinstance(top_k, int) else top_k
  if values and config.model.router.kind == "none":
    raise ValueError(
      f"top_k={values}: the model has no routed heads, model.router.kind='none'"
    )
  if values and config.model.router.top_p:
    raise ValueError(
      f"top_k={values}: router.top_p={config.model.router.top_p} selects heads "
      "by score, so they exclude each other"
    )
  if isinstance(values, list | tuple) and len(values) == 1:
    values = tuple(values) * len(config.model.top_k)
  return config_lib.apply_overrides(config, "model", top_k=values)


def _check_parameters(needed: Any, stored: Any, overrides: dict) -> None:
  """Refuses overrides that need parameters which were never trained."""
  flat = [traverse_util.flatten_dict(tree) for tree in (needed, stored)]
  needed, stored = ({p: x.shape for p, x in tree.items()} for tree in flat)
  unmet = [p for p, shape in needed.items() if stored.get(p) != shape]
  if unmet:
    names = ", ".join("/".join(path) for path in unmet)
    raise ValueError(
      f"the overrides {overrides} do not fit the checkpoint: it has no {names} "
      "of that shape"
    )


def load_checkpoint_tokenizer(
  directory: str, step: int | None = None, *, verify: bool = True
) -> Tokenizer:
  """Opens the tokenizer of a language model.

  Args:
    directory: a working directory of train.py or an output of `convert`.
    step: which checkpoint; None is the newest.
    verify: compare its metadata with its checksum first.

  Raises:
    FileNotFoundError: there is no such checkpoint, or no tokenizer beside it.
    ValueError: the checkpoint is no language model, or the tokenizer is not the
      one that it was trained with.
  """
  metadata, _ = checkpoint.read_metadata(directory, step, verify=verify)
  check_command(metadata.config.model, "generate", directory)
  expected = metadata.tokenizer_sha256
  if expected == BytesTokenizer.sha256:
    return BytesTokenizer()
  folder = steps.workdir(directory)
  refused = []
  for kind in (JsonTokenizer, SentencePieceTokenizer):
    file = folder / kind.file_name
    if not file.exists():
      continue
    try:
      return read_tokenizer(kind.kind, file, expected, "the checkpoint")
    except ValueError as error:  # the right one may lie beside it
      refused.append(str(error))
  if refused:
    raise ValueError("; ".join(refused))
  raise FileNotFoundError(
    f"{folder} holds no {JsonTokenizer.file_name} or "
    f"{SentencePieceTokenizer.file_name}; put the model's tokenizer there"
  )
