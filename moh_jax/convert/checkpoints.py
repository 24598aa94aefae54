"""Converts whole checkpoints: public to ours (`convert`), and `export` back.

`convert` works tensor by tensor and never holds a whole model, see `stream.py`;
`export` holds one file of tensors and a parameter of all layers.
"""

import contextlib
import dataclasses
import json
import logging
import math
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from moh_jax.config import (
  Config,
  apply_overrides,
  get_family,
  imported,
  public_formats,
  released_model,
)
from moh_jax.config.registry import family_of_format
from moh_jax.convert import peft, rules, stream, tensor_files
from moh_jax.convert.rules import CONFIG_FILE, converter_of
from moh_jax.data import tokenizers
from moh_jax.data.chat import template_names
from moh_jax.data.files import import_extra
from moh_jax.data.infer import resolve
from moh_jax.models.registry import make_model
from moh_jax.models.stored import read_params
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.files import parse_json, read_json
from moh_jax.runtime.parameters import abstract_on, abstract_params, unbox

_LOG = logging.getLogger(__name__)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # a name on the Hugging Face Hub
# What describes the model in the header of an exported file: the config, in
# which the preprocessing is, and the class names.
_ENTRY = "moh_jax"
_LIST = ".moh_jax_files"  # of a folder that was written, what lies in it
_BASE = "base"  # the form of the model that adapters are trained on


def convert(
  kind: str | None,
  source: str,
  out: str,
  *,
  key: str | None = None,
  model: str | None = None,
  config: Config | None = None,
  base: str | None = None,
) -> tuple[str, int]:
  """Turns a public checkpoint into one that inference restores.

  The tokenizer that lies beside the weights of a language model is copied to
  `out`.

  Args:
    kind: one of `config.public_formats()`; None takes the one that the source's
      config.json or its usual name tells.
    source: safetensors file, zip checkpoint of torch, a folder of either, or a
      repository of the Hugging Face Hub ("Chat-UniVi/MoH-ViT-S-80") that is in
      its cache.
    out: directory to write to; must hold no checkpoint yet.
    key: entry of a torch checkpoint that holds the weights.
    model: released name; None takes the model that the source names (in its
      config.json, or where `export` wrote it), or finds the one of `kind` whose
      shapes fit.
    config: run of a model that is not a released one.
    base: checkpoint of the model that adapters ("peft") were trained on.

  Returns:
    The model's name and its number of parameters.

  Raises:
    FileNotFoundError: there is no such source.
    ValueError: the tensors fit no (or not the named) model; they are listed.
  """
  if (kind == peft.FORM) != (base is not None):
    raise ValueError(
      f"--base {base!r}: --from {peft.FORM!r}, and it alone, needs the "
      "checkpoint that the adapters were trained on"
    )
  if base is not None:
    return "adapters", peft.import_adapters(_located(source), base, out)
  path = _located(source)
  kind = kind or _kind_of(source, path)
  if kind is None:
    tensor_files.open_tensors(path, key)  # raises where there are none
    raise ValueError(
      f"{source}: neither its name nor a config.json tells the format; name it "
      f"(--from), one of {public_formats()}"
    )
  tensors = tensor_files.open_tensors(path, key)
  name, metadata = _metadata(kind, path, tensors, model, config)
  config, family = metadata.config, family_of_format(kind).name
  if config.model.family != family:
    raise ValueError(
      f"--from {kind!r} makes a model of {family!r}; {name} is one of "
      f"{config.model.family!r}"
    )
  tensors = converter_of(config.model).kept(config.model, tensors)
  reads_text, folder = config.model.READS_TEXT, _folder(path)
  if reads_text and (found := _tokenizer(folder)):
    ids = found.vocab_size
    tokenizers.check_vocabulary(ids, config.model.vocab_size, path)
    template_names(found)  # refuses what cannot be read before all is written
  table, abstract = model_rules(config.model, kind), _abstract(config)
  params = stream.source_params(table, tensors, abstract, source=path)
  checkpoint.check_vacant(out)
  sha256 = _copy_tokenizer(folder, steps.absolute(out)) if reads_text else ""
  metadata = dataclasses.replace(metadata, tokenizer_sha256=sha256)
  stream.save_params(out, params, metadata)
  return name, _count(abstract)


def export(
  directory: str,
  out: str,
  *,
  to: str | None = None,
  step: int | None = None,
  use_ema: bool = True,
  dtype: str = "float32",
  license: str = "",
  base: str = "",
) -> int:
  """Writes a checkpoint's weights under their public names.

  A language model becomes a folder that transformers loads: config.json,
  safetensors (in shards with an index if there are several), the tokenizer, a
  model card, and code where transformers has none for the model. Other families
  become one safetensors file; the config, in which the preprocessing is, and
  the class names are in the text of its header, where `convert` finds them.
  Adapters become a part of the weights, which are then held in memory;
  `to="peft"` writes them alone, and `to="base"` the model that they are trained
  on, as the run computes with it: with its routers and other parameters that
  are trained whole, and with its matrices rounded to `tune.lora.base_dtype`.

  Args:
    directory: a working directory or an output of `convert`.
    out: what to write: a folder, new or empty, or one file.
    to: one of the family's `exports`; None is the first.
    step: which checkpoint; None is the newest.
    use_ema: prefer averaged parameters.
    dtype: of the stored weights, "float32" or "bfloat16".
    license: identifier of the licence for the model card.
    base: where the model that adapters were trained on is now; "" is where it
      was.

  Returns:
    The number of parameters.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: a folder that holds something, an argument out of range, or a
      model that cannot have this form.
  """
  metadata, step = checkpoint.read_metadata(directory, step)
  config, path = metadata.config, pathlib.Path(out)
  if base:
    config = apply_overrides(config, "train", init_from=base)
    metadata = dataclasses.replace(metadata, config=config)
  family, adapted = config.model.family, config.tune.lora.rank > 0
  forms = get_family(family).exports
  form = forms[0] if to is None else to  # "" is one file
  if form not in forms or (license and not form):
    named = " or ".join(filter(None, forms)) or "absent, as --license"
    raise ValueError(f"--to {to!r} must be {named} for a model of {family!r}")
  if form in (peft.FORM, _BASE) and not adapted:
    raise ValueError(
      f"--to {form!r}: {directory} has no adapters (tune.lora.rank=0)"
    )
  if form == peft.FORM:
    return peft.export_adapters(config, directory, out, step, use_ema, dtype)
  table, abstract = model_rules(config.model, form), _abstract(config)
  rules.expected_tensors(table, abstract)  # there is a rule for all parameters
  text = {**tensor_files.HEADER, "step": str(step)}

  def tensors() -> Iterator[tuple[str, np.ndarray]]:
    if adapted:
      held = abstract_on(*make_model(config), None)
      held = jax.tree.map(lambda x: x.update(dtype=dtype), held)
      how = {"use_ema": use_ema, "adapted": form != _BASE}
      params = read_params(metadata, directory, step, held, None, **how)
      leaves = jax.tree.map(np.asarray, traverse_util.flatten_dict(params))
      read = leaves.__getitem__
    else:
      read = stream.open_params(directory, step, use_ema=use_ema)
    for rule in table:
      ours = [read(path)[rule.layer] for path in rule.ours]
      yield from zip(rule.theirs, rule.dump(ours))

  if not form:
    # Adapters have become a part of the weights.
    stored = dataclasses.replace(metadata, config=config.served(), base_mark="")
    text[_ENTRY] = json.dumps(checkpoint.metadata_to_json(stored))
    tensor_files.write_file(path, tensors(), dtype, text)
  else:
    files = converter_of(config.model).folder_files
    with tensor_files.new_folder(path) as folder:
      _copy_tokenizer(steps.workdir(directory), folder)
      tokenizer = _tokenizer(folder)
      small = files(config, folder, tokenizer, dtype, license, form)
      for name, content in small.items():
        (folder / name).write_text(content)
      tensor_files.write_folder(folder, tensors(), dtype, text)
  return _count(abstract)


@contextlib.contextmanager
def written_over(
  out: str, reads: Iterable[str | None], overwrites: bool
) -> Iterator[str]:
  """A block that writes a checkpoint or an export in the place of another.

  A folder that such a block has filled, in which nothing has changed since, is
  replaced by what the block writes, when that is whole; anything else only
  where `overwrites`.

  Args:
    out: local folder; files and buckets are left to the block.
    reads: what the block reads, which is never replaced: sources and bases.
    overwrites: replace whatever `out` holds.

  Yields:
    Where to write to.
  """
  path = pathlib.Path(out).resolve()
  is_full = path.is_dir() and any(path.iterdir())
  is_own = is_full and (overwrites or _is_unchanged(path))
  sources = [pathlib.Path(one).resolve() for one in reads if one]
  if not is_own or any(path in (one, *one.parents) for one in sources):
    yield out
    if not is_full:
      _write_list(path)
    return
  with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as temporary:
    new = pathlib.Path(temporary, path.name)
    yield str(new)
    _write_list(new)
    _LOG.warning("%s is replaced", out)
    path.rename(f"{new}.old")
    new.rename(path)


def _write_list(path: pathlib.Path) -> None:
  """Notes what a folder holds; a file replaces others in any case."""
  if path.is_dir():
    (path / _LIST).write_text(_listed(path))


def _is_unchanged(folder: pathlib.Path) -> bool:
  """Whether a folder holds what it did when it was written."""
  file = folder / _LIST
  return file.is_file() and file.read_text() == _listed(folder)


def _listed(folder: pathlib.Path) -> str:
  """A line for each file of a folder, with its size and time."""
  lines = []
  for path in sorted(folder.rglob("*")):
    if path.name != _LIST:
      is_file, found = path.is_file(), path.stat()
      state = (found.st_size, found.st_mtime_ns) if is_file else "folder"
      lines.append(f"{path.relative_to(folder)} {state}\n")
  return "".join(lines)


def _located(source: str) -> str:
  """A path as it is, a repository of the Hub as its folder in the cache."""
  if pathlib.Path(source).exists():
    return source
  missing = f"{source}: no such file or folder"
  if not _REPOSITORY.fullmatch(source):
    raise FileNotFoundError(missing)
  hub = import_extra("huggingface_hub", f"{missing}; a repository of the Hub")
  try:
    return hub.snapshot_download(source, local_files_only=True)
  except (hub.errors.LocalEntryNotFoundError, hub.errors.HFValidationError):
    raise FileNotFoundError(
      f"{missing}, nor a repository in the cache of the Hugging Face Hub, "
      f"which `hf download {source}` would fetch"
    ) from None


def _kind_of(source: str, path: str) -> str | None:
  """The format of weights by what is said beside them, or their usual name.

  Args:
    source: what the user named.
    path: where it lies.

  Returns:
    One of `public_formats()`; None where nothing tells.
  """
  if (metadata := _exported(path)) is not None:
    return next(iter(get_family(metadata.config.model.family).formats))
  beside, file = {}, _folder(path) / CONFIG_FILE
  if file.is_file():
    beside = read_json(file)
  names = [str(beside.get("_class_name")), str(beside.get("model_type"))]
  if names[1] == "llama" and "auto_map" in beside:
    names = []  # computed by its own code: the release's, if so named
  for name in (*names, pathlib.Path(source).name):
    usual = name.lower().replace("_", "-")
    for kind in public_formats():
      if usual.startswith(family_of_format(kind).formats[kind]):
        return kind
  return None


def model_rules(model: Any, form: str = "") -> list[rules.Rule]:
  """The conversion table of a model section, for a form or format."""
  converter = converter_of(model)
  return converter.other_rules.get(form, converter.rules)(model)


def _metadata(
  kind: str,
  source: str,
  tensors: Mapping[str, Any],
  model: str | None,
  config: Config | None,
) -> tuple[str, checkpoint.Metadata]:
  """Which model a source holds, for people, and what its checkpoint says."""
  if config is not None:
    return "the given config", checkpoint.Metadata(resolve(config))
  if model is None:
    if (exported := _exported(source)) is not None:
      return "the exported model", exported
    name, file = "the model of config.json", _folder(source) / CONFIG_FILE
    described = imported(family_of_format(kind).converter).described(kind, file)
  if model is not None or described is None:
    name = model or _find_model(kind, tensors, source)
    described = released_model(name)
  return name, checkpoint.Metadata(released_run(described, tensors))


def _exported(source: str) -> checkpoint.Metadata | None:
  """What `export` said of a file, None of what it did not write."""
  path = pathlib.Path(source)
  if path.is_dir():
    path = next(iter(sorted(path.glob("*.safetensors"))), path)
  text = tensor_files.read_text(path).get(_ENTRY)
  return text and checkpoint.metadata_from_json(parse_json(text))


def _folder(source: str) -> pathlib.Path:
  """Folder that holds a source's other files, such as the tokenizer."""
  path = pathlib.Path(source)
  return path if path.is_dir() else path.parent


def _find_model(kind: str, tensors: Mapping[str, Any], source: str) -> str:
  """Finds the released model with exactly these tensor shapes."""
  family = family_of_format(kind)
  models = imported(family.released)
  names = [name for name in models if name.startswith(family.formats[kind])]
  for name in names:
    config = released_run(models[name], tensors)
    kept = converter_of(config.model).kept(config.model, tensors)
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


def released_run(model: Any, tensors: Mapping[str, Any]) -> Config:
  """The run that a released model stands for, see `Converter.released_run`."""
  return resolve(converter_of(model).released_run(model, tensors))


def _copy_tokenizer(source: Any, target: Any) -> str:
  """Copies a tokenizer's files; returns its SHA-256, or "" if there is none."""
  sha256 = tokenizers.copy_tokenizer_files(source, target)
  if not sha256:
    names = " or ".join(tokenizers.TOKENIZER_FILES)
    _LOG.warning("%s has no %s: no tokenizer is copied", source, names)
  return sha256


def _tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer | None:
  """Opens a tokenizer; None if there is none."""
  try:
    return tokenizers.load_tokenizer(folder)
  except FileNotFoundError:
    return None


def _abstract(config: Config) -> Any:
  return unbox(abstract_params(*make_model(config)))


def _count(tree: Any) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
