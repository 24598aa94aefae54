"""Programs of a whole model to time: its loss, its gradients, its routers."""

from typing import Any

import jax
import jax.numpy as jnp

from moh_jax.config import Config
from moh_jax.layers.router import HeadRouter
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from moh_jax.runtime.params import init_params, unbox
from moh_jax.speed.programs import Program, compile_program, jit_once
from moh_jax.training.task import task_builder


def random_params(run: Config) -> Any:
  """Initial parameters of a run's network plus 0.02, so that few are zero.

  With the zeros that adaLN-Zero starts from, gradients would be zero and a
  backward pass could skip work.
  """
  model, abstract = make_model(run)
  inputs = [jnp.zeros(x.shape, x.dtype) for x in abstract]
  init = jit_once(lambda: unbox(init_params(model, jax.random.key(1), inputs)))
  return jax.tree.map(lambda x: x + 0.02, init())


def programs(run: Config) -> dict[str, Program]:
  """Compiles the training loss of a random batch, and its gradients.

  Args:
    run: run of the model to measure.

  Returns:
    Programs "forward" and "forward_backward".
  """
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
