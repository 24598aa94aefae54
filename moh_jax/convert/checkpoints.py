"""Whole checkpoints: public to ours (`convert`) and back (`export`).

Both go tensor by tensor, so neither holds a model: see `convert/stream.py`.
"""

import dataclasses
import functools
import hashlib
import logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import traverse_util
from jax.sharding import Mesh

from moh_jax.config import Config, LLMConfig
from moh_jax.convert import (
  dit,
  hf_config,
  llama,
  rules,
  stream,
  tensor_writer,
  vit,
)
from moh_jax.convert.tensor_files import open_tensors
from moh_jax.convert.tensor_writer import Planned
from moh_jax.data.infer import resolve
from moh_jax.data.text.tokenizers import load_tokenizer
from moh_jax.files import replacing
from moh_jax.models.build import make_model
from moh_jax.models.registry import MODELS, get_model
from moh_jax.runtime import checkpoint
from moh_jax.runtime.params import abstract_params, unbox

_LOG = logging.getLogger(__name__)
Tensors = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class _Family:
  """How checkpoints of a family are read.

  Attributes:
    rules: the conversion table of a model section.
    released_run: the run that a released model and its tensors stand for.
    is_ignored: whether a checkpoint of a model may hold a tensor that has no
      meaning.
  """

  rules: Callable[[Any], list[rules.Rule]]
  released_run: Callable[[Any, Tensors], Config]
  is_ignored: Callable[[Any, str], bool] = lambda model, name: False


_FAMILIES = {
  "vit": _Family(vit.model_rules, vit.released_run),
  "dit": _Family(dit.model_rules, dit.released_run),
  "llm": _Family(llama.model_rules, llama.released_run, llama.is_ignored),
}
# Format -> how the names of the released models that have it begin.
_RELEASED = {
  "moh-vit": ("moh-vit",),
  "transnext": ("transnext",),
  "moh-dit": ("moh-dit",),
  "dit": ("dit",),
  "llama": ("llama", "llm", "moh-llm"),
  "moh-llama3": ("moh-llama3",),
}
FORMATS = tuple(_RELEASED)
# Formats whose sources say in a config.json what model they are.
_SELF_DESCRIBED = ("llama", "moh-llama3")
SHARD_SIZE = 5 * 10**9  # bytes, as transformers splits
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # the first is read
_TOKENIZER_FILES = (
  *_TOKENIZERS,
  "tokenizer_config.json",
  "special_tokens_map.json",
)


def convert(
  kind: str,
  source: str,
  out: str,
  *,
  key: str | None = None,
  model: str | None = None,
  config: Config | None = None,
  image_size: int | None = None,
) -> tuple[str, int]:
  """Turns a public checkpoint into one that inference restores.

  The tokenizer that lies beside the weights of a language model is copied to
  `out`.

  Args:
    kind: one of `FORMATS`.
    source: safetensors file or folder, or a torch zip checkpoint.
    out: directory to write to; must hold no checkpoint yet.
    key: entry of a torch checkpoint that holds the weights.
    model: released name; None takes the model of the source's config.json, or
      finds the one of `kind` whose shapes fit.
    config: run of a model that is not a released one.
    image_size: input size of a classifier, instead of the model's; that of a
      diffusion model is in its checkpoint.

  Returns:
    The model's name and its number of parameters.

  Raises:
    FileNotFoundError: there is no such source.
    ValueError: the tensors fit no (or not the named) model; they are listed.
  """
  name, config, tensors = _open(kind, source, key, model, config)
  if image_size:
    config = _resized(config, image_size)
  table = model_rules(config.model)
  params = stream.source_params(
    table, tensors, _abstract(config), source=source
  )
  checkpoint.check_vacant(out)
  tokenizer = ""
  if config.model.family == "llm":
    tokenizer = _copy_tokenizer(_folder(source), checkpoint.resolve(out))
  metadata = checkpoint.Metadata(config, tokenizer_sha256=tokenizer)
  stream.save_params(out, params, metadata)
  return name, _count(params)


def load_sharded(
  kind: str,
  source: str,
  mesh: Mesh,
  *,
  key: str | None = None,
  model: str | None = None,
  config: Config | None = None,
) -> tuple[Config, Any]:
  """Puts a public checkpoint onto a mesh without writing one of ours.

  Args:
    kind: one of `FORMATS`.
    source: as for `convert`.
    mesh: the devices.
    key: as for `convert`.
    model: as for `convert`.
    config: as for `convert`.

  Returns:
    The run's config, and the parameters as sharded arrays. Of a safetensors
    source a process reads only what its devices hold.

  Raises:
    FileNotFoundError: there is no such source.
    ValueError: the tensors fit no (or not the named) model; they are listed.
  """
  _, config, tensors = _open(kind, source, key, model, config)
  table = model_rules(config.model)
  return config, stream.load_sharded(
    table, tensors, config, mesh, source=source
  )


def export(
  directory: str,
  out: str,
  *,
  step: int | None = None,
  use_ema: bool = True,
  dtype: str = "float32",
  shard_size: int = SHARD_SIZE,
) -> int:
  """Writes a checkpoint's weights under their public names.

  A language model becomes a folder that transformers loads: config.json,
  safetensors (in shards with an index if there are several) and the tokenizer.
  Other families become one safetensors file.

  Args:
    directory: a working directory or an output of `convert`.
    out: what to write: a folder, new or empty, for a language model, else a
      file.
    step: which checkpoint; None is the newest.
    use_ema: prefer averaged parameters.
    dtype: "float32" or "bfloat16".
    shard_size: bytes of one file of a folder at most.

  Returns:
    The number of parameters.

  Raises:
    FileNotFoundError: there is no such checkpoint, or no directory to write to.
    ValueError: a folder that holds something, or an argument out of range.
  """
  if dtype not in tensor_writer.DTYPES:
    raise ValueError(
      f"dtype {dtype!r} must be one of {tuple(tensor_writer.DTYPES)}"
    )
  if shard_size < 1:
    raise ValueError(f"shard_size={shard_size} must be at least 1 byte")
  metadata, step = checkpoint.read_metadata(directory, step)
  config, path = metadata.config, pathlib.Path(out)
  is_llm = config.model.family == "llm"
  if is_llm:  # before anything is read
    tensor_writer.check_vacant(path)
  params = stream.open_params(
    directory, step, _abstract(config), use_ema=use_ema
  )
  planned = _plan(model_rules(config.model), params)
  text = {"format": "pt", "step": str(step)}  # transformers asks for "format"
  if not is_llm:
    tensor_writer.write_file(path, planned, dtype, text)
    return _count(params)
  with tensor_writer.new_folder(path) as folder:
    home = checkpoint.resolve(directory)
    home = home.parent if home.name == checkpoint.FOLDER else home
    _copy_tokenizer(home, folder)
    stored = hf_config.to_hf(config.model, dtype=dtype, **_ids(folder))
    tensor_writer.write_json(folder / hf_config.FILE, stored)
    tensor_writer.write_folder(folder, planned, dtype, text, shard_size)
  return _count(params)


def model_rules(model: Any) -> list[rules.Rule]:
  """The conversion table of a model section."""
  return _FAMILIES[model.family].rules(model)


def _open(
  kind: str,
  source: str,
  key: str | None,
  model: str | None,
  config: Config | None,
) -> tuple[str, Config, dict[str, Any]]:
  """What a source is: a name, its run, and its tensors, none read."""
  if kind not in FORMATS:
    raise ValueError(f"--from {kind!r} must be one of {FORMATS}")
  if model is not None:
    get_model(model)  # before a large source is looked through
  tensors = open_tensors(source, key)
  described = None
  if config is None and model is None:
    described = _described(kind, source)
  if config is not None:
    name, config = "custom", resolve(config)
  elif described is not None:
    name, config = "the model of config.json", _released_run(described, tensors)
  else:
    name = model or _find_model(kind, tensors, source)
    config = _released_run(get_model(name), tensors)
  return name, config, _without_ignored(config.model, tensors)


def _described(kind: str, source: str) -> LLMConfig | None:
  """The model of a config.json beside the source, if there is one."""
  path = _folder(source) / hf_config.FILE
  if kind not in _SELF_DESCRIBED or not path.is_file():
    return None
  model = hf_config.read_config(path)
  if kind == "moh-llama3" and model.router.kind == "none":
    return hf_config.moh_llama3(model)
  return model


def _folder(source: str) -> pathlib.Path:
  """Where a source's other files lie."""
  path = pathlib.Path(source)
  return path if path.is_dir() else path.parent


def _find_model(kind: str, tensors: Tensors, source: str) -> str:
  """The released model whose tensor shapes are exactly these."""
  names = [name for name in MODELS if name.startswith(_RELEASED[kind])]
  for name in names:
    config = _released_run(MODELS[name], tensors)
    kept = _without_ignored(config.model, tensors)
    found = {n: tuple(tensor.shape) for n, tensor in kept.items()}
    expected = rules.expected_tensors(
      model_rules(config.model), _abstract(config)
    )
    if found == {n: leaf.shape for n, leaf in expected.items()}:
      return name
  raise ValueError(
    f"{source}: its {len(tensors)} tensors have the shapes of none of {names}; "
    "name the model (--model) to list what differs, or give its --config"
  )


def _released_run(model: Any, tensors: Tensors) -> Config:
  """The run that a released model stands for."""
  return resolve(_FAMILIES[model.family].released_run(model, tensors))


def _without_ignored(model: Any, tensors: Tensors) -> dict[str, Any]:
  ignored = functools.partial(_FAMILIES[model.family].is_ignored, model)
  return {name: t for name, t in tensors.items() if not ignored(name)}


def _plan(table: Sequence[rules.Rule], params: Any) -> list[Planned]:
  """Their tensors in the order in which our leaves are read once."""
  leaves = traverse_util.flatten_dict(params)
  rules.check_covered(table, leaves)
  planned = []
  for rule in table:
    ours = [leaves[path] for path in rule.ours]
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ours]
    shapes = tuple(x.shape for x in jax.eval_shape(rule.dump, abstract))
    if rule.layer is None:
      make = functools.partial(_make, rule, ours)
      planned.append(Planned(rule.theirs, shapes, make))
      continue
    width = len(rule.layer.theirs)
    for layer, names in enumerate(rule.layers):
      make = functools.partial(_make_layer, rule, ours, layer)
      part = shapes[layer * width : (layer + 1) * width]
      planned.append(Planned(names, part, make))
  return planned


def _make(rule: rules.Rule, ours: Sequence[stream.StoredLeaf]) -> list:
  return rule.dump([leaf.read() for leaf in ours])


def _make_layer(
  rule: rules.Rule, ours: Sequence[stream.StoredLeaf], layer: int
) -> list:
  made = rule.layer.dump([leaf.layer(layer) for leaf in ours])
  if layer == len(rule.layers) - 1:
    for leaf in ours:
      leaf.free()
  return made


def _copy_tokenizer(source: Any, target: Any) -> str:
  """Copies a tokenizer's files; the SHA-256 of the one that is read, or ""."""
  found = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
  if not set(found) & set(_TOKENIZERS):
    _LOG.warning(
      "%s has no %s: no tokenizer is copied", source, " or ".join(_TOKENIZERS)
    )
    return ""
  target.mkdir(parents=True, exist_ok=True)
  for name in found:
    _write_whole(target / name, (source / name).read_bytes())
  return hashlib.sha256((source / found[0]).read_bytes()).hexdigest()


def _write_whole(path: Any, content: bytes):
  """Writes a file that a kill leaves whole or absent."""
  if "://" in os.fspath(path):  # so are all files of buckets
    path.write_bytes(content)
    return
  with replacing(path) as temporary:
    temporary.write_bytes(content)


def _ids(folder: pathlib.Path) -> dict[str, int | None]:
  """The tokens that begin and end a text, where a tokenizer tells them."""
  try:
    tokenizer = load_tokenizer(folder)
  except (FileNotFoundError, ValueError):  # none, or its library is missing
    return {}
  return {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id}


def _abstract(config: Config) -> Any:
  model, inputs = make_model(config)
  return unbox(abstract_params(model, inputs))


def _resized(config: Config, size: int) -> Config:
  model = config.model
  if model.family != "vit":
    raise ValueError(
      f"--image-size {size}: only classifiers change their size, not "
      f"model.family={model.family!r}"
    )
  pretrain = model.pretrain_image_size or model.image_size[0]
  model = dataclasses.replace(
    model, image_size=(size, size), pretrain_image_size=pretrain
  )
  # Keep the ratio of crop to resize that the model was evaluated with.
  resize = config.data.eval_resize * size // config.model.image_size[0]
  data = dataclasses.replace(config.data, eval_resize=resize)
  return dataclasses.replace(config, model=model, data=data)


def _count(tree: Any) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
