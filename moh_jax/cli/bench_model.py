"""`python -m moh_jax bench model`: a model beside its multi-head baseline.

"forward" computes the training loss of one batch of random data,
"forward_backward" its gradients too. The baseline is the same network with the
router off; "router" is the forward time of all routers of the model alone. Of
language models the reading of prompts and the generating of tokens are timed
too, of diffusion models a sampler.
"""

import dataclasses
import resource
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config import (
  Config,
  LLMConfig,
  get_family,
)
from moh_jax.config.llm import Sampling
from moh_jax.inference import decoding, generate
from moh_jax.layers.router import HeadRouter
from moh_jax.models.generation import make_sampler
from moh_jax.models.llm import LLM
from moh_jax.models.registry import make_model
from moh_jax.ops.attention import choose_cached_form
from moh_jax.ops.target import target
from moh_jax.runtime import sharding
from moh_jax.runtime.sharding import init_params, unbox
from moh_jax.training import timing
from moh_jax.training.bench import (
  Program,
  Row,
  compile_program,
  time_rows,
)
from moh_jax.training.entrance import check_memory
from moh_jax.training.flops import form_summary, step_forms
from moh_jax.training.step import make_program
from moh_jax.training.task import task_builder

_SPAN = 32  # tokens that one call of the decoding program generates
_BATCHES = (1, 8)  # of texts that are generated


def measure(
  run: Config,
  models: Mapping[str, Any],
  rounds: int,
  *,
  compile_only: bool = False,
) -> dict[str, Any]:
  """Measures a model.

  Args:
    run: on random data.
    models: model sections to compare by name of the form; "mha" is the
      baseline.
    rounds: measured turns.
    compile_only: compile the train step and measure nothing else.

  Returns:
    {"rows": list of `Row`, "train_step": seconds to compile the train step and
    its bytes, "peak_resident_bytes": of the process}, and "sampler" of a
    diffusion model.
  """
  result = {"train_step": train_step(run), "rows": []}
  if not compile_only:
    result["rows"] += _losses(run, models, rounds)
    commands = get_family(run.model.family).commands
    if "generate" in commands:
      result["rows"] += _writing(run, models, rounds)
    if "sample" in commands:
      result["sampler"] = _sampler(run, rounds)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  return {**result, "peak_resident_bytes": peak}


def train_step(run: Config) -> dict[str, float]:
  """Seconds to compile the whole train step, and the bytes of its state."""
  mesh = sharding.make_mesh(run.mesh, jax.devices()[:1])
  objective = task_builder(run).make_objective(run)
  program = make_program(run, objective, mesh)
  check_memory(run, mesh, program)
  state = program.state
  start = time.perf_counter()
  compiled = program.step.lower(state, program.batch).compile()
  seconds = time.perf_counter() - start

  def size(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

  return {
    "compile_seconds": seconds,
    "params_bytes": size(state.params),
    "optimizer_bytes": size(state.opt_state),
    "ema_bytes": size(state.ema),
    "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
  }


def _rows(
  models: Mapping[str, Any],
  programs: Mapping[str, Program],
  forms: Mapping[str, tuple[str, float]],
  **options: Any,
) -> list[Row]:
  """Times programs of variants of a model.

  Args:
    models: model sections by name of the form; "mha" is the baseline.
    programs: of each of them, or of the routers alone.
    forms: the names of each one's forms of attention, and the share of all
      heads that they compute.
    **options: mode and length of the rows; units and rounds of `time_rows`.
  """
  here = {name: options.pop(name) for name in ("mode", "length")}
  rows = []
  for name in programs:
    form, computed = forms.get(name, (None, None))
    model = models.get(name, next(iter(models.values())))
    rows.append(
      Row(
        device=target().kind,
        op="model",
        **here,
        share=model.activated_share,
        implementation=name,
        form=form,
        computed_share=computed,
        every_head=None if computed is None else computed == 1,
      )
    )
  mha = [list(programs).index("mha")]
  compiled = list(programs.values())
  return time_rows(rows, compiled, mha=mha, min_seconds=0.0, **options)


def _losses(run: Config, models: Mapping[str, Any], rounds: int) -> list[Row]:
  """Rows of the training loss, of its gradients, and of the routers."""
  programs, forms = {}, {}
  for name, model in models.items():
    variant = dataclasses.replace(run, model=model)
    programs[name] = _loss_programs(variant)
    forms[name] = form_summary(variant, step_forms(variant, {}))
  length = getattr(run.data, "sequence_length", None)
  rows, router = [], run.model.router
  for mode in ("forward", "forward_backward"):
    compiled = {name: program[mode] for name, program in programs.items()}
    reads_tokens = router.kind != "none" and not router.reads_norms
    if mode == "forward" and reads_tokens:
      compiled["router"] = routers(run)
    rows += _rows(
      models,
      compiled,
      forms,
      mode=mode,
      length=length,
      units=run.data.batch_size * (length or 1),
      rounds=rounds,
    )
  return rows


def random_params(run: Config) -> Any:
  """Initial parameters of a run's network plus 0.02, so that few are zero.

  With the zeros that adaLN-Zero starts from, gradients would be zero and a
  backward pass could skip work.
  """
  model, abstract = make_model(run)
  inputs = [jnp.zeros(x.shape, x.dtype) for x in abstract]
  init = jax.jit(lambda: unbox(init_params(model, jax.random.key(1), inputs)))
  return jax.tree.map(lambda x: x + 0.02, init())


def _loss_programs(run: Config) -> dict[str, Program]:
  """Compiles the training loss of a random batch, and its gradients."""
  task = task_builder(run).make_task(run)
  mesh = sharding.make_mesh(run.mesh, jax.devices()[:1])
  batch = jax.tree.map(jnp.asarray, next(task.batches(mesh)))
  arrays = (random_params(run), batch, jax.random.key(0), jnp.int32(0))

  def forward(*arrays: Any) -> jax.Array:
    return task.loss_fn(*arrays)[0]

  return {
    "forward": compile_program(forward, *arrays),
    "forward_backward": compile_program(jax.grad(forward), *arrays),
  }


def routers(run: Config) -> Program:
  """Compiles the routers of all layers, with the multiplication by their gates.

  Args:
    run: run of the model to measure; the tokens are random.
  """
  model, size = run.model, run.data.batch_size
  key = jax.random.key(2)
  layers, tokens = [], []
  for group in model.layer_groups():
    budget = group.budget
    module = HeadRouter(budget, model.router)
    length = getattr(run.data, "sequence_length", group.tokens)
    x = jax.random.normal(key, (size, length, group.width))
    heads = jnp.ones((size, length, budget.num_heads, budget.head_dim))
    params = unbox(module.init(key, x)["params"])
    layers.append((module, group.depth))
    tokens.append((params, x, heads))

  def evaluate(tokens: list) -> list[jax.Array]:
    outputs = []
    for (module, depth), (params, x, heads) in zip(layers, tokens):

      def one(heads, _, module=module, params=params, x=x):
        # Each pass depends on the last one's heads, so XLA merges none.
        gates, aux = module.apply({"params": params}, x + heads[0, 0, 0, 0])
        return heads * gates[..., None], aux.balance_loss

      outputs.append(jax.lax.scan(one, heads, length=depth))
    return outputs

  return compile_program(evaluate, tokens)


def _writing(
  run: Config, models: Mapping[str, LLMConfig], rounds: int
) -> list[Row]:
  """Rows of "prefill_B" (reads B prompts) and "decode_B" (a token for each).

  The sequence length of the run is that of the prompts; the cache holds `_SPAN`
  tokens more.
  """
  rows, length = [], run.data.sequence_length
  for batch in _BATCHES:
    writers = {
      name: _Writer(dataclasses.replace(run, model=model), batch, length)
      for name, model in models.items()
    }
    for mode, loops, new in (("prefill", 1, length), ("decode", _SPAN, 1)):
      programs, forms = {}, {}
      for name, model in models.items():
        programs[name] = Program(getattr(writers[name], mode), loops)
        form = choose_cached_form(
          model.attention_impl, target(), new=new, head_dim=model.head_dim
        )
        packs = form == "kernel"
        forms[name] = form, model.activated_share if packs else 1.0
      rows += _rows(
        models,
        programs,
        forms,
        mode=f"{mode}_{batch}",
        length=length,
        units=batch * new,
        rounds=rounds,
      )
  return rows


class _Writer:
  """A batch of texts in generation, `_SPAN` tokens a call."""

  def __init__(self, run: Config, batch: int, length: int):
    config = run.model
    model = LLM(config, unrolled=True)
    self._params = generate.serving_params(random_params(run), config)
    cache_dtype = generate.default_cache_dtype(config)
    self._read = decoding.make_prefill(model, cache_dtype)
    self._write = decoding.make_decode(model, (), _SPAN)
    self._slots = generate.length_bucket(length + _SPAN)
    rows = generate.batch_bucket(batch, config)
    self._prompts = (
      np.ones((rows, length), np.int32),
      np.zeros(rows, np.int32),
      np.arange(rows, dtype=np.int32),
      np.zeros(rows, bool),
    )
    self._state = jax.block_until_ready(self.prefill())
    self._start = int(self._state.slot)

  def prefill(self) -> Any:
    """Reads the prompts into a new cache, and returns the decoding state."""
    return self._read(self._params, *self._prompts, self._slots)

  def decode(self) -> jax.Array:
    """Generates `_SPAN` tokens after the prompts.

    Every call writes them over those of the one before, so that none of them
    reads the prompts again.
    """
    state = dataclasses.replace(self._state, slot=np.int32(self._start))
    numbers = decoding.span_numbers(Sampling(), 0, _SPAN)
    self._state, tokens, _ = self._write(
      self._params, state, numbers, True, False
    )
    return tokens


def _sampler(run: Config, rounds: int) -> dict[str, float]:
  """Times a guided sampler beside the network evaluations that it consists of.

  Returns:
    {"steps", "ms": of the sampler, "forward_ms": of one network evaluation,
    "ratio_to_forwards": sampler time / (steps * forward time), of one turn}.
  """
  steps = int(run.sample.steps)
  network, _ = make_model(run)
  params = random_params(run)
  index = jnp.arange(run.data.batch_size, dtype=jnp.int32)
  twice = jnp.tile(index, 2)  # guidance evaluates every image twice
  x = jax.random.normal(jax.random.key(0), (len(twice), *run.model.input_shape))

  def forward(params: Any, *inputs: Any) -> jax.Array:
    return network.apply({"params": params}, *inputs)[0]

  sampler = make_sampler(network, run)
  times = timing.interleaved(
    {
      "sampler": compile_program(sampler, params, 0, index, index).run,
      "forward": compile_program(forward, params, x, twice, twice).run,
    },
    rounds,
  )
  sampler, one = times["sampler"], times["forward"]
  return {
    "steps": steps,
    "ms": sampler.median * 1e3,
    "forward_ms": one.median * 1e3,
    "ratio_to_forwards": sampler.over(one).median / steps,
  }
