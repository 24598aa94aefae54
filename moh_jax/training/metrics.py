"""Where a run's metrics go: metrics.jsonl, stderr, tensorboard, W&B."""

import hashlib
import io
import itertools
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tqdm
from etils import epath

from moh_jax.config import Config, LogConfig
from moh_jax.data.decode import to_picture
from moh_jax.ops.routing import LOAD_SPLIT, collapse_lines, load_entropy
from moh_jax.runtime.files import read_bytes, write_whole
from moh_jax.runtime.json_files import strict_json
from moh_jax.runtime.steps import in_bucket

_LOG = logging.getLogger(__name__)
_MOST_BYTES = 1 << 30  # of metrics.jsonl
_BUCKET_SECONDS = 30.0  # at least between two writes of a file in a bucket


class MetricsWriter:
  """Writes scalars of a run; processes other than the first write nothing.

  metrics.jsonl has one object a line: {"step", "split", name: value, ...}.
  """

  def __init__(
    self,
    workdir: epath.Path,
    config: LogConfig,
    *,
    start: int,
    steps: int,
    shown: Sequence[str] = (),
    run: Mapping[str, Any] | None = None,
  ):
    """Opens the files for continuing at `start`.

    Args:
      workdir: the run's directory.
      config: what to write.
      start: steps already done.
      steps: length of the run.
      shown: metrics that the progress shows, in this order; () shows all.
      run: config of the run, for loggers that show it.
    """
    self._workdir = workdir
    self._active = jax.process_index() == 0
    if not self._active:
      return
    self._rows = _Rows(workdir / "metrics.jsonl", start)
    self._viewers: list[_Tensorboard | _Wandb] = []
    if config.tensorboard:
      self._viewers.append(_Tensorboard(workdir, start))
    if config.wandb:
      self._viewers.append(_Wandb(config.wandb, workdir, run or {}))
    self._lines = _Lines(steps, shown) if config.progress else None

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records scalars of one step.

    Args:
      step: optimizer steps done.
      split: "train" or "val".
      values: name -> number.
    """
    # A mean of nothing (no example in some group) has no value to record.
    values = {n: v for n, v in values.items() if math.isfinite(v)}
    if not self._active or not values or self.has(step, split):
      return  # the last: a finished run that was started again
    for sink in (self._rows, *self._viewers, self._lines):
      if sink is not None:
        sink.write(step, split, values)

  def write_image(self, step: int, name: str, picture: np.ndarray) -> None:
    """Writes a picture to WORKDIR/NAME/STEP.png, tensorboard and W&B.

    Args:
      step: optimizer steps done.
      name: directory, and name in tensorboard and W&B.
      picture: [rows, columns, 1 or 3] uint8.
    """
    if not self._active:
      return
    file = self.image_path(step, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    stream = io.BytesIO()
    to_picture(picture).save(stream, "png")
    write_whole(file, stream.getvalue())
    for viewer in self._viewers:
      viewer.show(step, name, picture)

  def write_loads(self, step: int, loads: Mapping[str, np.ndarray]) -> None:
    """Records the load of heads, a row of the split "heads".

    Args:
      step: optimizer steps done.
      loads: for each layer [R] share of tokens that select each routed head.
    """
    if not self._active or self.has(step, LOAD_SPLIT):
      return
    rows = {
      # Few digits: runs in a bucket write all rows again and again.
      name: [round(float(share), 3) for share in load]
      for name, load in loads.items()
    }
    self._rows.write(step, LOAD_SPLIT, rows)

  def image_path(self, step: int, name: str) -> epath.Path:
    """Where `write_image` puts a picture."""
    return self._workdir / name / f"{step:08d}.png"

  def drop_images(self, name: str, drops: Callable[[int], bool]) -> None:
    """Removes pictures that will be written again.

    Args:
      name: as for `write_image`.
      drops: (step) -> whether to remove its picture.
    """
    if not self._active:
      return
    for path in (self._workdir / name).glob("*.png"):
      if re.fullmatch(r"\d{8}", path.stem) and drops(int(path.stem)):
        path.unlink()

  def has(self, step: int, split: str) -> bool:
    """Whether the row of a step is written; for the first process."""
    return (step, split) in self._rows.written

  def flush(self) -> None:
    """Writes the rows that a bucket lacks; before a checkpoint is saved."""
    if self._active:
      self._rows.flush()

  def close(self) -> None:
    """Flushes and closes the files."""
    if self._active:
      self._rows.flush()
      for viewer in self._viewers:
        viewer.close()


class _Rows:
  """The file metrics.jsonl.

  Buckets cannot append: there the whole file is written again, but not for
  every row. Rows since the last checkpoint will come again after a kill.

  Attributes:
    written: pairs (step, split) of its rows.
  """

  def __init__(self, path: epath.Path, start: int):
    """Opens the file for continuing at `start`.

    Rows of later steps, left by a run that was killed after its last
    checkpoint, are dropped: those steps will be taken again.
    """
    self._path, self.written = path, set[tuple[int, str]]()
    content = read_bytes(path, _MOST_BYTES) if path.exists() else b""
    # Of the part to keep, without what a killed run left of a row. Rows are in
    # the order of their steps; damaged lines between them stay.
    length = offset = 0
    for line in content.splitlines(keepends=True):
      offset += len(line)
      try:
        row = json.loads(line)
        if row["step"] > start:
          break
        self.written.add((row["step"], row.get("split")))
      except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        continue
      length = offset
    kept = content[:length]
    self._whole = kept if in_bucket(path) else None
    self._unwritten, self._written_at = False, time.monotonic()
    if self._whole is None:
      with path.open("ab") as stream:
        stream.truncate(length)
    if kept and not kept.endswith(b"\n"):
      self._append(b"\n")

  def write(self, step: int, split: str, values: Mapping[str, Any]) -> None:
    self.written.add((step, split))
    row = {"step": step, "split": split, **values}
    self._append(f"{strict_json(row)}\n".encode())

  def _append(self, line: bytes) -> None:
    if self._whole is None:
      with self._path.open("ab") as stream:
        stream.write(line)
    else:
      self._whole += line
      self._unwritten = True
      if time.monotonic() - self._written_at > _BUCKET_SECONDS:
        self.flush()

  def flush(self) -> None:
    if self._unwritten:
      write_whole(self._path, self._whole)
      self._unwritten, self._written_at = False, time.monotonic()


class _Lines:
  """A line on stderr for each row."""

  def __init__(self, steps: int, shown: Sequence[str]):
    self._steps, self._shown = steps, shown
    self._first: tuple[int, float] | None = None  # step of a row, when

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    names = [n for n in self._shown or values if n in values]
    line = ", ".join(_text(name, values[name]) for name in names)
    if split == "train":
      now = time.monotonic()
      first, since = self._first = self._first or (step, now)
      each = values.get("step_seconds_p50")  # of the first row's steps
      if step > first:
        each = (now - since) / (step - first)
      if each is not None:
        left = each * (self._steps - step)
        line += f", ETA {tqdm.tqdm.format_interval(left)}"
    print(
      f"step {step}/{self._steps} {split}: {line}", file=sys.stderr, flush=True
    )


class _Tensorboard:
  """Event files in WORKDIR/tensorboard."""

  def __init__(self, workdir: epath.Path, start: int):
    import tensorboardX  # an import of a second, not needed by every user
    from tensorboardX import record_writer

    scheme, separator, _ = str(workdir).partition("://")
    if separator:
      record_writer.register_writer_factory(scheme, _EventFile())
    self._writer = tensorboardX.SummaryWriter(
      str(workdir / "tensorboard"), purge_step=start + 1
    )

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    for name, value in values.items():
      self._writer.add_scalar(f"{split}/{name}", value, step)

  def show(self, step: int, name: str, picture: np.ndarray) -> None:
    self._writer.add_image(name, picture, step, dataformats="HWC")

  def close(self) -> None:
    self._writer.close()


class _EventFile:
  """An event file that is kept in memory and written whole at each flush.

  Objects of a bucket cannot be appended to; tensorboardX flushes every two
  minutes, and at the end. Its own writer for gs:// wants a package that the
  extra `gcs` does not install; this one goes through the library of epath.
  """

  def __init__(self, path: str = ""):
    self._path, self._content, self._written = epath.Path(path), bytearray(), 0

  def open(self, path: str) -> "_EventFile":
    return _EventFile(path)

  def directory_check(self, path: str) -> None:
    """Buckets have no directories."""

  def write(self, content: bytes) -> None:
    self._content += content

  def flush(self) -> None:
    if len(self._content) > self._written:
      self._path.write_bytes(bytes(self._content))
      self._written = len(self._content)

  close = flush


class _Wandb:
  """The run of a workdir in a W&B project; a resumed run goes on with it.

  WANDB_MODE=offline keeps it in WORKDIR/wandb (`wandb sync` sends it).
  """

  def __init__(self, project: str, workdir: epath.Path, run: Mapping[str, Any]):
    import wandb

    name = os.fspath(workdir)
    self._image = wandb.Image
    self._run = wandb.init(
      project=project,
      id=hashlib.sha256(name.encode()).hexdigest()[:16],
      name=workdir.name,
      dir=None if in_bucket(name) else name,
      config=dict(run),
      resume="allow",
    )
    self._run.define_metric("*", step_metric="step")

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    named = {f"{split}/{name}": value for name, value in values.items()}
    self._run.log({"step": step, **named})

  def show(self, step: int, name: str, picture: np.ndarray) -> None:
    self._run.log({"step": step, name: self._image(picture)})

  def close(self) -> None:
    self._run.finish()


class HeadWatch:
  """Watches whether the tokens of a run use all routed heads."""

  def __init__(self, config: Config):
    """Reads the head budgets of the layers.

    Args:
      config: of the run.
    """
    model = config.model
    budgets = model.layer_budgets()
    orders = (x for g in model.layer_groups() for x in g.order_of_each)
    # Numbers of the routed heads, [] where no token chooses.
    self._routed = {
      name: sorted(order[budget.shared :]) if budget.top_k else []
      for (name, budget), order in zip(budgets.items(), orders, strict=True)
    }
    self._every, self._steps = config.log.heads, config.train.steps
    self._bound = config.log.collapse_entropy
    self._collapsed: set[str] = set()

  def due(self, step: int) -> bool:
    """Whether the load of every head is recorded after a step."""
    every = self._every
    return bool(every) and (step % every == 0 or step == self._steps)

  def by_layer(self, stacks: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Loads [R] of the routed heads of every layer that routes, by its name.

    Heads are in the order of their numbers, also where `model.head_order`
    shares others than the first.

    Args:
      stacks: for each stack of layers [layers, H], see `step.HeadLoads`.
    """
    layers = itertools.chain.from_iterable(stacks)
    return {
      name: np.asarray(load)[heads]
      for (name, heads), load in zip(self._routed.items(), layers)
      if heads
    }

  def metrics(
    self, step: int, stacks: Sequence[np.ndarray]
  ) -> dict[str, float]:
    """The smallest entropy of a layer's load, and how many have collapsed.

    A router that has just collapsed gets a line in the log.

    Args:
      step: optimizer steps done.
      stacks: as for `by_layer`.
    """
    entropies = {
      name: float(load_entropy(load))
      for name, load in self.by_layer(stacks).items()
    }
    collapsed = {n: e for n, e in entropies.items() if e < self._bound}
    new = {n: e for n, e in collapsed.items() if n not in self._collapsed}
    if jax.process_index() == 0:  # all processes know the same loads
      for line in collapse_lines(new, self._bound):
        _LOG.warning("step %d: %s", step, line)
    self._collapsed = set(collapsed)
    return {
      "load_entropy": min(entropies.values()),
      "collapsed_routers": float(len(collapsed)),
    }


def _text(name: str, value: float) -> str:
  """A metric as people read it, such as "loss 0.5124" or "accuracy 50.0%"."""
  if name.endswith("_per_second"):
    return f"{value:,.0f} {name.removesuffix('_per_second')}/s"
  if name.endswith(("accuracy", "share")):
    number = f"{value:.1%}"
  else:
    number = f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
  return f"{name.replace('_', ' ')} {number}"
