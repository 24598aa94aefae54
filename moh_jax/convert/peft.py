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
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import jax.numpy as jnp
import msgspec
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from moh_jax.config import LLMConfig, LoraConfig, TuneConfig
from moh_jax.convert import tensor_files
from moh_jax.convert.rules import (
  Path,
  Rule,
  converter_of,
  expected_tensors,
)
from moh_jax.convert.tensor_files import Planned
from moh_jax.data.tokenizers import copy_tokenizer_files
from moh_jax.layers.linear import LORA_A, LORA_B
from moh_jax.models.adapters import Adapters, Matrix
from moh_jax.models.registry import make_model
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.json_files import read_json
from moh_jax.runtime.sharding import abstract_boxed, abstract_params, unbox

FORM = "peft"
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
# What PEFT may store unasked, for `save_embedding_layers`.
_EMBEDDINGS = ("model.embed_tokens", "lm_head")
_PREFIX = "base_model.model."
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_FACTOR = re.compile(r"(.+)\.lora_(A|B)\.weight")


class _Stored(msgspec.Struct):
  """What we read of adapter_config.json; see also `_ONLY`."""

  r: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
  lora_alpha: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
  lora_dropout: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
  use_rslora: bool = False
  target_modules: list[str] | str | None = None
  exclude_modules: list[str] | str | None = None
  layers_to_transform: list[int] | int | None = None
  layers_pattern: list[str] | str | None = None
  modules_to_save: list[str] | None = None

  def adapts(self, name: str) -> bool | None:
    """Whether a Linear has an adapter; None where patterns say it."""
    targets, others = self.target_modules, self.exclude_modules or []
    if not isinstance(targets, list) or isinstance(others, str):
      return None
    layers = self.layers_to_transform
    layers = [layers] if isinstance(layers, int) else layers
    if layers and self.layers_pattern:
      return None
    layer = _LAYER.match(name)
    is_there = not layers or name in targets
    is_there |= layer is not None and int(layer[1]) in (layers or [])
    is_whole = any(_ends(n, self.modules_to_save or []) for n in _above(name))
    is_there &= not is_whole and not _ends(name, others)
    return _ends(name, targets) and is_there

  def saves(self, name: str) -> bool:
    """Whether a module, which has no adapter, must be stored whole."""
    saved = tuple(self.modules_to_save or ())
    return any(n.endswith(saved) for n in _above(name))


def _ends(name: str, ends: Sequence[str]) -> bool:
  """Whether a name ends with one of several, as PEFT compares them."""
  return any(f".{name}".endswith(f".{end}") for end in ends)


def _above(name: str) -> Iterator[str]:
  """The names of a module and of all that it is part of."""
  parts = name.split(".")
  return (".".join(parts[: i + 1]) for i in range(len(parts)))


# Fields that must have these values: others are not what we compute.
_ONLY = {
  "peft_type": ("LORA",),
  "bias": ("none",),
  # Others change the matrices that they are trained on.
  "init_lora_weights": (True, None, False, "gaussian", "eva", "orthogonal"),
}
# Fields that matter only while adapters are made, or where others are given.
# PEFT writes more with each version; others must be null, false or empty.
_UNREAD = {
  "auto_mapping",
  "base_model_name_or_path",
  "corda_config",
  "ensure_weight_tying",
  "eva_config",
  "inference_mode",
  "layers_pattern",
  "loftq_config",
  "lora_ga_config",
  "megatron_config",
  "megatron_core",
  "peft_version",
  "qalora_group_size",
  "revision",
  "runtime_config",
  "task_type",
  "velora_config",
}


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

  def load(self, weight: np.ndarray) -> np.ndarray:
    """The factor that is not at the width, from a public weight to ours."""
    (kernel,) = self.rule.load([weight] * len(self.rule.theirs))
    return kernel[:, self.part] if self.matrix.parts else kernel

  def dump(self, factor: np.ndarray) -> np.ndarray:
    """Inverse of `load`."""
    if self.matrix.parts:
      factor = np.stack([factor] * len(self.rule.theirs), axis=1)
    return self.rule.dump([factor])[self.part]


def export_adapters(
  directory: str,
  out: str,
  step: int,
  *,
  use_ema: bool,
  dtype: str,
) -> int:
  """Writes the adapters of a checkpoint as a folder of PEFT.

  Args:
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
  metadata, step = checkpoint.read_metadata(directory, step)
  config = metadata.config
  lora = config.tune.lora
  boxed = abstract_params(*make_model(config))
  adapters = Adapters.of(boxed, lora)
  params = checkpoint.restore_params(
    directory,
    step,
    abstract_boxed(adapters.trained, None),
    use_ema=use_ema,
  )
  params = {p: np.asarray(x) for p, x in flatten_dict(params).items()}
  tensors, saved, targets, others = {}, set(), set(), set()
  for name, place in _places(config.model, adapters, lora.rank):
    has = adapters.adapted.get(place.layer)
    if has is None or not has[place.part]:
      others.add(name.rpartition(".")[2])
      continue
    a, b = (params[*place.layer, n][place.rule.layer] for n in (LORA_A, LORA_B))
    if place.matrix.parts:
      a, b = a[:, place.part], b[place.part]
    if place.reads_width:
      a, b = a.T, place.dump(b)
    else:
      a, b = place.dump(a), b.T
    tensors[f"{_PREFIX}{name}.lora_A.weight"] = a
    tensors[f"{_PREFIX}{name}.lora_B.weight"] = b
    targets.add(name)
  for rule in converter_of(config.model).rules(config.model):
    (path, *_) = rule.ours
    if path in params:
      values = rule.dump([params[path][rule.layer]])
      for name, value in zip(rule.theirs, values):
        tensors[_PREFIX + name] = value
        saved.add(_LAYER.sub("", name).rpartition(".")[0])
  embed, head = _EMBEDDINGS
  ties = config.model.tie_embeddings and embed in saved
  if ties:  # else PEFT leaves the output layer as it is in the base
    tensors[f"{_PREFIX}{head}.weight"] = tensors[f"{_PREFIX}{embed}.weight"]
    saved.add(head)
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
    planned = [
      Planned((name,), (x.shape,), lambda x=x: [x])
      for name, x in tensors.items()
    ]
    tensor_files.write_file(folder / _TENSORS, planned, dtype, {"format": "pt"})
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
  opened = tensor_files.open_tensors(os.fspath(folder / _TENSORS), None)
  tensors = {name.removeprefix(_PREFIX): x for name, x in opened.items()}
  if len(tensors) < len(opened):
    raise ValueError(f"{source}: a name is there with and without {_PREFIX!r}")
  metadata, step = checkpoint.read_metadata(base)
  model = metadata.config.model
  if getattr(model, "tie_embeddings", False):
    _untie(source, found, tensors)
  table = converter_of(model).rules(model)
  whole = {n: rule for rule in table for n in rule.theirs if n in tensors}
  boxed = abstract_params(*make_model(metadata.config))
  everything = Adapters.of(boxed, LoraConfig(found.r, targets=("*",), whole=()))
  places = dict(_places(model, everything, found.r))
  named, unknown = set(), []
  for name in tensors:
    match = _FACTOR.fullmatch(name)
    if match and match[1] in places:
      place = places[match[1]]
      named.add(place.matrix.names(place.layer)[place.part])
    elif name not in whole:
      unknown.append(name)
  if unknown or not named:
    raise ValueError(
      f"{source}: tensors that {base} has no place for: "
      f"{', '.join(sorted(unknown)[:3]) or 'none of them is an adapter'}"
    )
  for name in places:
    is_there = f"{name}.lora_A.weight" in tensors
    if found.adapts(name) not in (None, is_there):
      raise ValueError(
        f"{source}: {name} has {'an' if is_there else 'no'} adapter, "
        "target_modules and what goes with it say otherwise"
      )
  both = [
    n for n in whole if f"{n.removesuffix('.weight')}.lora_A.weight" in tensors
  ]
  if both:
    raise ValueError(f"{source}: {both[0]} is stored whole and has an adapter")
  for name in (name for rule in table for name in rule.theirs):
    module = name.rpartition(".")[0]
    is_named = found.saves(module)
    may_be_there = is_named or _ends(module, _EMBEDDINGS)
    if name in tensors and not may_be_there:
      raise ValueError(
        f"{source}: {name} is stored whole, modules_to_save="
        f"{found.modules_to_save} does not name it"
      )
    if name not in tensors and is_named:
      raise ValueError(
        f"{source}: {name} is not there, modules_to_save="
        f"{found.modules_to_save} names it"
      )
  alpha = found.lora_alpha
  lora = LoraConfig(
    found.r,
    alpha * math.sqrt(found.r) if found.use_rslora else alpha,
    found.lora_dropout,
    tuple(sorted(named)),
    tuple(sorted({"/".join(rule.ours[0]) for rule in whole.values()})),
    model.dtype,
  )
  config = dataclasses.replace(
    metadata.config,
    tune=TuneConfig(lora=lora),
    train=dataclasses.replace(
      metadata.config.train, init_from=os.path.abspath(base)
    ),
  )
  adapters = Adapters.of(boxed, lora)
  abstract = flatten_dict(abstract_boxed(adapters.trained, None))
  params = {path: np.zeros(x.shape, np.float32) for path, x in abstract.items()}
  for name, place in places.items():
    factors = [tensors.get(f"{name}.lora_{one}.weight") for one in "AB"]
    if factors == [None, None]:
      continue
    a, b = _factors(source, name, place, factors, found.r)
    our_a, our_b = (
      params[*place.layer, factor][place.rule.layer]
      for factor in (LORA_A, LORA_B)
    )
    if place.matrix.parts:
      our_a, our_b = our_a[:, place.part], our_b[place.part]
    our_a[...], our_b[...] = a, b
  expected = expected_tensors(table, unbox(boxed))
  for rule in table:
    if rule.ours[0] not in params:
      continue
    for name in rule.theirs:
      tensor, wanted = tensors.get(name), expected[name].shape
      if tensor is None or tensor.shape != wanted:
        shape = "missing" if tensor is None else f"of shape {tensor.shape}"
        raise ValueError(f"{source}: {name} is {shape}, must be {wanted}")
    given = [_floats(source, name, tensors[name]) for name in rule.theirs]
    params[rule.ours[0]][rule.layer] = rule.load(given)[0]
  stored_metadata = Metadata(
    config,
    tokenizer_sha256=metadata.tokenizer_sha256,
    base_mark=steps.mark(base, step),
  )
  copy_tokenizer_files(steps.workdir(base), steps.absolute(out))
  checkpoint.save_params(out, unflatten_dict(params), stored_metadata)
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
  names = [f"{name}.weight" for name in _EMBEDDINGS]
  embed, head = (tensors.get(name) for name in names)
  if head is None and (embed is None or not found.saves(_EMBEDDINGS[0])):
    return
  if embed is None or head is None or not np.array_equal(embed, head):
    raise ValueError(
      f"{source}: the base has tie_embeddings=True, so {' and '.join(names)} "
      "must be stored both and be equal, as PEFT's ensure_weight_tying=True "
      f"does; modules_to_save={found.modules_to_save}"
    )
  del tensors[names[1]]


def _floats(source: str, name: str, tensor: Any) -> np.ndarray:
  """A public tensor in float32."""
  array = np.asarray(tensor)
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise ValueError(f"{source}: {name} is of {array.dtype}, must be of floats")
  with np.errstate(over="ignore"):
    array = array.astype(np.float32)
  if not np.isfinite(array).all():
    raise FloatingPointError(f"{source}: {name} holds NaN or infinite numbers")
  return array


def _factors(
  source: str, name: str, place: _Place, factors: list[Any], rank: int
) -> tuple[np.ndarray, np.ndarray]:
  """Our A and B of one layer and part, from public tensors."""
  if None in factors:
    raise ValueError(f"{source}: {name} has one factor of two")
  a, b = (_floats(source, name, factor) for factor in factors)
  matrix = place.matrix
  each = math.prod(matrix.shape[matrix.lead :]) // (len(matrix.parts) or 1)
  ins, outs = matrix.fan_in, each // matrix.fan_in
  wanted = [(rank, ins), (outs, rank)]
  if [a.shape, b.shape] != wanted:
    raise ValueError(
      f"{source}: {name} has factors of shapes {a.shape} and {b.shape}, "
      f"{wanted[0]} and {wanted[1]} needed"
    )
  return (a.T, place.load(b)) if place.reads_width else (place.load(a), b.T)


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
