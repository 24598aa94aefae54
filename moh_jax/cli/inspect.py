"""`python -m moh_jax inspect`."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moh_jax import config as config_lib
from moh_jax.cli import command
from moh_jax.config import Config
from moh_jax.config.base import Count
from moh_jax.runtime.alive import alive

if TYPE_CHECKING:
  import numpy as np

_NAMES = 10  # of the classes that are listed
_SHOWN, _COLUMNS = 32, 8  # examples of a batch at most, and of a row
_OF_A_BUDGET = "num_heads", "head_dim", "shared", "routed", "top_k", "active"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(command.Stored, command.RunConfig, command.Output):
  """Describe the heads and parameters of a model, or show training examples.

  Attributes:
    checkpoint: workdir of `train` or output of `convert`.
    config: config file, as FILE or FILE:ARG; --config.KEY=VALUE changes a key
      of it, and with --help its keys are listed.
    batch: show the examples of a training step of --config: draw images, before
      mixup and CutMix, into this .png file and print their classes; of text '-'
      prints the sequences, with what is trained in [[ ]], or green on a
      terminal.
    at_step: the step of the run whose batch it is.
  """

  checkpoint: command.Place | None = None
  config: command.Place | None = None
  batch: command.OutFile | None = None
  at_step: Count = 1

  def check(self) -> None:
    """There is one thing to look at, and a way to."""
    super().check()
    if (self.checkpoint is None) == (self.config is None):
      raise ValueError("one of --checkpoint and --config must be given")
    self.need("batch", self.config, "needs --config")
    self.need("step", self.checkpoint, "needs --checkpoint")
    self.need("at_step", self.batch, "needs --batch")
    if self.batch not in (None, "-") and not self.batch.endswith(".png"):
      self.fail("batch", "must end in .png, or be - for text")


@alive("looking at the model")
def run(options: Options) -> int:
  """Prints the model's layers and sizes, or shows a batch."""
  from moh_jax.data.infer import resolve
  from moh_jax.models.registry import make_model
  from moh_jax.runtime.parameters import abstract_params

  step, names = None, ()
  if options.checkpoint:
    metadata, step = options.stored()
    config, names = metadata.config, metadata.class_names
  else:
    config = resolve(options.loaded)
  if options.batch:
    _check_shown(config, options.batch == "-")
    show = _texts if options.batch == "-" else _pictures
    lines = list(show(config, options))
    options.give(lines, lines)
    return 0
  # Parameters are those of any form; this one may be impossible here.
  anywhere = config_lib.apply_overrides(config, "model", attention_impl="auto")
  counts = _by_module(abstract_params(*make_model(anywhere)))
  report = {
    "step": step,
    "class_names": list(names),
    "config": config_lib.to_dict(config),
    "layers": layer_rows(config),
    "activated_share": config.model.activated_share,
    "parameters": sum(counts.values()),
    "parameters_by_module": counts,
  }
  options.give(report, _lines(report, config))
  return 0


def layer_rows(config: Config) -> list[dict]:
  """One row per layer."""
  rows = []
  for stage, group in enumerate(config.model.layer_groups(), start=1):
    counts = {name: getattr(group.budget, name) for name in _OF_A_BUDGET}
    for _ in range(group.depth):
      row = {"layer": len(rows), "stage": stage, "tokens": group.tokens}
      rows.append(row | counts)
  return rows


def _by_module(params: dict) -> dict[str, int]:
  """Parameters of each part of a stage."""
  from flax import traverse_util

  from moh_jax.runtime.parameters import unbox

  counts: dict[str, int] = {}
  for path, leaf in traverse_util.flatten_dict(unbox(params)).items():
    depth = 3 if "blocks" in path else 2
    name = "/".join(path[: min(depth, max(1, len(path) - 1))])
    counts[name] = counts.get(name, 0) + leaf.size
  return counts


def _lines(report: dict, config: Config) -> Iterator[str]:
  """The report for people: equal layers share a row."""
  rows = []
  equal = itertools.groupby(report["layers"], lambda row: {**row, "layer": 0})
  for values, group in equal:
    first, *others = [row["layer"] for row in group]
    span = f"{first}-{others[-1]}" if others else str(first)
    rows.append((span, 1 + len(others), *list(values.values())[1:]))
  yield command.table(rows, ("layers", "count", *list(values)[1:]))
  counts = [(n, f"{c:,}") for n, c in report["parameters_by_module"].items()]
  yield f"\n{command.table(counts, ('module', 'parameters'))}\n"
  yield f"family: {config.model.family}"
  if report["step"] is not None:
    yield f"step: {report['step']}"
  router = config.model.router
  # Other routers have gates of their own.
  form = f"{router.gate_form}, " * (router.kind == "two_stage")
  form = f" ({form}{router.structure})" * router.selects
  yield f"router: {router.kind}{form}"
  yield f"activated share: {report['activated_share']:.4f}"
  yield f"parameters: {report['parameters']:,}"
  if names := report["class_names"]:
    more = ", ..." * (len(names) > _NAMES)
    yield f"classes: {len(names)} ({', '.join(names[:_NAMES])}{more})"


def _check_shown(config: Config, as_text: bool) -> None:
  """There are pixels, or text, to show."""
  from moh_jax.data.sources import is_latent

  source, reads_text = config.data.source, config.model.READS_TEXT
  is_shown = source != "fake" if reads_text else not is_latent(config)
  if not is_shown or as_text != reads_text:
    raise ValueError(
      f"data.source={source!r} of model.family={config.model.family!r}: "
      "--batch FILE.png shows pixels, --batch - shows text"
    )


def _pictures(config: Config, options: Options) -> Iterator[str]:
  """Draws images of a training batch; yields the classes of each row."""
  import numpy as np

  from moh_jax.data.pipeline import TrainBatches, train_images
  from moh_jax.data.sources import make_source
  from moh_jax.evaluation.pictures import tiles
  from moh_jax.inference.sample import write_grid

  source = make_source(config, "train")
  rows = range(min(_SHOWN, config.data.batch_size))
  stream = TrainBatches(train_images(config, source), config.data, rows)
  stream.seek(options.at_step - 1)
  batch = next(stream)
  stream.close()
  images = np.rint(batch["image"]).astype(np.uint8)
  names = [source.class_names[label] for label in batch["label"]]
  columns = min(len(images), _COLUMNS)
  write_grid(pathlib.Path(options.batch), tiles(images, names), columns)
  for start in range(0, len(names), _COLUMNS):
    shown = names[start : start + _COLUMNS]
    yield f"row {start // _COLUMNS + 1}: {', '.join(shown)}"


def _texts(config: Config, options: Options) -> Iterator[str]:
  """Of each sequence of a training batch a line of counts, and its text."""
  import numpy as np

  from moh_jax.data.sequences import Text

  data = config.data
  marks = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
  text = Text(data, config.model.vocab_size, "train")
  stream, size = text.stream(config.train.seed), data.batch_size
  for index in range(min(_SHOWN, size)):
    sequence = stream[(options.at_step - 1) * size + index]
    segments = sequence["segments"]
    count = np.count_nonzero(segments)
    tokens = np.append(sequence["inputs"][:1], sequence["targets"][:count])
    trained = np.append(False, sequence["weights"][:count] > 0)
    yield (
      f"sequence {index + 1}: {count} tokens of {len(segments)}, "
      f"{trained.sum()} trained, {segments.max()} documents or conversations"
    )
    runs = np.split(tokens, np.flatnonzero(np.diff(trained)) + 1)
    shown = [_text_of(text.tokenizer, run) for run in runs]
    shown[1::2] = [f"{marks[0]}{part}{marks[1]}" for part in shown[1::2]]
    yield "".join(shown)


def _text_of(tokenizer: Any, ids: np.ndarray) -> str:
  """The text of ids, with special tokens where the tokenizer writes them."""
  from moh_jax.data.tokenizers import JsonTokenizer

  if isinstance(tokenizer, JsonTokenizer):
    return tokenizer.parser.decode(ids.tolist(), skip_special_tokens=False)
  return tokenizer.decode(ids)
