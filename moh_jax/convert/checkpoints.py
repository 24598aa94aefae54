"""Converts whole checkpoints: public to ours (`convert`), and `export` back.

Both work tensor by tensor and never hold a whole model, see `stream.py`.
"""

import dataclasses
import functools
import json
import logging
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import traverse_util

from moh_jax.config import (
  Config,
  DistillConfig,
  LoraConfig,
  family_of_format,
  get_family,
  imported,
  public_formats,
  released_model,
)
from moh_jax.convert import peft, rules, stream, tensor_files
from moh_jax.convert.rules import CONFIG_FILE, Exported, converter_of
from moh_jax.convert.tensor_files import Planned
from moh_jax.data import tokenizers
from moh_jax.data.chat import template_names
from moh_jax.data.infer import resolve
from moh_jax.data.input_files import import_extra
from moh_jax.models.registry import make_model
from moh_jax.models.stored import read_params
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.files import check_regular, temporary_folder
from moh_jax.runtime.json_files import parse_json, read_json
from moh_jax.runtime.sharding import abstract_on, abstract_params, unbox

_LOG = logging.getLogger(__name__)
Tensors = Mapping[str, Any]
# What describes the model in the header of an exported file: the config, in
# which the preprocessing is, and the class names.
_ENTRY = "moh_jax"
_FOLDER = "folder"  # the form of one's own networks
_BASE = "base"  # the form of the model that adapters are trained on
_WEIGHTS = (".safetensors", *tensor_files.TORCH_SUFFIXES)
_CARD = """---
library_name: moh_jax
---

# Mixture-of-Head {family}, {share:.1%} of the heads active

{parameters:,} parameters, trained for {step:,} steps, stored as {dtype}. Read
it by `moh_jax.restore("FOLDER")`; config.json has the run and the class names.

Images of {size} (rows, columns, channels) are pixels / 255 less {mean}, over
{std}.
"""


def convert(
  kind: str | None,
  source: str,
  out: str,
  *,
  key: str | None = None,
  model: str | None = None,
  config: Config | None = None,
  image_size: int | None = None,
  base: str | None = None,
) -> tuple[str, int]:
  """Turns a public checkpoint into one that inference restores.

  The tokenizer that lies beside the weights of a language model is copied to
  `out`.

  Args:
    kind: one of `config.public_formats()`; None takes the one that the usual
      name of the source tells, or its config.json.
    source: safetensors file, zip checkpoint of torch, a folder of either, or a
      repository of the Hugging Face Hub ("Chat-UniVi/MoH-ViT-S-80") that is in
      its cache.
    out: directory to write to; must hold no checkpoint yet.
    key: entry of a torch checkpoint that holds the weights.
    model: released name; None takes the model that the source names (in its
      config.json, or where `export` wrote it), or finds the one of `kind` whose
      shapes fit.
    config: run of a model that is not a released one.
    image_size: input size of a classifier, instead of the model's; that of a
      diffusion model is in its checkpoint.
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
    return "adapters", peft.import_adapters(source, base, out)
  named, source = source, _located(source)
  kind = kind or _kind_of(named, source)
  if kind is None:
    raise ValueError(
      f"{named}: neither its name nor a config.json tells the format; name it "
      f"(--from), one of {public_formats()}"
    )
  name, metadata, tensors = _open(kind, source, key, model, config)
  config = metadata.config
  if image_size:
    config = config.model.resized(config, image_size)
  folder = _folder(source)
  if config.model.READS_TEXT and (found := _tokenizer(folder)):
    tokenizers.check_vocabulary(found, config.model.vocab_size, source)
    template_names(found)  # refuses what cannot be read before all is written
  table, abstract = model_rules(config.model, kind), _abstract(config)
  params = stream.source_params(table, tensors, abstract, source=source)
  checkpoint.check_vacant(out)
  sha256 = ""
  if config.model.READS_TEXT:
    _check_no_other_tokenizer(folder, steps.absolute(out))
    sha256 = _copy_tokenizer(folder, steps.absolute(out))
  metadata = dataclasses.replace(
    metadata, config=config, tokenizer_sha256=sha256
  )
  try:
    stream.save_params(out, params, metadata)
  except FloatingPointError as error:
    raise FloatingPointError(f"{named}: {error}") from error
  return name, _count(abstract)


def export(
  directory: str,
  out: str,
  *,
  to: str | None = None,
  step: int | None = None,
  use_ema: bool = True,
  dtype: str = "float32",
  shard_size: int = tensor_files.SHARD_SIZE,
  license: str = "",
  scores: str = "",
  base: str = "",
) -> int:
  """Writes a checkpoint's weights under their public names.

  A language model becomes a folder that transformers loads: config.json,
  safetensors (in shards with an index if there are several), the tokenizer, a
  model card, and code where transformers has none for the model. Other families
  become one safetensors file; the config, in which the preprocessing is, and
  the class names are in the text of its header, where `convert` finds them.
  `to="folder"` puts such a file into a folder, which `restore` reads, with a
  model card and the same as JSON.
  `to="diffusers"` makes a folder of a plain DiT. Adapters become a part of the
  weights, which are then held in memory; `to="peft"` writes them alone, and
  `to="base"` the model that they are trained on, as the run computes with it:
  with its routers and other parameters that are trained whole, and with its
  matrices as rounded as `tune.lora.base_dtype` holds them.

  Args:
    directory: a working directory or an output of `convert`.
    out: what to write: a folder, new or empty, or one file.
    to: one of the family's `exports`; None is the first.
    step: which checkpoint; None is the newest.
    use_ema: prefer averaged parameters.
    dtype: one of `tensor_files.DTYPES`.
    shard_size: bytes of one file of a folder at most, at least 1.
    license: identifier of the licence for the model card.
    scores: JSON file of `evaluate` for the model card.
    base: where the model that adapters were trained on is now; "" is where it
      was.

  Returns:
    The number of parameters.

  Raises:
    FileNotFoundError: there is no such checkpoint, or no file of scores.
    ValueError: a folder that holds something, an argument out of range, or a
      model that cannot have this form.
  """
  metadata, step = checkpoint.read_metadata(directory, step)
  config, path = metadata.config, pathlib.Path(out)
  if base:
    train = dataclasses.replace(config.train, init_from=base)
    config = dataclasses.replace(config, train=train)
    metadata = dataclasses.replace(metadata, config=config)
  family = get_family(config.model.family)
  if to is not None and to not in family.exports:
    forms = " or ".join(repr(form) for form in family.exports if form)
    raise ValueError(
      f"--to {to!r}, for a model of {family.name!r}, must be "
      f"{forms or 'left out: it becomes one file of tensors'}"
    )
  if (license or scores) and not config.model.READS_TEXT:
    raise ValueError(
      "--license and --scores are for the model card of a language model; this "
      f"is a model of {family.name!r}"
    )
  form = to or family.exports[0]  # "" is one file
  if form in (peft.FORM, _BASE) and not config.tune.lora.rank:
    raise ValueError(
      f"--to {form!r}: {directory} has no adapters (tune.lora.rank=0)"
    )
  if form == peft.FORM:
    how = {"use_ema": use_ema, "dtype": dtype}
    return peft.export_adapters(directory, out, step, **how)
  converter = converter_of(config.model)
  table = model_rules(config.model, form)
  abstract = _abstract(config)
  total = _count(abstract)

  def plan() -> list[Planned]:
    how = {"use_ema": use_ema}
    if config.tune.lora.rank:
      held = abstract_on(*make_model(config), None)
      held = jax.tree.map(lambda x: x.update(dtype=dtype), held)
      how["adapted"] = form != _BASE
      params = read_params(metadata, directory, step, held, None, **how)
      params = jax.tree.map(stream.HeldLeaf, params)
    else:
      params = stream.open_params(directory, step, abstract, **how)
    leaves = traverse_util.flatten_dict(params)
    shapes = rules.expected_tensors(table, abstract)
    return [
      Planned(
        rule.theirs,
        tuple(shapes[name].shape for name in rule.theirs),
        functools.partial(_make, rule, [leaves[path] for path in rule.ours]),
      )
      for rule in table
    ]

  text = {"format": "pt", "step": str(step)}  # transformers asks for "format"
  stored = checkpoint.metadata_to_json(_merged(metadata))
  if form in ("", _FOLDER):
    text[_ENTRY] = json.dumps(stored)
  if not form:
    tensor_files.write_file(path, plan(), dtype, text)
    return total
  with tensor_files.new_folder(path) as folder:
    tokenizer = None
    if config.model.READS_TEXT:
      _copy_tokenizer(steps.workdir(directory), folder)
      tokenizer = _tokenizer(folder)
    trained = 0 if form == _BASE else step
    exported = Exported(
      form, config, trained, dtype, total, folder, tokenizer, license, scores
    )
    if form == _FOLDER:
      small, stem = _own_files(exported, stored), "model"
    else:
      small, stem = converter.folder_files(exported), converter.stem
    for name, content in small.items():
      (folder / name).write_text(content)
    tensor_files.write_folder(folder, plan(), dtype, text, shard_size, stem)
  return total


def _merged(metadata: checkpoint.Metadata) -> checkpoint.Metadata:
  """Metadata of a model whose adapters have become a part of its weights."""
  config = metadata.config
  plain = {"lora": LoraConfig(), "distill": DistillConfig()}
  tune = dataclasses.replace(config.tune, **plain)
  config = dataclasses.replace(config, tune=tune)
  return dataclasses.replace(metadata, config=config, base_mark="")


def _own_files(exported: Exported, stored: Any) -> dict[str, str]:
  """The small files of a folder of one of our networks."""
  model, data = exported.config.model, exported.config.data
  told = {"family": model.family, "share": model.activated_share}
  told |= {"size": model.input_shape, "mean": data.mean, "std": data.std}
  return {
    "README.md": _CARD.format(**told, **vars(exported)),
    CONFIG_FILE: json.dumps(stored, indent=2) + "\n",
  }


def unpacked(source: str) -> str:
  """A checkpoint made of public weights, such as a folder of `export`.

  It lies in a temporary folder, which is removed when the process ends.

  Args:
    source: as of `convert`. A directory of ours comes back as it is, and so
      does what is not there or of no known format.
  """
  if steps.in_bucket(source) or not steps.may_be_public(source):
    return source
  try:
    path = _located(source)
  except (FileNotFoundError, ValueError):  # also without the Hub's library
    return source
  kind = _kind_of(source, path)
  if kind is None:
    return source
  folder = temporary_folder(source)
  convert(kind, path, folder)
  return folder


def _located(source: str) -> str:
  """A path as it is, a repository of the Hub as its folder in the cache."""
  if pathlib.Path(source).exists():
    return source
  missing = f"{source}: no such file or folder"
  if not steps.REPOSITORY.fullmatch(source):
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
    One of `public_formats()`; None where nothing tells, or there is none.
  """
  folder, beside = _folder(path), {}
  files = folder.iterdir() if folder == pathlib.Path(path) else [folder / path]
  weights = sorted(f.name for f in files if f.suffix in _WEIGHTS)
  if not weights:
    return None
  if (metadata := _exported(path)) is not None:
    return next(iter(get_family(metadata.config.model.family).formats))
  if (folder / CONFIG_FILE).is_file():
    beside = read_json(folder / CONFIG_FILE)
  names = [str(beside.get("_class_name")), str(beside.get("model_type"))]
  if names[1] == "llama" and "auto_map" in beside:
    names = []  # computed by its own code: the release's, if so named
  for name in (*names, pathlib.Path(source).name, *weights):
    usual = name.lower().replace("_", "-")
    for kind in public_formats():
      if usual.startswith(family_of_format(kind).formats[kind]):
        return kind
  return None


def model_rules(model: Any, form: str = "") -> list[rules.Rule]:
  """The conversion table of a model section, for a form or format."""
  converter = converter_of(model)
  return converter.other_rules.get(form, converter.rules)(model)


def _open(
  kind: str,
  source: str,
  key: str | None,
  model: str | None,
  config: Config | None,
) -> tuple[str, checkpoint.Metadata, dict[str, Any]]:
  """What a source is: a name, its run, and its tensors, none read."""
  family = family_of_format(kind)
  if model is not None:
    released_model(model)  # before a large source is looked through
  tensors = tensor_files.open_tensors(source, key)
  ours = described = None
  if config is None and model is None:
    ours = _exported(source)
    described = imported(family.converter).described(
      kind, _folder(source) / CONFIG_FILE
    )
  if config is not None:
    name, config = "the given config", resolve(config)
  elif ours is not None:
    name, config = "the exported model", ours.config
  else:
    name = "the model of config.json"
    if described is None:
      name = model or _find_model(kind, tensors, source)
      described = released_model(name)
    config = released_run(described, tensors)
  if config.model.family != family.name:
    raise ValueError(
      f"--from {kind!r} makes a model of {family.name!r}; {name} is one of "
      f"{config.model.family!r}"
    )
  tensors = _without_ignored(config.model, tensors)
  return name, ours or checkpoint.Metadata(config), tensors


def _exported(source: str) -> checkpoint.Metadata | None:
  """What `export` said of a file; None where the source is none of its files.

  Raises:
    ValueError: it was another version's, or the config.json of its folder says
      something else.
  """
  beside = None
  if (path := pathlib.Path(source)).is_dir():
    beside = path / CONFIG_FILE
    files = sorted(path.glob("*.safetensors"))
    # Beside what `export` named so may lie others, such as adapters.
    files.sort(key=lambda file: not file.name.startswith("model"))
    path = next(iter(files), path)
  if not path.is_dir():
    check_regular(path)
  text = tensor_files.read_text(path).get(_ENTRY)
  if text is None:
    return None
  try:
    stored = parse_json(text)
    metadata = checkpoint.metadata_from_json(stored)
  except ValueError as error:
    raise ValueError(f"{source}: its metadata: {error}") from error
  if beside and beside.is_file() and read_json(beside) != stored:
    raise ValueError(
      f"{beside}: differs from the header of {path.name}, which says the same "
      "in a whole folder; export it again, or remove the wrong one of the two"
    )
  return metadata


def _folder(source: str) -> pathlib.Path:
  """Folder that holds a source's other files, such as the tokenizer."""
  path = pathlib.Path(source)
  return path if path.is_dir() else path.parent


def _find_model(kind: str, tensors: Tensors, source: str) -> str:
  """Finds the released model with exactly these tensor shapes."""
  family = family_of_format(kind)
  models = imported(family.released)
  names = [name for name in models if name.startswith(family.formats[kind])]
  for name in names:
    config = released_run(models[name], tensors)
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


def released_run(model: Any, tensors: Tensors) -> Config:
  """The run that a released model stands for, see `Converter.released_run`."""
  return resolve(converter_of(model).released_run(model, tensors))


def _without_ignored(model: Any, tensors: Tensors) -> dict[str, Any]:
  is_ignored = converter_of(model).is_ignored
  return {n: x for n, x in tensors.items() if not is_ignored(model, tensors, n)}


def _make(rule: rules.Rule, ours: Sequence[stream.StoredLeaf]) -> list[Any]:
  return rule.dump([leaf.read(rule.layer) for leaf in ours])


def _check_no_other_tokenizer(source: pathlib.Path, target: Any) -> None:
  """Refuses a target with files of another tokenizer than the source has."""
  for name in (*tokenizers.TOKENIZER_FILES, *tokenizers.FILES_BESIDE):
    # Its ends of texts may have come from config.json.
    origin = CONFIG_FILE if name == tokenizers.GENERATION_CONFIG else name
    files = source / name, source / origin
    if (target / name).is_file() and not any(f.is_file() for f in files):
      raise ValueError(
        f"{target / name}: of another tokenizer than that of {source}; remove "
        "it, or choose another --out"
      )


def _copy_tokenizer(source: Any, target: Any) -> str:
  """Copies a tokenizer's files; returns its SHA-256, or "" if there is none."""
  sha256 = tokenizers.copy_tokenizer_files(source, target)
  if not sha256:
    names = " or ".join(tokenizers.TOKENIZER_FILES)
    _LOG.warning("%s has no %s: no tokenizer is copied", source, names)
  return sha256


def _tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer | None:
  """Opens a tokenizer; None if there is none, or its own file is damaged.

  Raises:
    ValueError: a file beside the tokenizer's own is damaged.
  """
  try:
    return tokenizers.load_tokenizer(folder)
  except FileNotFoundError:
    return None
  except tokenizers.TokenizerFileError as error:  # the library may be missing
    _LOG.warning("%s; begin and end of text are not known", error)
    return None


def _abstract(config: Config) -> Any:
  return unbox(abstract_params(*make_model(config)))


def _count(tree: Any) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
