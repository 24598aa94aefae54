"""Where a run's metrics go: metrics.jsonl, stderr, tensorboard, W&B."""

import contextlib
import hashlib
import io
import itertools
import json
import logging
import math
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tqdm
from etils import epath
from jax.sharding import Mesh

from moh_jax.config import Config, to_dict
from moh_jax.data.decode import to_picture
from moh_jax.ops.routing import COLLAPSED, LOAD_SPLIT, load_entropy
from moh_jax.runtime.files import strict_json, write_whole
from moh_jax.runtime.steps import in_bucket
from moh_jax.training import flops
from moh_jax.training.saving import NonFiniteLossError
from moh_jax.training.step import HEAD_LOADS
from moh_jax.training.task import Task

_LOG = logging.getLogger(__name__)
_MEASURED = 3  # steps that tell how long a run takes


class Log(contextlib.AbstractContextManager):
  """What a run tells of itself; processes other than the first write nothing.

  metrics.jsonl has one object a line: {"step", "split", name: value, ...}.
  Buckets cannot append to files: what belongs there is written to a folder of
  this machine, and copied at each checkpoint.
  """

  def __init__(
    self,
    directory: epath.Path,
    config: Config,
    task: Task,
    mesh: Mesh,
    start: int,
  ):
    """Opens the files to continue after step `start`.

    Rows of later steps, left by a run that was killed, are dropped.

    Args:
      directory: working directory.
      config: of the run.
      task: what it trains on.
      mesh: the devices.
      start: steps already done.
    """
    self.directory, self._config, self._task = directory, config, task
    # Seconds of a step at the peak of all devices; None where it is not known,
    # as for CPUs. "mfu" counts active heads only.
    peak = flops.published_peak(jax.devices()[0].device_kind)
    self._at_peak = peak and flops.step_flops(config) / peak / mesh.size
    self._collapsed: set[str] = set()
    self._is_first = jax.process_index() == 0
    self._pending: tuple[int, Any] | None = None  # of the newest step
    self._viewers: list[Any] = []
    self._written: set[tuple[int, str]] = set()  # (step, split) of each row
    self._rated, self._since = start, math.nan  # from the first step on
    self._measured = start + _MEASURED
    if self._is_first:
      self._open(start)

  def _open(self, start: int) -> None:
    """Opens what only the first process writes."""
    self._folder = self.directory
    if in_bucket(self.directory):
      self._folder = epath.Path(tempfile.mkdtemp())
    kept = _rows_until(self.directory / "metrics.jsonl", start)
    self._rows = self._folder / "metrics.jsonl"
    write_whole(self._rows, "".join(kept).encode())
    rows = map(json.loads, kept)
    self._written = {(row["step"], row["split"]) for row in rows}
    if self._config.log.tensorboard:
      self._viewers.append(_Tensorboard(self._folder, start))
    if self._config.log.wandb:
      self._viewers.append(_Wandb(self.directory, self._folder, self._config))

  def __exit__(self, *_: Any) -> None:
    for viewer in self._viewers:
      viewer.close()
    self.copy()

  def has(self, step: int, split: str) -> bool:
    """Whether the row of a step is written; for the first process."""
    return (step, split) in self._written

  @contextlib.contextmanager
  def not_counted(self) -> Iterator[None]:
    """A block whose time is not that of training steps."""
    began = time.monotonic()
    yield
    self._since += time.monotonic() - began

  def step(self, step: int, metrics: Any) -> None:
    """Takes a step's arrays, and reads those of the step before.

    So the devices compute one step while this process reads another.

    Raises:
      NonFiniteLossError: the step before has a loss that is not finite.
    """
    self.flush()
    if math.isnan(self._since):
      self._since = time.monotonic()
    self._pending = step, metrics

  def flush(self) -> None:
    """Reads, checks and writes the newest step; see `step`."""
    if self._pending is None:
      return
    (step, metrics), self._pending = self._pending, None
    config = self._config
    total = config.train.steps
    is_last = step == total
    is_row, is_load = (
      every and (step % every == 0 or is_last)
      for every in (config.log.every, config.log.heads)
    )
    metrics = jax.device_get(metrics)  # at once, not one after the other
    stacks = metrics.pop(HEAD_LOADS, ())
    loads = self._by_layer(stacks) if is_row or is_load else {}
    values = {name: float(value) for name, value in metrics.items()}
    self._check(step, values)
    now = time.monotonic()
    if step == self._measured == self._rated + _MEASURED:
      left = (now - self._since) / _MEASURED * (total - step)
      if left > 3600:
        _LOG.info("%d steps take about %.1f hours", total - step, left / 3600)
    if is_row:
      seconds = (now - self._since) / (step - self._rated)
      self._rated, self._since = step, now
      rate = self._task.units_per_step / seconds
      values[f"{self._task.unit}_per_second"] = rate
      if self._at_peak is not None:
        values["mfu"] = self._at_peak / seconds
      if loads:
        values["load_entropy"] = self._least_entropy(step, loads)
      left = tqdm.tqdm.format_interval(seconds * (total - step))
      self.write(step, "train", values, f", ETA {left}")
    if loads and is_load:
      rounded = {n: np.round(np.float64(x), 3) for n, x in loads.items()}
      rows = {name: load.tolist() for name, load in rounded.items()}
      self._record(step, LOAD_SPLIT, rows)

  def _check(self, step: int, values: Mapping[str, float]) -> None:
    """Refuses what is not finite, but for steps that the optimizer skips."""
    if 0 < values.get("skipped", 0) <= self._config.optim.skip_nonfinite:
      return
    for name in ("loss", "grad_norm"):
      if not math.isfinite(values[name]):
        raise NonFiniteLossError(f"{name}={values[name]} at step {step}")

  def write(
    self, step: int, split: str, values: Mapping[str, float], end: str = ""
  ) -> None:
    """Records scalars of one step, and tells them on stderr.

    Args:
      step: optimizer steps done.
      split: "train" or "val".
      values: name -> number.
      end: of the line on stderr.
    """
    # A mean of nothing (no example in some group) has no value to record.
    values = {n: v for n, v in values.items() if math.isfinite(v)}
    if not values or not self._record(step, split, values):
      return
    named = {f"{split}/{name}": value for name, value in values.items()}
    for viewer in self._viewers:
      viewer.write(step, named)
    unit = f"{self._task.unit}_per_second"
    shown = "loss", *self._task.shown, "balance_loss", "activated_share", unit
    line = ", ".join(_text(n, values[n]) for n in shown if n in values)
    steps = self._config.train.steps
    print(f"step {step}/{steps} {split}: {line}{end}", file=sys.stderr)

  def _record(self, step: int, split: str, values: Mapping[str, Any]) -> bool:
    """Writes a row, unless a run that is started again has it already."""
    if not self._is_first or self.has(step, split):
      return False
    self._written.add((step, split))
    row = {"step": step, "split": split, **values}
    with self._rows.open("a") as stream:
      stream.write(f"{strict_json(row)}\n")
    return True

  def picture(self, step: int, name: str, picture: np.ndarray) -> None:
    """Writes a picture to WORKDIR/NAME/STEP.png, tensorboard and W&B.

    Args:
      step: optimizer steps done.
      name: directory, and name in tensorboard and W&B.
      picture: [rows, columns, 1 or 3] uint8.
    """
    if not self._is_first:
      return
    file = self.directory / name / f"{step:08d}.png"
    stream = io.BytesIO()
    to_picture(picture).save(stream, "png")
    write_whole(file, stream.getvalue())
    for viewer in self._viewers:
      viewer.show(step, name, picture)

  def copy(self) -> None:
    """Copies rows and events to the bucket of the working directory, if any."""
    if not self._is_first or self._folder == self.directory:
      return
    for file in filter(os.path.isfile, pathlib.Path(self._folder).rglob("*")):
      copy = self.directory / file.relative_to(self._folder)
      copy.parent.mkdir(parents=True, exist_ok=True)
      copy.write_bytes(file.read_bytes())

  def _by_layer(self, stacks: Any) -> dict[str, np.ndarray]:
    """Loads [R] of the routed heads of every layer that routes, by its name.

    Heads are in the order of their numbers, also where `model.head_order`
    shares others than the first.

    Args:
      stacks: for each stack of layers [layers, H], see `step.HEAD_LOADS`.
    """
    model = self._config.model
    orders = (x for g in model.layer_groups() for x in g.order_of_each)
    budgets, loads = model.layer_budgets().items(), itertools.chain(*stacks)
    return {
      name: np.asarray(load)[sorted(order[budget.shared :])]
      for (name, budget), order, load in zip(budgets, orders, loads)
      if budget.top_k
    }

  def _least_entropy(self, step: int, loads: Mapping[str, np.ndarray]) -> float:
    """The smallest entropy of a layer's load; tells of collapses and ends."""
    entropies = {n: float(load_entropy(load)) for n, load in loads.items()}
    # A collapse ends above twice the limit: one that wavers is told once.
    limits = {name: 2 * COLLAPSED for name in self._collapsed}
    collapsed = {
      name for name, x in entropies.items() if x < limits.get(name, COLLAPSED)
    }
    weight = self._config.train.balance_weight
    for name in sorted(collapsed ^ self._collapsed) * self._is_first:
      where = f"step {step}: the router of layer {name} has"
      entropy = f"(entropy of the load {entropies[name]:.3f})"
      if name in collapsed:
        _LOG.warning(
          f"{where} collapsed: nearly all tokens select the same heads "
          f"{entropy}; if it stays so, raise train.balance_weight={weight:g} "
          "several times"
        )
      else:
        _LOG.warning(f"{where} recovered {entropy}")
    self._collapsed = collapsed
    return min(entropies.values())


def _rows_until(file: epath.Path, step: int) -> list[str]:
  """The whole lines of metrics.jsonl up to a step."""
  lines = file.read_text().splitlines(keepends=True) if file.exists() else []
  whole = [line for line in lines if line.endswith("}\n")]
  return [line for line in whole if json.loads(line)["step"] <= step]


class _Tensorboard:
  """Event files in the folder "tensorboard"."""

  def __init__(self, folder: epath.Path, start: int):
    import tensorboardX  # an import of a second, not needed by every user

    self._writer = tensorboardX.SummaryWriter(
      str(folder / "tensorboard"), purge_step=start + 1
    )
    self.close = self._writer.close

  def write(self, step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
      self._writer.add_scalar(name, value, step)

  def show(self, step: int, name: str, picture: np.ndarray) -> None:
    self._writer.add_image(name, picture, step, dataformats="HWC")


class _Wandb:
  """The run of a workdir in a W&B project; a resumed run goes on with it.

  WANDB_MODE=offline keeps it in WORKDIR/wandb (`wandb sync` sends it).
  """

  def __init__(self, directory: epath.Path, folder: epath.Path, config: Config):
    import wandb

    name = os.fspath(directory)
    self._image = wandb.Image
    self._run = wandb.init(
      project=config.log.wandb,
      id=hashlib.sha256(name.encode()).hexdigest()[:16],
      name=directory.name,
      dir=os.fspath(folder),
      config=to_dict(config),
      resume="allow",
    )
    self._run.define_metric("*", step_metric="step")
    self.close = self._run.finish

  def write(self, step: int, values: Mapping[str, float]) -> None:
    self._run.log({"step": step, **values})

  def show(self, step: int, name: str, picture: np.ndarray) -> None:
    self._run.log({"step": step, name: self._image(picture)})


def _text(name: str, value: float) -> str:
  """A metric as people read it, such as "loss 0.5124" or "accuracy 50.0%"."""
  if name.endswith("_per_second"):
    return f"{value:,.0f} {name.removesuffix('_per_second')}/s"
  if name.endswith(("accuracy", "share")):
    number = f"{value:.1%}"
  else:
    number = f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
  return f"{name.replace('_', ' ')} {number}"
