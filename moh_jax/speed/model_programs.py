"""What is timed of a whole model."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.config import Config
from moh_jax.data.text.packing import FakeSequences
from moh_jax.layers.router import HeadRouter
from moh_jax.models.build import make_model
from moh_jax.models.llm import LLM
from moh_jax.runtime.params import init_params, unbox
from moh_jax.speed import writing
from moh_jax.speed.programs import Program, compile_program, jit_once
from moh_jax.training.language_modeling import make_loss

_BALANCE_WEIGHT = 0.01


def inputs(run: Config, batch: int) -> tuple[Any, Any, list[jax.Array]]:
  """A network of images, random parameters and random inputs.

  Args:
    run: whose network.
    batch: images.
  """
  model, abstract = make_model(run)
  shapes = [(batch, *x.shape[1:]) for x in abstract]
  arrays = [
    jax.random.normal(jax.random.key(0), shape)
    if x.dtype == jnp.float32
    else jnp.arange(batch, dtype=x.dtype)
    for x, shape in zip(abstract, shapes)
  ]
  init = jit_once(lambda xs: unbox(init_params(model, jax.random.key(1), xs)))
  params = init([x[:1] for x in arrays])
  # Zeros (of adaLN-Zero) would let a backward pass of nothing look fast.
  params = jax.tree.map(lambda x: x + 0.02, params)
  return model, params, arrays


def programs(run: Config) -> dict[str, Program]:
  """The forward pass, and both passes with the gradients of parameters.

  Args:
    run: what model on what batch. Of a language model the forward pass is the
      loss of packed text.
  """
  if run.model.family == "llm":
    return _text_programs(run)
  model, params, arrays = inputs(_without_drop_path(run), run.data.batch_size)

  def loss(params: Any, *arrays: Any) -> jax.Array:
    out, aux = model.apply({"params": params}, *arrays)
    return jnp.square(out).mean() + _BALANCE_WEIGHT * aux.balance_loss

  def forward(params: Any, *arrays: Any) -> jax.Array:
    return model.apply({"params": params}, *arrays)[0]

  return {
    "forward": compile_program(forward, params, *arrays),
    "forward_backward": compile_program(jax.grad(loss), params, *arrays),
  }


def routers(run: Config) -> Program:
  """The routers of every layer, on random tokens, and their use: the gates.

  Args:
    run: what model on what batch.
  """
  model, size = run.model, run.data.batch_size
  key = jax.random.key(2)
  layers, tokens = [], []
  for group in model.layer_groups():
    budget = group.budget
    module = HeadRouter(budget, model.router_config)
    is_text = model.family == "llm"
    length = run.data.sequence_length if is_text else group.tokens
    x = jax.random.normal(key, (size, length, group.width))
    heads = jnp.ones((size, length, budget.num_heads, budget.head_dim))
    params = unbox(module.init(key, x)["params"])
    layers.append((module, group.depth))
    tokens.append((params, x, heads))

  def evaluate(tokens: list) -> list[jax.Array]:
    outputs = []
    for (module, depth), (params, x, heads) in zip(layers, tokens):

      def one(heads, _, module=module, params=params, x=x):
        # The carry makes each pass depend on the last: none is merged.
        gates, aux = module.apply({"params": params}, x + heads[0, 0, 0, 0])
        return heads * gates[..., None], aux.balance_loss

      outputs.append(jax.lax.scan(one, heads, length=depth))
    return outputs

  return compile_program(evaluate, tokens)


def _text_programs(run: Config) -> dict[str, Program]:
  params = writing.random_params(run.model)
  loss_fn = make_loss(LLM(run.model), run)
  size = run.data.batch_size
  source = FakeSequences(run.model.vocab_size, run.data.sequence_length, size)
  examples = [source[i] for i in range(size)]
  batch = jax.tree.map(lambda *x: jnp.stack(x), *examples)
  arrays = (params, batch, jax.random.key(0), jnp.int32(0))

  def forward(*arrays: Any) -> jax.Array:
    return loss_fn(*arrays)[0]

  return {
    "forward": compile_program(forward, *arrays),
    "forward_backward": compile_program(jax.grad(forward), *arrays),
  }


def _without_drop_path(run: Config) -> Config:
  if run.model.family != "vit":
    return run
  model = dataclasses.replace(run.model, drop_path=0.0)
  return dataclasses.replace(run, model=model)
