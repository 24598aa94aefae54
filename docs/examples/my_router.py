"""A router of your own: sigmoid scores, and a bias that evens the load out.

The bias takes part in the selection alone, and follows the load in place of a
loss on the scores (arXiv:2408.15664).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

import moh_jax


class SigmoidRouter(moh_jax.Router):
  """A selected head weighs twice its sigmoid, which starts near one."""

  @nn.compact
  def __call__(self, x, *, norms=None, top_k=None):
    """Tokens to a `Routing`."""
    routed = self.budget.routed
    logits = self.logits(x, routed=routed)["routed"]
    scores = nn.sigmoid(logits)
    bias = self.param("bias", nn.initializers.zeros, (routed,))[None, None]
    probs = nn.softmax(nn.log_sigmoid(logits))  # scores over their sum
    selected = self.select(scores + bias, top_k)
    gates = jnp.where(selected, 2 * scores, 0.0)
    # Same values, but the balance loss then moves the bias alone: down for
    # heads with a load above the mean, up for others.
    bias = bias - bias.mean()
    probs = jax.lax.stop_gradient(probs - bias) + bias
    return self.routing(gates, probs, selected)


moh_jax.register_router("sigmoid", SigmoidRouter)
