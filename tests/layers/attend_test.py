"""Attention of the heads at work: over a mesh, and in the order of a TPU."""

import contextlib
import functools
import math
from unittest import mock

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType

from moh_jax.config import MeshConfig
from moh_jax.config.heads import HeadBudget, RouterConfig
from moh_jax.config.llm import RotaryConfig
from moh_jax.layers.attend import (
  active_heads,
  attend_on_mesh,
  attend_to_cache,
)
from moh_jax.layers.heads import layer_layout
from moh_jax.layers.moh import MoHAttention, Places
from moh_jax.layers.router import HeadChoice
from moh_jax.ops import lanes, placement
from moh_jax.ops.cache import LayerCache, Slots
from moh_jax.ops.call import Call, Visible
from moh_jax.ops.pairs import ActiveHeads
from moh_jax.ops.placement import place_heads
from moh_jax.ops.position import rotation
from moh_jax.ops.target import Target
from moh_jax.runtime.batches import shard_batch
from moh_jax.runtime.mesh import make_mesh, use_mesh
from moh_jax.runtime.parameters import unbox
from tests.compiles.programs import read_collectives
from tests.layers import small
from tests.ops import cases
from tests.training import tiny

_BUDGET = HeadBudget(num_heads=4, shared=1, top_k=1, head_dim=8)
_CUBE = {"data": 2, "fsdp": 2, "tensor": 2}


class ActiveHeadsTest(parameterized.TestCase):
  @parameterized.parameters(
    (RouterConfig(), None, 2),
    (RouterConfig(), HeadChoice(top_k=np.int32(1)), 4),  # may change
    (RouterConfig("none"), None, None),
    (RouterConfig("query_norm", straight_through="all"), None, None),
  )
  def test_are_those_with_a_gate(self, router, choice, most):
    gates = jnp.array([[[1.0, 0.0, 0.5, 0.0]]])
    active = active_heads(gates, _BUDGET, router, choice)
    if most is None:  # every head counts
      self.assertIsNone(active)
      return
    np.testing.assert_array_equal(active.mask, [[[True, False, True, False]]])
    self.assertEqual(active.max_per_token, most)


class MeshTest(parameterized.TestCase):
  @parameterized.parameters(4, 2, 1)
  def test_cache_is_split_too(self, kv_heads):
    r = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(r[0], (8, 1, 4, 8))
    k, v = (jax.random.normal(key, (8, kv_heads, 20, 8)) for key in r[1:3])
    mask = jax.random.bernoulli(r[3], 0.5, q.shape[:3])
    slots = Slots(jnp.int32(19), jnp.arange(8))

    @functools.partial(jax.jit, static_argnums=3)
    def run(q, k, v, name):
      out = attend_to_cache(
        q, LayerCache(k, v), slots, active=ActiveHeads(mask, 4),
        implementation=name,
      )  # fmt: skip
      return out * mask[..., None]

    expected = run(q, k, v, "dense")
    with use_mesh(make_mesh(MeshConfig(**_CUBE))):
      out = run(q, k, v, "kernel")
    heads = 2 if kv_heads > 1 else 4  # one key/value head is not split
    self.assertEqual(out.sharding.shard_shape(out.shape), (2, 1, heads, 8))
    np.testing.assert_allclose(out, expected, atol=2e-6)

  def test_devices_pack_their_own_heads(self):
    mesh, q = make_mesh(MeshConfig(**_CUBE)), jnp.ones((8, 40, 4, 8))
    active = ActiveHeads(jnp.ones(q.shape[:3], bool), 3)

    def run(q):
      call = Call(q, q, q, Visible(causal=True), 1.0, active=active)
      return attend_on_mesh(call, "packed")

    with use_mesh(mesh):
      q = shard_batch({"x": q}, mesh)["x"]
      text = jax.jit(run).lower(q).compile().as_text()
    self.assertEmpty(list(read_collectives(text, dict(mesh.shape))))


class LayerTest(parameterized.TestCase):
  @parameterized.parameters(
    ("two_stage:8", "packed", _CUBE), ("query_norm:4", "kernel", _CUBE),
    ("none:1", "packed", _CUBE),
    ("two_stage:2:per_group", "packed", _CUBE),
    ("two_stage:4:whole_group", "packed", _CUBE),
    ("query_norm:2", "packed", {"sequence": 2, "tensor": 2}),  # repeated
    # Orders of the heads: the shared ones lie on one device, or anywhere.
    ("two_stage:4", "packed", {"sequence": 2}, "crowded"),
    ("two_stage:2", "packed", {"sequence": 4, "tensor": 2}, "random"),
  )  # fmt: skip
  @pytest.mark.integration
  def test_a_mesh_gives_what_one_device_gives(
    self, kinds, implementation, axes, order=None
  ):
    router, kv_heads, structure = f"{kinds}:free".split(":")[:3]
    kv_heads, top_k = int(kv_heads), 1 if structure == "free" else 2
    layer = MoHAttention(
      HeadBudget(8, shared=4, top_k=top_k, head_dim=16),
      RouterConfig(router, structure=structure),
      num_kv_heads=kv_heads,
      causal=kv_heads != 1,
      implementation="dense",
    )
    params, x, _ = _inputs(layer, 40)
    mask = jnp.arange(40)[None] < 37 + jnp.arange(4)[:, None]
    places = Places(segments=jnp.arange(40)[None].repeat(4, 0) // 30)
    choice = None
    if order == "crowded":
      sizes = axes.get("tensor", 1), axes.get("sequence", 1)
      dealt = place_heads(8, kv_heads, *sizes).order(8)
      choice = HeadChoice(order=jnp.array(dealt))
    elif order == "random":
      choice = HeadChoice(order=jax.random.permutation(jax.random.key(0), 8))

    given = {"token_mask": mask, "places": places, "choice": choice}
    want = small.gradients(layer, **given)(params, x)
    devices = jax.devices()[: math.prod(axes.values())]
    mesh = make_mesh(MeshConfig(**{"data": 1} | axes), devices)
    with use_mesh(mesh):
      same = layer.clone(implementation=implementation)
      lowered = small.gradients(same, **given).lower(params, x)
      compiled = lowered.compile()
    cases.check(compiled(params, x), want)
    if "sequence" not in axes:
      deals = router != "none" and structure != "per_group"
      self.assertEqual("all_to_all" in lowered.as_text(), deals)
    else:
      found = read_collectives(compiled.as_text(), dict(mesh.shape))
      kinds = {one.kind for one in found if one.axes == ("sequence",)}
      self.assertIn("all-to-all", kinds)
      self.assertNotIn("collective-permute", kinds)


class CheckTest(parameterized.TestCase):
  def test_tokens_must_be_divisible(self):
    mesh = make_mesh(MeshConfig(sequence=8))
    with self.assertRaisesRegex(ValueError, "mesh.sequence=8: .* 12 tokens"):
      placement.check_tokens(tiny.LLM, mesh, 12)
    placement.check_tokens(tiny.LLM, mesh, 16)


def _as_on_a_tpu():
  """Context in which heads are ordered as on a TPU; all else is as here."""
  device = Target("tpu", "TPU v5 lite")
  return mock.patch.object(lanes, "target", return_value=device)


def _inputs(layer, tokens=9):
  """Random parameters of a layer, tokens, and where they stand."""
  x = jax.random.normal(jax.random.key(0), (4, tokens, 24), layer.dtype)
  params = unbox(layer.init(jax.random.key(1), x))
  keys = iter(jax.random.split(jax.random.key(2), 9))
  params = jax.tree.map(
    lambda leaf: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape), params
  )
  positions = jnp.arange(tokens)[None]
  by = rotation(positions, RotaryConfig(), layer.budget.head_dim)
  return params, x, Places(rotation=by)


class TpuOrderTest(parameterized.TestCase):
  @parameterized.parameters(
    (64, (8, 4), True, 64, (2, 2)),
    (96, (8,), True, 128, (1,)),
    (96, (8,), False, 96, (1,)),
    (48, (3,), True, 48, (1,)),  # wider heads would not fill the lanes
  )
  def test_width_and_sets(self, dim, heads, pads, width, counts):
    with _as_on_a_tpu():
      layout = layer_layout(dim, *heads, pads=pads)
    self.assertEqual(layout.width, width)
    self.assertEqual(tuple(map(layout.count, heads)), counts)
    self.assertEqual(layer_layout(dim, *heads, pads=pads).width, dim)

  def _check(self, layer, tolerance, mesh=None):
    *inputs, places = _inputs(layer)
    want = small.gradients(layer, places=places)(*inputs)
    on_mesh = use_mesh(mesh) if mesh else contextlib.nullcontext()
    with on_mesh, _as_on_a_tpu():
      got = small.gradients(layer, places=places)(*inputs)
    chex.assert_trees_all_equal_dtypes(got, want)
    cases.check(got, want, tolerance, tolerance)

  @parameterized.parameters(
    {"head_dim": 64, "num_kv_heads": 2},  # two heads fill the lanes
    {"head_dim": 32, "num_kv_heads": 1},  # queries fill them, keys do not
    {"head_dim": 48, "use_bias": False},  # padded to 64
    {"head_dim": 96, "router": RouterConfig("query_norm")},  # to 128
    {"head_dim": 96, "qk_norm": 1e-6},
    {"head_dim": 64, "dtype": jnp.bfloat16},
    {"head_dim": 64, "output_major": True},
  )
  @pytest.mark.integration
  def test_equals_the_plain_order(self, head_dim, **settings):
    budget = HeadBudget(4, shared=1, top_k=1, head_dim=head_dim)
    layer = MoHAttention(budget, causal=True, **settings)
    exact = layer.dtype == jnp.float32
    self._check(layer, 1e-5 if exact else 3e-2)

  @parameterized.parameters((4, 64), (8, 96))  # one a device, two
  @pytest.mark.integration
  def test_equals_it_where_a_mesh_splits_the_heads(self, heads, head_dim):
    layer = MoHAttention(
      HeadBudget(heads, heads // 2, top_k=1, head_dim=head_dim), causal=True
    )
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    with use_mesh(mesh), _as_on_a_tpu():
      self.assertEqual(layer_layout(64, heads).count(heads), heads // 4)
    self._check(layer, 1e-5, mesh)

  def test_heads_lie_on_an_axis_of_any_name(self):
    layer = MoHAttention(HeadBudget(8, shared=2, top_k=2, head_dim=8))
    x = jax.random.normal(jax.random.key(0), (2, 16, 16))
    params = nn.unbox(layer.init(jax.random.key(1), x))
    types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=types)
    rules = [(name, "model") for name in ("heads", "attended_heads")]
    rules += [(x, None) for x in ("batch", "tokens", "embed", "head_dim")]
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
      got = jax.jit(layer.apply)(params, x)[0]
    cases.check(got, layer.apply(params, x)[0])
