"""Small tokens, head budgets and parameters for the tests of the layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.config.heads import HeadBudget

B, N, C = 2, 5, 8
BUDGET = HeadBudget(num_heads=6, shared=2, top_k=2, head_dim=3)
ORDER = (4, 0, 5, 2, 1, 3)  # of six heads


def tokens() -> jax.Array:
  """Random tokens [B, N, C]."""
  return jax.random.normal(jax.random.key(0), (B, N, C))


def params(module: nn.Module, *args):
  """Random parameters of every shape, biases too."""
  shapes = jax.eval_shape(
    lambda: nn.unbox(module.init(jax.random.key(0), *args))
  )
  rng = np.random.default_rng(1)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, x.dtype), shapes
  )


def gradients(layer, **given):
  """A function of parameters and tokens: the output, and all gradients."""

  def loss(params, x):
    out, aux = layer.apply(params, x, **given)
    return jnp.square(out.astype(jnp.float32)).sum() + aux.balance_loss, out

  def run(params, x):
    (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return [out, *jax.tree.leaves(grads)]

  return jax.jit(run)
