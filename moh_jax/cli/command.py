"""Options of commands, derived from dataclasses; importable without JAX.

A command NAME is the module `cli/NAME.py`, listed in `main.GROUPS`, which has a
dataclass and a function:

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Options(command.Checkpoint, command.Output):
    '''Name what image files show. (`Attributes:` describe the fields.)'''

    images: tuple[command.InPath, ...] = command.option("positional")
    top: Count = 5

  def run(options: Options) -> int:
    '''Prints the classes of each image, and returns the exit status.'''
    from moh_jax.data import decode  # what needs JAX is imported here
    ...
    options.give(values, lines)
    return 0

The docstring is the help, the name of a field its flag, and its type what is
allowed: a range, a `Literal`, a tuple ("1,2" on the command line) or a path.
`Checkpoint`, `RunConfig`, `Distributed` and `Output` are options that commands
share, with what they do. A command of several kinds has `KINDS` in place of the
two: by name, pairs of a dataclass and a function.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

from moh_jax.cli.flags import PREFIX, flag
from moh_jax.config import Config, MeshConfig, base, check_command
from moh_jax.config.parse import changed
from moh_jax.data.files import list_files, read_texts
from moh_jax.runtime import files, processes, steps
from moh_jax.runtime.files import strict_json

if TYPE_CHECKING:
  from moh_jax.inference.restore import Restored
  from moh_jax.runtime.checkpoint import Metadata

# Options that the help shows last.
SHARED = ("distributed", "json", "traceback")
# Changes of a stored run for the commands that serve its model: it has the
# devices that are here, all held-out examples, and averaged parameters.
_SERVED = (
  *(f"mesh.{k}={v}" for k, v in dataclasses.asdict(MeshConfig()).items()),
  *("eval.examples=0", "eval.use_ema=true"),
)


class Path(NamedTuple):
  """A type's mark of a path.

  Attributes:
    what: "" is any, which its reader checks; "in" exists; "out", "file" and
      "folder" are local and can be written.
  """

  what: str = ""

  METAVAR = "PATH"

  def refusal(self, path: str) -> str:
    """What a path must be, or "" where it is allowed.

    Raises:
      OSError: it cannot be written.
    """
    if not path:  # to most functions the current folder
      return "the name of a file or folder"
    if self.what == "in":
      is_there = "://" in path or os.path.exists(path)
      return "" if is_there else "a file or folder that is there"
    if not self.what or path == "-":
      return ""
    if "://" in path:
      return "local"
    if os.path.isdir(path) and self.what == "file":
      return "a file, not a folder"
    if os.path.isfile(path) and self.what == "folder":
      return "a folder, not a file"
    files.check_writable(path)
    return ""


Place = Annotated[str, Path()]
InPath = Annotated[str, Path("in")]
OutPath = Annotated[str, Path("out")]
OutFile = Annotated[str, Path("file")]
OutFolder = Annotated[str, Path("folder")]


def option(how: str = "", metavar: str = "", **field: Any) -> Any:
  """A field that is given, or shown in the help, in another way than others.

  Args:
    how: "positional" (without a flag), "listed" (several values after the
      flag), "repeated" (the flag several times), "hidden" (no option), or ""
      ("--flag value").
    metavar: stands for the value in the help; "" is by type.
    **field: of `dataclasses.field`, such as a default.
  """
  return dataclasses.field(metadata={"how": how, "metavar": metavar}, **field)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseOptions(base.Section):
  """Options of every command.

  Attributes:
    changes: keys of the config that are changed, as "optim.lr=3e-4".
    traceback: show the traceback of an error.
  """

  changes: tuple[str, ...] = option("hidden", default=())
  traceback: bool = False

  # Whether the command keeps the programs that it compiles, see
  # `runtime.compilation_cache`.
  KEEPS_PROGRAMS = False

  def __post_init__(self):
    how = {x.name: x.metadata.get("how") for x in dataclasses.fields(self)}
    for name, hint in base.hints(type(self)).items():
      said = name.upper() if how[name] == "positional" else flag(name)
      value = base.converted(said, getattr(self, name), hint)
      object.__setattr__(self, name, value)
    self.check()

  def check(self) -> None:
    """Refuses changes of keys where no config is read."""
    sources = (getattr(self, name, None) for name in ("config", "checkpoint"))
    if self.changes and all(source is None for source in sources):
      raise ValueError(f"{PREFIX}{self.changes[0]} needs --config FILE[:ARG]")

  def need(self, name: str, fits: Any, needed: str) -> None:
    """Refuses an option that is not its default where it has no effect."""
    if not fits and getattr(self, name) != getattr(type(self), name):
      self.fail(name, needed)

  def fail(self, name: str, allowed: str) -> NoReturn:
    """Raises the ValueError of an option: its flag, value and what may be."""
    raise ValueError(f"{flag(name)}={getattr(self, name)!r} {allowed}")

  def prepare(self) -> None:
    """Reads what can be read before JAX is imported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(BaseOptions):
  """Options of commands that tell results.

  Attributes:
    json: write the results as JSON to this file; '-' prints one line to stdout
      in place of the text.
  """

  json: OutFile | None = None

  def give(self, values: Any, lines: Iterable[str] = ()) -> None:
    """Shows results, in the first process of a run.

    Args:
      values: for --json: anything JSON can hold; numbers that it cannot, such
        as NaN, become null.
      lines: the same for people, left out with --json=-.
    """
    if not self.is_first():
      return
    if self.json == "-":
      print(strict_json(values), flush=True)
      return
    for line in lines:
      print(line)
    if self.json:
      content = f"{strict_json(values, indent=2)}\n".encode()
      files.write_whole(pathlib.Path(self.json), content)

  def is_first(self) -> bool:
    """Whether this process is the first of its run, which writes results."""
    if not getattr(self, "distributed", False):
      return True
    import jax

    return jax.process_index() == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distributed(BaseOptions):
  """Options of commands that run as several processes.

  Attributes:
    distributed: join the other processes of the run; the first one prints. JAX
      finds them on TPU pods, Slurm, Open MPI and Kubernetes; elsewhere set
      JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
  """

  distributed: bool = False

  def join(self) -> None:
    """Connects this process to the others of its run if --distributed asks.

    JAX allows it only before its first use.

    Raises:
      ValueError: the cluster is none that JAX recognizes, and the environment
        does not describe it; the first process cannot be reached; or the
        processes differ in their versions, options or checkpoints.
    """
    if self.distributed:
      processes.join()
      processes.agree(self.compared())

  def compared(self) -> dict[str, Any]:
    """The options in which processes must not differ, and the checkpoint.

    Training compares its config later, complete with what its data tell.
    """
    unlike = {*SHARED, *(("config", "changes") * hasattr(self, "config"))}
    every = dataclasses.asdict(self).items()
    values: dict[str, Any] = {
      "options": {k: v for k, v in every if k not in unlike}
    }
    if isinstance(self, Stored) and self.step_number is None:
      values["newest checkpoint"] = steps.list_steps(self.checkpoint)[-1:]
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(BaseOptions):
  """Options of commands that read a config file.

  Attributes:
    config: config file, as FILE or FILE:ARG; --config.KEY=VALUE changes a key
      of it, and with --help its sections are listed.
  """

  config: Place

  @functools.cached_property
  def loaded(self) -> Config:
    """The config of --config with its changes."""
    return steps.load_config(self.config, self.changes)

  def prepare(self) -> None:
    """Loads the config, too."""
    if self.config is not None:
      _ = self.loaded
    super().prepare()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workdir(RunConfig):
  """Options of commands that train.

  Attributes:
    workdir: directory of checkpoints and metrics, local or a bucket; run again
      with the same arguments, the command resumes from its last checkpoint.
  """

  workdir: Place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored(BaseOptions):
  """Options of commands that read a checkpoint.

  Attributes:
    checkpoint: workdir of `train` or output of `convert`.
    step: which checkpoint: a number, or newest.
  """

  checkpoint: Place
  step: str = "newest"

  CHANGES = ()  # of the stored config, before those of the command line

  def check(self) -> None:
    """The step is a number or "newest"."""
    super().check()
    if self.step != "newest" and not self.step.isdecimal():
      self.fail("step", "must be a number or newest")

  @property
  def step_number(self) -> int | None:
    """The number of --step; None is the newest."""
    return None if self.step == "newest" else int(self.step)

  def prepare(self) -> None:
    """Checks that there is such a checkpoint, too."""
    if self.checkpoint is not None and not steps.in_bucket(self.checkpoint):
      steps.find_step(self.checkpoint, self.step_number)
    super().prepare()

  def stored(self, command: str | None = None) -> tuple[Metadata, int]:
    """Metadata and step of --checkpoint, read before its parameters.

    Args:
      command: its name, if it works with some families only.

    Returns:
      The metadata, whose config has the changes of the command line, and the
      step.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: it is damaged, a change does not fit it, or the command does
        not work with its family.
    """
    from moh_jax.runtime import checkpoint

    metadata, step = checkpoint.read_metadata(self.checkpoint, self.step_number)
    if command is not None:
      check_command(metadata.config.model, command, self.checkpoint)
    config = changed(metadata.config, (*self.CHANGES, *self.changes))
    return dataclasses.replace(metadata, config=config), step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(Stored):
  """Options of commands that serve a model.

  Keys of its config can be changed: --config.model.dtype=bfloat16,
  --config.mesh.tensor=8 for a model too large for one device,
  --config.eval.use_ema=false for the raw parameters.

  Attributes:
    top_k: routed heads per token, one number for each layer (ViT: stage) or one
      for all, instead of the trained ones.
  """

  top_k: tuple[int, ...] | None = None

  KEEPS_PROGRAMS = True
  CHANGES = _SERVED

  def restore(self, **options: Any) -> Restored:
    """Restores the model with the changes of the command line.

    Args:
      **options: of `moh_jax.restore`, instead of the parsed ones or beside
        them.
    """
    from moh_jax.inference.restore import restore

    metadata, step = self.stored()
    given = {
      "step": step,
      "use_ema": metadata.config.eval.use_ema,
      "changes": (*self.CHANGES, *self.changes),
      "top_k": self.top_k,
    }
    return restore(self.checkpoint, **(given | options))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts(BaseOptions):
  """Options of commands that read files of text.

  Attributes:
    data: text files, addresses (hf://datasets/...) or quoted patterns with *, ?
      and **: .jsonl, .ndjson and .json hold one JSON object a line, .parquet
      and .arrow a table, any other file is one document; all but tables also
      .gz or .zst.
    field: field of JSON objects and tables that is the text.
  """

  data: tuple[Place, ...] = option("listed")
  field: str = "text"

  def texts(self, skipped: list[str] | None = None) -> Iterator[str]:
    """The documents of the files, one after another.

    Args:
      skipped: gets what holds no text, see `read_texts`.

    Raises:
      FileNotFoundError: there is no such file; before any is read.
    """
    return read_texts(list_files(self.data), self.field, skipped)


def table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
  """Aligns rows under a header, as text."""
  cells = [[str(value) for value in row] for row in (header, *rows)]
  widths = [max(map(len, column)) for column in zip(*cells)]
  lines = (
    "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip()
    for row in cells
  )
  return "\n".join(lines)


def cell(value: Any) -> str:
  """A value as text: floats have four places."""
  return f"{value:.4f}" if isinstance(value, float) else str(value)


def metric_lines(metrics: Mapping[str, Any]) -> list[str]:
  """A line for each metric that there is."""
  there = {name: x for name, x in metrics.items() if x is not None}
  return [f"{name}: {cell(value)}" for name, value in there.items()]
