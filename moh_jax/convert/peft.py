"""Adapters of language models as folders of PEFT, and back.

A folder holds adapter_config.json and adapter_model.safetensors. The adapters
are those of the exported model (`export`) or, without a router, of the plain
model of transformers: of a Linear (out, in) lora_A (r, in) and lora_B (out, r).
Parameters that are trained whole are `modules_to_save`.

The rules of a model whose width is r convert the factor at the heads or hidden
columns of a matrix; that at the width is transposed.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from moh_jax.config import (
  Config,
  LLMConfig,
  LoraConfig,
  TuneConfig,
  apply_overrides,
)
from moh_jax.convert import rules, tensor_files
from moh_jax.convert.rules import Path, Rule, converter_of, expected_tensors
from moh_jax.data.tokenizers import copy_tokenizer_files
from moh_jax.layers.linear import LORA_A, LORA_B
from moh_jax.models.adapters import Adapters, Matrix
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.files import read_json
from moh_jax.runtime.parameters import (
  abstract_boxed,
  abstract_params,
  check_finite,
  unbox,
)

FORM = "peft"
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
# What PEFT may store unasked, for `save_embedding_layers`.
_EMBED, _HEAD = "model.embed_tokens", "lm_head"
_PREFIX = "base_model.model."
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Fields that must have these values: others are not what we compute.
_ONLY = {
  "peft_type": ("LORA",),
  # Others change the matrices that they are trained on.
  "init_lora_weights": (True, None, False, "gaussian", "eva", "orthogonal"),
}
# Fields that say what the tensors say (biases are not expected among them), or
# matter only while adapters are made.
# PEFT writes more with each version; others must be null, false or empty.
_UNREAD = frozenset(
  """
  target_modules exclude_modules layers_to_transform layers_pattern bias
  auto_mapping base_model_name_or_path corda_config ensure_weight_tying
  eva_config inference_mode loftq_config lora_ga_config megatron_config
  megatron_core peft_version qalora_group_size revision runtime_config task_type
  velora_config
""".split()
)


class _Stored(msgspec.Struct):
  """What we read of adapter_config.json; see also `_ONLY`."""

  r: Annotated[int, msgspec.Meta(ge=1)]
  lora_alpha: Annotated[float, msgspec.Meta(gt=0)]
  lora_dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
  use_rslora: bool = False
  modules_to_save: list[str] | None = None


@dataclasses.dataclass(frozen=True)
class _Place:
  """Where a public Linear's adapter is among our parameters.

  Attributes:
    rule: of the kernel in a model whose width is the rank.
    part: of the kernel.
    matrix: the kernel.
  """

  rule: Rule
  part: int
  matrix: Matrix

  @property
  def layer(self) -> Path:
    """Path of our layer."""
    return self.rule.ours[0][:-1]

  @property
  def reads_width(self) -> bool:
    """Whether the width is the input, not the output."""
    return self.matrix.axes[self.matrix.lead] == "embed"

  @property
  def sides(self) -> tuple[int, int]:
    """Inputs and outputs of the Linear."""
    shape = self.matrix.shape[self.matrix.lead :]
    each = math.prod(shape) // (len(self.matrix.parts) or 1)
    return self.matrix.fan_in, each // self.matrix.fan_in

  def factors(self, params: dict[Path, Any]) -> tuple[Any, Any]:
    """Views of our A and B of the layer and part."""
    a, b = (
      params[*self.layer, name][self.rule.layer] for name in (LORA_A, LORA_B)
    )
    return (a[:, self.part], b[self.part]) if self.matrix.parts else (a, b)

  def load(self, a: np.ndarray, b: np.ndarray) -> tuple[Any, Any]:
    """Our factors of public ones."""
    (kernel,) = self.rule.load(
      [b if self.reads_width else a] * len(self.rule.theirs)
    )
    kernel = kernel[:, self.part] if self.matrix.parts else kernel
    return (a.T, kernel) if self.reads_width else (kernel, b.T)

  def dump(self, a: np.ndarray, b: np.ndarray) -> tuple[Any, Any]:
    """Inverse of `load`."""
    factor = b if self.reads_width else a
    if self.matrix.parts:
      factor = np.stack([factor] * len(self.rule.theirs), axis=1)
    public = self.rule.dump([factor])[self.part]
    return (a.T, public) if self.reads_width else (public, b.T)


def export_adapters(
  config: Config, directory: str, out: str, step: int, use_ema: bool, dtype: str
) -> int:
  """Writes the adapters of a checkpoint as a folder of PEFT.

  Args:
    config: the run.
    directory: working directory of a run with adapters, or what
      `import_adapters` wrote.
    out: the folder, new or empty.
    step: of the checkpoint.
    use_ema: prefer averaged parameters.
    dtype: of the tensors.

  Returns:
    The number of parameters.

  Raises:
    ValueError: the adapters have no public form.
  """
  lora = config.tune.lora
  boxed = abstract_params(*make_model(config))
  adapters = Adapters.of(boxed, lora)
  abstract = abstract_boxed(adapters.trained, None)
  params = checkpoint.restore_params(directory, step, abstract, use_ema=use_ema)
  params = {p: np.asarray(x) for p, x in flatten_dict(params).items()}
  tensors, saved, targets, others = {}, set(), set(), set()
  for name, place in _places(config.model, adapters, lora.rank):
    has = adapters.adapted.get(place.layer)
    if has is None or not has[place.part]:
      others.add(name.rpartition(".")[2])
      continue
    for one, factor in zip("AB", place.dump(*place.factors(params))):
      tensors[f"{_PREFIX}{name}.lora_{one}.weight"] = factor
    targets.add(name)
  for rule in converter_of(config.model).rules(config.model):
    (path, *_) = rule.ours
    if path in params:
      values = rule.dump([params[path][rule.layer]])
      for name, value in zip(rule.theirs, values):
        tensors[_PREFIX + name] = value
        saved.add(_LAYER.sub("", name).rpartition(".")[0])
  ties = config.model.tie_embeddings and _EMBED in saved
  if ties:  # else PEFT leaves the output layer as it is in the base
    tensors[f"{_PREFIX}{_HEAD}.weight"] = tensors[f"{_PREFIX}{_EMBED}.weight"]
    saved.add(_HEAD)
  stored_config = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": None,
    "r": lora.rank,
    "lora_alpha": lora.alpha,
    "lora_dropout": lora.dropout,
    "target_modules": sorted(
      {n if (end := n.rpartition(".")[2]) in others else end for n in targets}
    ),
    "modules_to_save": sorted(saved) or None,
    "ensure_weight_tying": ties,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
  }
  with tensor_files.new_folder(pathlib.Path(out)) as folder:
    text = json.dumps(stored_config, indent=2) + "\n"
    (folder / _CONFIG).write_text(text)
    text = tensor_files.HEADER
    tensor_files.write_file(folder / _TENSORS, tensors.items(), dtype, text)
  return sum(x.size for x in tensors.values())


def import_adapters(source: str, base: str, out: str) -> int:
  """Writes the adapters of a folder of PEFT as a checkpoint on a base.

  Args:
    source: the folder.
    base: checkpoint of the model that they were trained on.
    out: directory to write to; must hold no checkpoint yet.

  Returns:
    The number of parameters.

  Raises:
    FileNotFoundError: a file or the base is not there.
    ValueError: the folder is damaged, has what we do not compute, or does not
      fit the base.
  """
  checkpoint.check_vacant(out)
  folder = pathlib.Path(source)
  found = _read_config(folder / _CONFIG)
  tensors = {
    name.removeprefix(_PREFIX): x
    for name, x in tensor_files.open_tensors(folder / _TENSORS).items()
  }
  metadata, step = checkpoint.read_metadata(base)
  model = metadata.config.model
  if getattr(model, "tie_embeddings", False):
    _untie(source, found, tensors)
  boxed = abstract_params(*make_model(metadata.config))
  everything = Adapters.of(boxed, LoraConfig(found.r, targets=("*",), whole=()))
  table, places = converter_of(model).rules(model), {}
  shapes: dict[str, tuple[int, ...]] = {}
  for name, place in _places(model, everything, found.r):
    a, b = (f"{name}.lora_{one}.weight" for one in "AB")
    if a in tensors or b in tensors:
      ins, outs = place.sides
      shapes |= {a: (found.r, ins), b: (outs, found.r)}
      places[a, b] = place
  paths = {r.ours[0] for r in table if not tensors.keys().isdisjoint(r.theirs)}
  whole = [rule for rule in table if rule.ours[0] in paths]
  expected = expected_tensors(table, unbox(boxed))
  shapes |= {n: expected[n].shape for rule in whole for n in rule.theirs}
  rules.check_shapes(tensors, shapes, f"{source}, for {base}")

  def read(name: str) -> np.ndarray:
    return np.asarray(tensors[name]).astype(np.float32)

  names = (p.matrix.names(p.layer)[p.part] for p in places.values())
  lora = LoraConfig(
    found.r,
    found.lora_alpha * (math.sqrt(found.r) if found.use_rslora else 1),
    found.lora_dropout,
    tuple(sorted(set(names))),
    tuple(sorted("/".join(path) for path in paths)),
    model.dtype,
  )
  where = os.path.abspath(base)
  config = apply_overrides(metadata.config, "train", init_from=where)
  config = dataclasses.replace(config, tune=TuneConfig(lora=lora))
  adapters = Adapters.of(boxed, lora)
  abstract = flatten_dict(abstract_boxed(adapters.trained, None))
  params = {path: np.zeros(x.shape, np.float32) for path, x in abstract.items()}
  for pair, place in places.items():
    ours = place.load(*map(read, pair))
    for target, value in zip(place.factors(params), ours):
      target[...] = value
  for rule in whole:
    values = rule.load([read(name) for name in rule.theirs])
    params[rule.ours[0]][rule.layer] = values[0]
  tree = unflatten_dict(params)
  check_finite(tree, f"{source}: its adapters")
  stored_metadata = Metadata(
    config,
    tokenizer_sha256=metadata.tokenizer_sha256,
    base_mark=steps.mark(base, step),
  )
  copy_tokenizer_files(steps.workdir(base), steps.absolute(out))
  checkpoint.save_params(out, tree, stored_metadata)
  return sum(x.size for x in params.values())


def _read_config(path: pathlib.Path) -> _Stored:
  """Reads adapter_config.json.

  Raises:
    ValueError: it is damaged, or asks for what we do not compute.
  """
  values = read_json(path, _Stored)
  for name, allowed in _ONLY.items():
    if values.get(name, allowed[0]) not in allowed:
      raise ValueError(
        f"{path}: {name}={values[name]!r} must be {allowed[0]!r}"
      )
  known = {*_ONLY, *_UNREAD, *_Stored.__struct_fields__}
  if new := sorted(n for n in values if values[n] and n not in known):
    raise ValueError(
      f"{path}: {new[0]}={values[new[0]]!r} must be null, false or empty"
    )
  return msgspec.convert(values, _Stored)


def _untie(source: str, found: _Stored, tensors: dict[str, Any]) -> None:
  """Removes the output layer, which a base with tied embeddings has not.

  Raises:
    ValueError: PEFT would compute with an output layer that is not the
      embedding.
  """
  names = [f"{name}.weight" for name in (_EMBED, _HEAD)]
  embed, head = (tensors.get(name) for name in names)
  is_saved = _EMBED.endswith(tuple(found.modules_to_save or ()))
  if head is None and (embed is None or not is_saved):
    return
  if embed is None or head is None or not np.array_equal(embed, head):
    raise ValueError(
      f"{source}: the base has tie_embeddings=True, so {' and '.join(names)} "
      "must both be stored and be equal, as PEFT's ensure_weight_tying=True "
      f"does; modules_to_save={found.modules_to_save}"
    )
  del tensors[names[1]]


def _places(
  model: LLMConfig, adapters: Adapters, rank: int
) -> Iterator[tuple[str, _Place]]:
  """Public names of the Linears that have a place for adapters, and theirs."""
  if not hasattr(model, "width"):
    raise ValueError(
      f"model.family={model.family!r} has no form {FORM!r}, language models do"
    )
  narrow = dataclasses.replace(model, width=rank)
  for rule in converter_of(model).rules(narrow):
    *layer, name = rule.ours[0]
    matrix = adapters.kernels.get(tuple(layer))
    if name == "kernel" and matrix is not None:
      for part, theirs in enumerate(rule.theirs):
        yield theirs.removesuffix(".weight"), _Place(rule, part, matrix)
