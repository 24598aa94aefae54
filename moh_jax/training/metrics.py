"""Where a run's metrics go: a progress bar, metrics.jsonl, tensorboard."""

import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import jax
import numpy as np
import tqdm
from etils import epath

from moh_jax.config import LogConfig
from moh_jax.data.decode import to_picture
from moh_jax.files import write_whole
from moh_jax.json_files import strict_json
from moh_jax.ops.head_load import LOAD_SPLIT
from moh_jax.training import bucket_events
from moh_jax.training.head_watch import load_picture
from moh_jax.training.wandb_log import WandbLog

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

    Rows of later steps, left by a run that was killed after its last
    checkpoint, are dropped: those steps will be taken again.

    Args:
      workdir: the run's directory.
      config: what to write.
      start: steps already done.
      steps: length of the run.
      shown: metrics that the progress shows, in this order; () shows all.
      run: config of the run, for loggers that show it.
    """
    self._shown = shown
    self._active = jax.process_index() == 0
    self._bar = None
    self._tensorboard = self._wandb = None
    if not self._active:
      return
    self._path = workdir / "metrics.jsonl"
    kept = b""
    if self._path.exists():
      content = self._path.read_bytes()
      length, self._written = _rows_until(content, start)
      kept = content[:length]
    else:
      self._written = set()
    # Buckets cannot append: there the whole file is written again, but not for
    # every row. Rows since the last checkpoint will come again after a kill.
    self._rows = kept if "://" in str(self._path) else None
    self._unwritten, self._written_at = False, time.monotonic()
    if self._rows is None:
      with self._path.open("ab") as stream:
        stream.truncate(len(kept))
    if kept and not kept.endswith(b"\n"):
      self._append(b"\n")
    self._first_advance: tuple[int, float] | None = None  # step, when
    if config.tensorboard:
      import tensorboardX  # an import of a second, not needed by every user

      bucket_events.register(workdir)
      self._tensorboard = tensorboardX.SummaryWriter(
        str(workdir / "tensorboard"), purge_step=start + 1
      )
    if config.wandb:
      self._wandb = WandbLog(config.wandb, workdir, run or {})
    self._bar = tqdm.tqdm(
      total=steps,
      initial=start,
      unit="step",
      dynamic_ncols=True,
      disable=not (config.progress and _has_width(sys.stderr)),
    )
    self._print_rows = config.progress and self._bar.disable

  def advance(self, step: int) -> None:
    """Moves the progress bar to `step`."""
    if self._active:
      self._first_advance = self._first_advance or (step, time.monotonic())
      self._bar.update(step - self._bar.n)

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Records scalars of one step.

    Args:
      step: optimizer steps done.
      split: "train" or "val".
      values: name -> number.
    """
    if not self._active:
      return
    # A mean of nothing (no example in some group) has no value to record.
    values = {n: v for n, v in values.items() if math.isfinite(v)}
    if not values or (step, split) in self._written:
      return  # the second: a finished run that was started again
    self._written.add((step, split))
    row = {"step": step, "split": split, **values}
    self._append(f"{strict_json(row)}\n".encode())
    if self._tensorboard:
      for name, value in values.items():
        self._tensorboard.add_scalar(f"{split}/{name}", value, step)
    if self._wandb:
      self._wandb.write(step, split, values)
    summary = self._summary(values)
    if split == "train":
      self._bar.set_postfix_str(summary, refresh=False)
    if self._print_rows:
      eta = self._eta(step) if split == "train" else ""
      line = f"step {step}/{self._bar.total} {split}: {summary}{eta}"
      print(line, file=sys.stderr, flush=True)
    elif split != "train" and not self._bar.disable:
      self._bar.write(f"step {step} {split}: {summary}", sys.stderr)

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
    self._show(step, {name: picture})

  def write_loads(self, step: int, loads: Mapping[str, np.ndarray]) -> None:
    """Records the load of heads: a row of the split "heads", and pictures.

    Args:
      step: optimizer steps done.
      loads: for each layer [R] share of tokens that select each routed head.
    """
    if not self._active or self.has(step, LOAD_SPLIT):
      return
    self._written.add((step, LOAD_SPLIT))
    rows = {
      # Few digits: runs in a bucket write all rows again and again.
      name: [round(float(share), 3) for share in load]
      for name, load in loads.items()
    }
    row = {"step": step, "split": LOAD_SPLIT, **rows}
    self._append(f"{strict_json(row)}\n".encode())
    if not self._tensorboard and not self._wandb:
      return
    self._show(
      step, {f"load/{n}": load_picture(load) for n, load in loads.items()}
    )

  def _show(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
    """Sends pictures [rows, columns, 1 or 3] uint8 to tensorboard and W&B."""
    if self._tensorboard:
      for name, picture in pictures.items():
        self._tensorboard.add_image(name, picture, step, dataformats="HWC")
    if self._wandb:
      self._wandb.write_images(step, pictures)

  def image_path(self, step: int, name: str) -> epath.Path:
    """Where `write_image` puts a picture; for the first process."""
    return self._path.parent / name / f"{step:08d}.png"

  def drop_images(self, name: str, drops: Callable[[int], bool]) -> None:
    """Removes pictures that will be written again.

    Args:
      name: as for `write_image`.
      drops: (step) -> whether to remove its picture.
    """
    if not self._active:
      return
    for path in self.image_path(0, name).parent.glob("*.png"):
      if re.fullmatch(r"\d{8}", path.stem) and drops(int(path.stem)):
        path.unlink()

  def has(self, step: int, split: str) -> bool:
    """Whether the row of a step is written; for the first process."""
    return (step, split) in self._written

  def _append(self, line: bytes) -> None:
    if self._rows is None:
      with self._path.open("ab") as stream:
        stream.write(line)
    else:
      self._rows += line
      self._unwritten = True
      if time.monotonic() - self._written_at > _BUCKET_SECONDS:
        self.flush()

  def flush(self) -> None:
    """Writes the rows that a bucket lacks; before a checkpoint is saved."""
    if self._active and self._unwritten:
      write_whole(self._path, self._rows)
      self._unwritten, self._written_at = False, time.monotonic()

  def _summary(self, values: Mapping[str, float]) -> str:
    names = [n for n in self._shown or values if n in values]
    return ", ".join(_text(name, values[name]) for name in names)

  def _eta(self, step: int) -> str:
    """Remaining time, ", ETA MM:SS"; the compilation before step 1 is past."""
    first, since = self._first_advance or (step, 0.0)
    if step == first:
      return ""
    per_step = (time.monotonic() - since) / (step - first)
    left = tqdm.tqdm.format_interval(per_step * (self._bar.total - step))
    return f", ETA {left}"

  def close(self) -> None:
    """Flushes and closes the files."""
    if self._active:
      self.flush()
      self._bar.close()
      if self._tensorboard:
        self._tensorboard.close()
      if self._wandb:
        self._wandb.close()


def _has_width(stream: TextIO) -> bool:
  """Whether a progress bar can be seen: some terminals have 0 columns."""
  try:
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
  except OSError:
    return False


def _text(name: str, value: float) -> str:
  """A metric as people read it, such as "loss 0.5124" or "accuracy 50.0%"."""
  if name.endswith("_per_second"):
    return f"{value:,.0f} {name.removesuffix('_per_second')}/s"
  if name.endswith(("accuracy", "share")):
    number = f"{value:.1%}"
  else:
    number = f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
  return f"{name.replace('_', ' ')} {number}"


def _rows_until(content: bytes, step: int) -> tuple[int, set]:
  """Finds the rows of a metrics file up to a step.

  Rows are in the order of their steps. Damaged lines between rows stay.

  Returns:
    The length of the part that holds these rows, without what a killed run left
    of a row, and the pairs (step, split) of them.
  """
  length, offset, written = 0, 0, set()
  for line in content.splitlines(keepends=True):
    offset += len(line)
    try:
      row = json.loads(line)
      if row["step"] > step:
        break
      written.add((row["step"], row.get("split")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
      continue
    length = offset
  return length, written
