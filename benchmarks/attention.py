"""Times attention alone: outputs of heads from queries, keys and values.

  python -m benchmarks.attention --lengths 256 --shares 50,75

Heads are drawn at random for each token. What benchmarks of heads share is here
too. Shapes: B batch, N tokens, H query heads, K key/value heads, D head dim.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import (
  Program,
  Row,
  check_exact,
  compile_program,
  exact_products,
  failure,
  machine,
  table_cells,
  time_rows,
)
from moh_jax.cli import command, flags
from moh_jax.cli.main import report_errors
from moh_jax.config.base import Count, Dtype, Natural
from moh_jax.config.heads import HeadBudget, RouterConfig, Structure, Units
from moh_jax.config.layers import Implementation
from moh_jax.layers.attend import attend_picked
from moh_jax.ops.attention import Form, attend, choose_form
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.dense import dense_attention
from moh_jax.ops.pairs import ActiveHeads
from moh_jax.ops.routing import select_heads
from moh_jax.ops.target import target

_ROUNDING = 0.01  # heads by which a rounded percentage may miss a whole number
# Forms that can compute every head as well: the baselines of the others.
_EVERY_HEAD = ("dense", "auto", "cudnn", "kernel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptions(command.Output):
  """Time the core alone: outputs of heads from queries, keys and values.

  Attributes:
    lengths: tokens of a sequence, or slots of a cache.
    shares: percentages of heads that are active, such as 50 and 75.
    implementations: forms to compare with those that compute every head;
      without it every form that the device can run.
    heads: query heads, H.
    head_dim: head dim, D.
    kv_heads: key/value heads, K; without it one per query head.
    structure: what tokens choose among: heads, as many heads of each key/value
      group, or whole groups.
    shared: heads that are always active; without it a quarter of them.
    batch: sequences per batch, B.
    dtype: compute dtype.
    rounds: measured turns.
    modes: passes to run, of forward, forward_backward, causal and
      causal_forward_backward.
  """

  lengths: tuple[Count, ...] = (256, 512, 1024)
  shares: tuple[float, ...] = (50, 75)
  implementations: tuple[Implementation, ...] | None = None
  heads: Count = 32
  head_dim: Count = 64
  kv_heads: Count | None = None
  structure: Structure = "free"
  shared: Natural | None = None
  batch: Count = 1
  dtype: Dtype = "float32"
  rounds: Count = 7
  modes: tuple[
    Literal["forward", "forward_backward", "causal", "causal_forward_backward"],
    ...,
  ] = ("forward", "forward_backward", "causal")

  FORMS = typing.get_args(Implementation)

  def check(self) -> None:
    """Heads can be divided as the options say."""
    super().check()
    if self.heads % self.num_kv_heads:
      self.fail("kv_heads", f"must divide --heads {self.heads}")
    if self.shared is not None and self.shared > self.heads:
      self.fail("shared", f"must be in [0, {self.heads}], the heads")
    self.budgets()

  @property
  def num_kv_heads(self) -> int:
    """Number of key/value heads, K."""
    return self.heads if self.kv_heads is None else self.kv_heads

  def budgets(self) -> list[HeadBudget]:
    """Head splits, one for each of `shares`."""
    return [self._budget(share) for share in self.shares]

  def _budget(self, share: float) -> HeadBudget:
    shared = self.heads // 4 if self.shared is None else self.shared
    exact = share * self.heads / 100
    active = round(exact) if math.isfinite(exact) else 0
    if not 1 <= active <= self.heads or abs(exact - active) > _ROUNDING:
      raise ValueError(
        f"--shares {share:g} must be a whole number of the {self.heads} heads: "
        f"a multiple of {100 / self.heads:g} up to 100"
      )
    if active < shared:
      raise ValueError(
        f"--shares {share:g} is {active} of the {self.heads} heads and must be "
        f"at least the {shared} shared ones (--shared)"
      )
    budget = HeadBudget(self.heads, shared, active - shared, self.head_dim)
    self.units(budget)
    return budget

  def units(self, budget: HeadBudget) -> Units:
    """What tokens choose among."""
    router = RouterConfig(structure=self.structure)
    return Units.of(budget, router, self.num_kv_heads)


def main(argv: Sequence[str] | None = None) -> int:
  """Prints a table; 1 if a form is not exact or does not run."""
  return run_heads(__doc__, argv, HeadOptions, "attention", splits)


def run_heads(
  doc: str,
  argv: Sequence[str] | None,
  cls: type[HeadOptions],
  op: str,
  *how: Any,
) -> int:
  """Runs a benchmark of heads; 1 if a form is not exact or does not run.

  Args:
    doc: of the benchmark.
    argv: its arguments.
    cls: its options.
    op: what is computed.
    *how: the other arguments of `compare_forms`.
  """
  argv = sys.argv[1:] if argv is None else argv
  parser = flags.make_parser(f"python -m benchmarks.{op}", cls)
  parser.description = doc.splitlines()[0]
  given = flags.parse(parser, cls, argv)

  def call() -> int:
    rows = compare_forms(given, op, *how)
    stored = [dataclasses.asdict(row) for row in rows]
    settings = dataclasses.asdict(given)
    result = {"machine": machine(), "settings": settings, "rows": stored}
    given.give(result, [command.table(*table_cells(rows))])
    for row in rows:
      if row.fault:
        print(f"error: {row.name}: {row.fault}", file=sys.stderr)
    return 1 if any(row.fault for row in rows) else 0

  return report_errors(call, given.traceback)


@dataclasses.dataclass(frozen=True)
class Split:
  """What the forms of attention with one head split have in common.

  Attributes:
    budget: the head split; None is multi-head attention, where every head is
      computed.
    evaluation: maps the name of a form to a function of `args` that returns
      (outputs, gradients).
    args: arrays that every form evaluates.
    expected: returns what all forms should.
    mask: [B, N, H] bool, whose outputs are defined; None is all.
    picks: whether attention gets the queries of active heads alone.
  """

  budget: HeadBudget | None
  evaluation: Callable[[str], Callable]
  args: Sequence[Any]
  expected: Callable[[], Any]
  mask: jax.Array | None = None
  picks: bool = False

  @property
  def share(self) -> float:
    """Active heads over all heads."""
    return 1.0 if self.budget is None else self.budget.share

  def error(self, found: tuple, dtype: str) -> tuple[float, str | None]:
    """What `check_exact` says of a form's (outputs, gradients)."""
    both = [found, self.expected()]
    if self.mask is not None:
      active = self.mask[..., None]
      both = [(jnp.where(active, out, 0), grads) for out, grads in both]
    return check_exact(*both, dtype)


# Maps `HeadOptions`, mode, length, share of active heads and the name of a form
# to the form that the library chooses; ValueError if the name is impossible.
Choose = Callable[[Any, str, int, float, str], Form]


def compare_forms(
  options: Any,
  op: str,
  splits: Callable[[Any, str, int], Iterable[Split]],
  choose: Choose | None = None,
) -> list[Row]:
  """Compares forms of attention with multi-head attention.

  A form that fails has a fault in place of a time. Those that are impossible
  are left out, unless they are asked for.

  Args:
    options: `HeadOptions` of the benchmark.
    op: what is computed, see `Row`.
    splits: makes what is compared for options, a mode and a length, multi-head
      attention first.
    choose: chooses forms; without it as `attention` does.

  Raises:
    ValueError: a form that is asked for is impossible.
  """
  choose = functools.partial(_choose, choose or chosen_form, options)
  asked, shares = options.implementations, [b.share for b in options.budgets()]
  cases = list(itertools.product(options.modes, options.lengths))
  for case, share, name in itertools.product(cases, shares, asked or ()):
    choose(*case, share, name)
  rows = []
  for length, mode in itertools.product(options.lengths, options.modes):
    found, programs = [], []
    for split in splits(options, mode, length):
      forms: dict[str, Form] = {}
      names = asked or [name for name in options.FORMS if name != "dense"]
      for name in _EVERY_HEAD if split.budget is None else names:
        with contextlib.suppress(ValueError):  # it is impossible
          form = choose(mode, length, split.share, name)
          is_twice = split.budget is None and form in forms.values()
          if name in options.FORMS and not is_twice:
            forms[name] = form
      for name, form in forms.items():
        row = Row(
          *(target().kind, op, mode, length, split.share, name),
          form=form.name,
          computed_share=split.share if form.packs or split.picks else 1.0,
        )
        row, program = _compiled(row, split, options.dtype)
        found.append(row)
        programs.append(program)
      if split.budget is None:
        mha = range(len(found))
    units = options.batch * (1 if op == "decode" else length)
    rows += time_rows(
      found, programs, mha=mha, units=units, rounds=options.rounds
    )
  return rows


def _choose(choose: Choose, options: Any, *case: Any) -> Form:
  if case[-1] in ("kernel", "cudnn") and target().platform == "cpu":
    raise ValueError(
      f"--implementations {case[-1]} needs an accelerator, this is a CPU"
    )
  return choose(options, *case)


def _compiled(row: Row, split: Split, dtype: str) -> tuple[Row, Program | None]:
  """A form's program, and its row with the error or with what went wrong."""
  try:
    with exact_products(dtype):
      program = compile_program(
        split.evaluation(row.implementation), *split.args, loops=True
      )
      error, fault = split.error(program.run(), dtype)
  except Exception as reason:  # compilers and drivers share no error class
    return dataclasses.replace(row, fault=failure(reason)), None
  return dataclasses.replace(row, max_error=error, fault=fault), program


def chosen_form(
  options: Any, mode: str, length: int, share: float, name: str
) -> Form:
  """The form that `attention` chooses for a benchmark's arrays."""
  heads = options.heads
  if options.structure == "per_group":  # attention to fewer heads, all active
    heads, share = round(share * heads), 1.0
  q, k = (
    jax.ShapeDtypeStruct(
      (options.batch, length, count, options.head_dim), options.dtype
    )
    for count in (heads, options.num_kv_heads)
  )
  mask = jax.ShapeDtypeStruct(q.shape[:3], bool)
  active = ActiveHeads(mask, heads, share * heads)
  call = Call(q, k, k, Visible(causal="causal" in mode), 1.0, None, active)
  return choose_form(name, call, target())


def random_active(units: Units, batch: int, tokens: int) -> ActiveHeads:
  """Samples active heads [B, N, H]: each routed unit is equally likely."""
  budget = units.budget
  scores = jax.random.normal(jax.random.key(3), (batch, tokens, budget.routed))
  shared = jnp.ones((batch, tokens, budget.shared), bool)
  selected = select_heads(scores, budget, parts=units.parts)
  mask = jnp.concatenate([shared, selected], axis=-1)
  mask = jnp.repeat(mask, units.size, axis=-1)
  mask = mask[..., np.argsort(units.order())]
  most = budget.active * units.size
  return ActiveHeads(mask, most, parts=units.parts)


def splits(options: Any, mode: str, length: int) -> Iterable[Split]:
  """Attention of all heads, and of each of the shares."""
  batch, heads, dim = options.batch, options.heads, options.head_dim
  groups = options.num_kv_heads
  *qkv, cotangent = (
    jax.random.normal(key, (batch, length, count, dim), options.dtype)
    for key, count in zip(
      jax.random.split(jax.random.key(0), 4), (heads, groups, groups, heads)
    )
  )
  reference = make_reference(mode)
  for budget in (None, *options.budgets()):
    active = mask = None
    arrays = *qkv, cotangent
    if budget is not None:
      active = random_active(options.units(budget), batch, length)
      mask = active.mask
      # Inactive heads have a gate of 0, so they receive no gradient.
      arrays = *qkv, jnp.where(mask[..., None], cotangent, 0)
    yield Split(
      budget,
      evaluation=functools.partial(_evaluation, mode=mode),
      args=(*arrays, active),
      expected=functools.cache(functools.partial(reference, *arrays)),
      mask=mask,
      picks=options.structure == "per_group",
    )


def _evaluation(name: str, *, mode: str) -> Callable:
  """Makes the function (q, k, v, cotangent, active) -> (outputs, gradients)."""
  causal = "causal" in mode

  def run(q, k, v, cotangent, active):
    def attend_to(q, k, v):
      scale, visible = q.shape[-1] ** -0.5, Visible(causal=causal)
      return attend_picked(
        lambda q, active: attend(
          Call(q, k, v, visible, scale, active=active), name
        ),
        q,
        active,
      )

    return _evaluate(attend_to, mode, (q, k, v), cotangent)

  return run


def make_reference(mode: str) -> Callable:
  """Makes the dense form in float32, computed head by head to save memory.

  Args:
    mode: passes that run, see `HeadOptions`.

  Returns:
    A function (q, k, v, cotangent) -> (outputs, gradients); modes without a
    backward pass need no cotangent.
  """

  @jax.checkpoint
  def head(qkv):
    q, k, v = (x[:, :, None] for x in qkv)
    visible = Visible(causal="causal" in mode)
    out = dense_attention(Call(q, k, v, visible, q.shape[-1] ** -0.5))
    return out[:, :, 0]

  def attend(q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    heads_first = tuple(jnp.moveaxis(x, 2, 0) for x in (q, k, v))
    return jnp.moveaxis(jax.lax.map(head, heads_first), 0, 2)

  @jax.jit
  def run(q, k, v, cotangent=None):
    arrays = jax.tree.map(lambda x: x.astype(jnp.float32), (q, k, v, cotangent))
    with jax.default_matmul_precision("highest"):
      return _evaluate(attend, mode, arrays[:3], arrays[3])

  return run


def _evaluate(
  attend: Callable, mode: str, qkv: tuple, cotangent: jax.Array
) -> tuple[Any, Any]:
  """Returns the output, and the gradients of q, k and v in backward modes."""
  if "backward" not in mode:
    return attend(*qkv), ()
  out, pull = jax.vjp(attend, *qkv)
  return out, pull(cotangent)


if __name__ == "__main__":
  sys.exit(main())
