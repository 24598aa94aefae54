"""The layer in any JAX program: each transformation of each form of attention.

All give what the dense form gives on one device, or refuse in one line.
"""

import functools
import itertools
from unittest import mock

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.layers.moh import MoHAttention
from moh_jax.ops import attention as attention_lib
from moh_jax.ops.attention import attention
from tests.ops.devices import traced_for

# Half of the heads: "auto" packs 1,024 tokens of float32.
_BUDGET = HeadBudget(num_heads=8, shared=2, top_k=2, head_dim=8)
_FORMS = ("dense", "packed", "kernel", "auto")
_EACH = PartitionSpec("data")


def _layer(form, dtype="float32"):
  return MoHAttention(_BUDGET, implementation=form, dtype=jnp.dtype(dtype))


@functools.cache
def _inputs(tokens):
  x = jax.random.normal(jax.random.key(0), (2, tokens, 16))
  params = nn.unbox(_layer("dense").init(jax.random.key(1), x))
  return jax.tree.map(lambda p: 10 * p if p.ndim > 1 else p, params), x


def _apply(layer):
  return lambda params, x: layer.apply(params, x)[0].astype(jnp.float32)


def _results(apply):
  """Outputs and gradients of parameters and tokens."""
  loss = lambda *args: jnp.sum(apply(*args) ** 2) / 100  # noqa: E731
  return lambda *args: (apply(*args), jax.grad(loss, (0, 1))(*args))


def _mesh(kind):
  return jax.make_mesh((2,), ("data",), axis_types=(kind,))


def _plain(apply, params, x):
  return _results(apply)(params, x)


def _vmap(apply, params, x):
  each = jax.vmap(lambda params, x: apply(params, x[None])[0], (None, 0))
  return _results(each)(params, x)


def _pmap(apply, params, x):
  each = jax.pmap(_results(apply), in_axes=(None, 0))
  y, (grads, dx) = each(params, x[:, None])
  return y[:, 0], (jax.tree.map(lambda g: g.sum(0), grads), dx[:, 0])


def _shard_map(apply, params, x):
  specs = {"in_specs": (PartitionSpec(), _EACH), "out_specs": _EACH}
  with jax.set_mesh(_mesh(AxisType.Auto)):
    return jax.jit(_results(jax.shard_map(apply, **specs)))(params, x)


def _within_shard_map(apply, params, x):
  mesh = _mesh(AxisType.Explicit)
  with jax.set_mesh(mesh):
    x = jax.device_put(x, NamedSharding(mesh, _EACH))
    run = jax.shard_map(
      _results(apply),
      in_specs=(PartitionSpec(), _EACH),
      out_specs=(_EACH, (PartitionSpec(), _EACH)),
    )
    return jax.jit(run)(params, x)


def _on_mesh(kind, apply, params, x):
  mesh = _mesh(kind)
  with jax.set_mesh(mesh):
    whole = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(params, whole)
    x = jax.device_put(x, NamedSharding(mesh, _EACH))
    return jax.jit(_results(apply))(params, x)


def _scan(apply, params, x):
  def stacked(params, x):
    step = lambda x, _: (apply(params, x), None)  # noqa: E731
    return jax.lax.scan(step, x, None, length=1)[0]

  return _results(stacked)(params, x)


def _remat(apply, params, x):
  return _results(jax.checkpoint(apply))(params, x)


def _direction(tree):
  return jax.tree.map(
    lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), tree
  )


def _jvp(apply, params, x):
  return jax.jvp(apply, (params, x), _direction((params, x)))


_ON_SEVERAL_DEVICES = {
  "pmap": _pmap,
  "shard_map": _shard_map,
  "within shard_map": _within_shard_map,
  "Explicit axes": functools.partial(_on_mesh, AxisType.Explicit),
  "Auto axes": functools.partial(_on_mesh, AxisType.Auto),
}
_ALL = {"jit": _plain, "vmap": _vmap, "scan": _scan, "remat": _remat}
_ALL |= {**_ON_SEVERAL_DEVICES, "jvp": _jvp}


def _refusal(name, form, tokens, dtype):
  """What a transformation is refused with; empty if it works."""
  if form == "kernel" and "shard_map" in name:
    return "implementation='kernel' needs check_vma=False of jax.shard_map"
  all_logits = tokens == 16 and form in ("dense", "auto")
  if name == "jvp" and not (all_logits and dtype == "float32"):
    return "forward-mode"
  return ""


@functools.cache
def _expected(name, tokens, dtype):
  """What the dense form gives on one device, in float32 if that is needed."""
  function = _jvp if name == "jvp" else _plain
  apply = _apply(_layer("dense", dtype if function is _plain else "float32"))
  with mock.patch.dict(attention_lib._MAX_LOGITS_BYTES, cpu=1 << 30):
    run = jax.jit(functools.partial(function, apply))
    return jax.tree.map(np.asarray, run(*_inputs(tokens)))


def _check(name, form, tokens, dtype):
  function = functools.partial(_ALL[name], _apply(_layer(form, dtype)))
  if name not in _ON_SEVERAL_DEVICES:
    function = jax.jit(function)
  if message := _refusal(name, form, tokens, dtype):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
      function(*_inputs(tokens))
    assert "\n" not in str(caught.value)
    return
  got = function(*_inputs(tokens))
  expected = _expected(name, tokens, dtype)
  tolerance = 2e-6 if dtype == "float32" else 2e-2
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    atol = tolerance * max(1, np.abs(b).max())
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


_SHORT = (
  *((name, "packed") for name in _ALL if name not in ("jit", "Auto axes")),
  ("Explicit axes", "dense"), ("Explicit axes", "kernel"),
  ("shard_map", "auto"), ("shard_map", "kernel"), ("jvp", "dense"),
)  # fmt: skip


class TransformationsTest(parameterized.TestCase):
  @parameterized.parameters(*_SHORT)
  @pytest.mark.integration
  def test_short_sequences(self, name, form):
    _check(name, form, 16, "float32")

  @parameterized.parameters("within shard_map", "Explicit axes")
  @pytest.mark.integration
  def test_sequences_that_are_packed(self, name):
    _check(name, "auto", 1024, "float32")

  @parameterized.parameters(
    ((1, 2), "two_stage"), ((2, 6), "two_stage"), ((0, 2), "two_stage"),
    ((8, 0), "two_stage"), ((1, 2), "query_norm"), ((8, 0), "query_norm"),
    ((1, 2), "gate"),
  )  # fmt: skip
  @pytest.mark.integration
  def test_every_budget_and_router_on_explicit_axes(self, split, kind):
    budget = HeadBudget(8, shared=split[0], top_k=split[1], head_dim=8)
    layer = MoHAttention(budget, RouterConfig(kind))
    params = nn.unbox(layer.init(jax.random.key(1), x := _inputs(16)[1]))
    got = _on_mesh(AxisType.Explicit, _apply(layer), params, x)
    chex.assert_trees_all_close(
      got, _results(_apply(layer))(params, x), rtol=1e-5, atol=1e-6
    )

  @parameterized.parameters(("tpu", "TPU v5"), ("gpu", "NVIDIA H100"))
  def test_kernels_lower_where_shard_map_checks(self, platform, kind):
    mesh = _mesh(AxisType.Auto).abstract_mesh
    q = jnp.ones((2, 256, 2, 128), jnp.bfloat16)

    def loss(q):
      attend = jax.shard_map(
        lambda q: attention(q, q, q), in_specs=_EACH, out_specs=_EACH
      )
      return attend(q).astype(jnp.float32).sum()

    with traced_for(platform, kind, 1, mesh):
      traced = jax.jit(jax.grad(loss)).trace(q)
      name = {"gpu": "cuda"}.get(platform, platform)
      traced.lower(lowering_platforms=(name,))
    self.assertIn("moh_", str(traced.jaxpr))

  @parameterized.parameters(
    *itertools.product(_ALL, _FORMS, (16, 1024), ("float32", "bfloat16"))
  )
  @pytest.mark.slow
  def test_every_form(self, *case):
    _check(*case)
