"""Times the training step of a released model, with a batch that fills a card.

  python -m benchmarks.step --model moh-dit-xl2-90 --batch 256 --dtype bfloat16

The batch is for a card of 80 GB: on a smaller one it begins with less, and is
halved where the step does not fit.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.common import finish, make_parser
from moh_jax.cli.bench import bench_run
from moh_jax.config import Config, apply_overrides, released_model
from moh_jax.config.base import DTYPES
from moh_jax.data.infer import resolve
from moh_jax.runtime import compilation_cache
from moh_jax.runtime.mesh import make_mesh
from moh_jax.training.bench import step_seconds
from moh_jax.training.flops import published_peak, step_flops
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder
from moh_jax.training.variants import make_variant

_CARD_BYTES = 80e9  # that the batch is for


def main(argv: Sequence[str] | None = None) -> int:
  """Prints a line."""
  parser = make_parser(__doc__, rounds=10)
  parser.add_argument("--model", required=True, help="released name")
  parser.add_argument(
    "--variant", default="config", help="of `compare`, such as mha or moh75"
  )
  parser.add_argument("--dtype", choices=DTYPES, default="float32")
  parser.add_argument("--batch", type=int, default=8, help="examples, on 80 GB")
  parser.add_argument("--length", type=int, help="tokens of a sequence")
  args = parser.parse_args(argv)
  model = dataclasses.replace(released_model(args.model), dtype=args.dtype)
  if args.length:
    model = dataclasses.replace(model, max_length=args.length)
  batch = args.batch
  stats = jax.devices()[0].memory_stats() or {}  # of a CPU there are none
  if memory := stats.get("bytes_limit"):
    fitting = max(1, batch * memory / _CARD_BYTES)
    batch = min(batch, 2 ** math.floor(math.log2(fitting)))
  compilation_cache.enable()  # the step is compiled twice
  row = None
  while row is None:
    run = make_variant(resolve(bench_run(model, batch)), args.variant)
    if args.length:
      run = apply_overrides(run, "data", sequence_length=args.length)
    try:
      row = measure(run, args.rounds)
    except jax.errors.JaxRuntimeError as error:
      if batch == 1 or "RESOURCE_EXHAUSTED" not in str(error):
        raise
      batch //= 2
  names = "model", "variant", "length"
  row = {**{name: getattr(args, name) for name in names}, **row}
  finish(args, [row], settings=vars(args))
  return 0


def measure(run: Config, rounds: int) -> dict[str, Any]:
  """Measures the training step of a run on random data.

  Raises:
    JaxRuntimeError: of the compiler or the device, which may lack memory.
  """
  mesh = make_mesh(run.mesh, jax.devices()[:1])
  objective = task_builder(run).make_objective(run)
  program = make_program(run, objective, mesh)
  start = time.perf_counter()
  compiled = program.step.lower(program.state, program.batch).compile()
  compile_seconds = time.perf_counter() - start
  seconds = step_seconds({"": run}, rounds)[""].median
  flops, batch = step_flops(run), run.data.batch_size
  published = published_peak(jax.devices()[0].device_kind)
  return {
    "batch": batch,
    "step_ms": seconds * 1e3,
    "units_per_second": batch
    * getattr(run.data, "sequence_length", 1)
    / seconds,
    "flops": flops,
    "mfu": flops / seconds / published if published else None,
    "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    "compile_seconds": compile_seconds,
  }


if __name__ == "__main__":
  sys.exit(main())
