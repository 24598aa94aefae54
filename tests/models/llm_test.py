"""The language model: who sees whom, caches, routers, layouts of parameters."""

import dataclasses
import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from flax import traverse_util

from moh_jax.config import LLMConfig, RouterConfig, get_family
from moh_jax.models import llm
from moh_jax.models.llm import LLM
from moh_jax.models.restack import restack
from moh_jax.runtime.params import init_params, unbox
from tests.training import tiny

_CONFIG = tiny.LLM
_ROUTERS = ("two_stage", "query_norm", "none")
_B, _N = 2, 8


def _config(router: str = "two_stage", **changes) -> LLMConfig:
  changes["router"] = RouterConfig(router)
  return dataclasses.replace(_CONFIG, **changes)


def _tokens(batch: int = _B, length: int = _N) -> jax.Array:
  """Tokens of which each occurs once."""
  order = np.random.default_rng(0).permutation(_CONFIG.vocab_size)
  return jnp.asarray(order[: batch * length].reshape(batch, length), jnp.int32)


@functools.cache
def _variables(config: LLMConfig):
  """Random parameters that make routers, norms and biases matter."""
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  init = functools.partial(init_params, LLM(config), jax.random.key(0))
  shapes = unbox(jax.eval_shape(init, [tokens]))
  rng = np.random.default_rng(1)
  return {
    "params": jax.tree.map(
      lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, x.dtype), shapes
    )
  }


@functools.cache
def _apply(config: LLMConfig, unrolled: bool = False, mutable: str = ""):
  """The model, compiled once per config and kind of inputs."""
  call = LLM(config, unrolled=unrolled).apply
  return jax.jit(functools.partial(call, mutable=[mutable]))


def _record(config: LLMConfig, variables=None, tokens=None, **inputs):
  """Logits and side values; and every layer's routing. One program a config."""
  tokens = _tokens() if tokens is None else tokens
  variables = _variables(config) if variables is None else variables
  whole = {
    "positions": jnp.broadcast_to(jnp.arange(_N), tokens.shape),
    "segments": jnp.ones_like(tokens),
    "token_mask": jnp.ones(tokens.shape, bool),
  }
  apply = _apply(config, mutable="intermediates")
  outputs, recorded = apply(variables, tokens, **whole | inputs)
  return outputs, recorded.get("intermediates")


def _forward(config: LLMConfig = _CONFIG, variables=None, **inputs):
  return _record(config, variables, **inputs)[0]


@functools.cache
def _reach(config: LLMConfig):
  """A function of segments [N]: [N, N], how much logits n depend on token m."""
  tokens = _tokens(batch=1)

  def output(table, segments):  # [N]
    params = {**_variables(config)["params"], "embed": {"embedding": table}}
    logits, _ = LLM(config).apply(
      {"params": params}, tokens, segments=segments[None]
    )
    return jnp.sin(logits).sum((0, 2))

  jacobian = jax.jit(jax.jacrev(output))  # [N, V, C]
  table = _variables(config)["params"]["embed"]["embedding"]

  def reach(segments):
    moved = np.abs(jacobian(table, jnp.array(segments))).sum(-1)
    return moved[:, np.asarray(tokens[0])]

  return reach


class VisibilityTest(parameterized.TestCase):
  @parameterized.parameters(*_ROUTERS)
  def test_logits_have_no_gradient_of_later_tokens(self, router):
    reach = _reach(_config(router))((1,) * _N)
    np.testing.assert_array_equal(reach > 0, np.tri(_N, dtype=bool))

  @parameterized.parameters(*_ROUTERS)
  def test_logits_have_no_gradient_of_other_segments(self, router):
    segments = (1, 1, 1, 2, 2, 3, 3, 3)
    reach = _reach(_config(router))(segments)
    same = np.equal.outer(segments, segments)
    np.testing.assert_array_equal(reach > 0, np.tri(_N, dtype=bool) & same)

  @parameterized.parameters(*_ROUTERS)
  def test_packed_documents_are_as_those_alone(self, router):
    config, tokens = _config(router), _tokens()
    packed, _ = _forward(
      config,
      tokens=tokens,
      segments=jnp.array([[1, 1, 1, 2, 2, 2, 2, 2]] * 2),
      positions=jnp.array([[0, 1, 2, 0, 1, 2, 3, 4]] * 2),
    )
    first, _ = _forward(config, tokens=tokens)  # what follows is not seen
    second, _ = _forward(config, tokens=jnp.roll(tokens, -3, axis=1))
    np.testing.assert_allclose(packed[:, :3], first[:, :3], atol=1e-5)
    np.testing.assert_allclose(packed[:, 3:], second[:, :5], atol=1e-5)

  def test_scores_follow_the_differences_of_positions(self):
    positions = jnp.broadcast_to(jnp.arange(_N), (_B, _N))
    logits, _ = _forward()
    shifted, _ = _forward(positions=positions + 5)
    np.testing.assert_allclose(shifted, logits, atol=1e-4)
    spread, _ = _forward(positions=positions * 3)
    self.assertGreater(float(jnp.abs(spread - logits).max()), 1e-2)

  @parameterized.parameters(*_ROUTERS)
  def test_left_padding_changes_no_logits(self, router):
    config, tokens = _config(router), _tokens()
    place = jnp.arange(_N) - jnp.array([0, 3])[:, None]
    padded, aux = _forward(
      config,
      tokens=tokens,
      positions=jnp.maximum(place, 0),
      token_mask=place >= 0,
    )
    whole, _ = _forward(config)
    alone, _ = _forward(config, tokens=jnp.roll(tokens, -3, axis=1))
    np.testing.assert_allclose(padded[0], whole[0], atol=1e-5)
    np.testing.assert_allclose(padded[1, 3:], alone[1, :-3], atol=1e-5)
    chex.assert_tree_all_finite((padded, aux))

  def test_padding_does_not_count_in_the_side_values(self):
    mask = jnp.array([[True] * _N, [False] * _N])
    _, aux = _forward(token_mask=mask)
    _, other = _forward(tokens=_tokens().at[1].set(7), token_mask=mask)
    chex.assert_trees_all_close(aux, other, rtol=1e-6)
    _, counted = _forward()
    gap = abs(float(aux.balance_loss) - float(counted.balance_loss))
    self.assertGreater(gap, 1e-4)

  def test_rows_of_a_batch_do_not_see_each_other(self):
    logits, _ = _forward()
    other, _ = _forward(tokens=_tokens().at[0].set(7))
    np.testing.assert_allclose(other[1], logits[1], rtol=1e-5, atol=1e-6)

  def test_too_long_a_sequence_raises(self):
    tokens = jnp.zeros((1, _CONFIG.max_length + 1), jnp.int32)
    with self.assertRaisesRegex(
      ValueError, r"33 tokens exceeds model\.max_length=32"
    ):
      jax.eval_shape(LLM(_CONFIG).apply, _variables(_CONFIG), tokens)
    jax.eval_shape(LLM(_CONFIG).apply, _variables(_CONFIG), tokens[:, 1:])


_UNEQUAL = _config(top_k=(1, 3))
_TIED = _config("query_norm", tie_embeddings=True, num_kv_heads=4)
_BIASED = _config(qkv_bias=True, out_bias=True, mlp_bias=True)


class OutputTest(parameterized.TestCase):
  def test_shapes_and_float32(self):
    logits, aux = _forward()
    chex.assert_shape(logits, (_B, _N, _CONFIG.vocab_size))
    chex.assert_shape([aux.balance_loss, aux.activated_share], ())
    chex.assert_shape(aux.layers["blocks0"].load, (2, 4))
    chex.assert_type(jax.tree.leaves((logits, aux)), jnp.float32)
    np.testing.assert_allclose(aux.activated_share, 0.75)

  def test_runs_of_unequal_layers_are_stacks_of_their_own(self):
    _, aux = _forward(_UNEQUAL)
    self.assertCountEqual(aux.layers, ["blocks0", "blocks1"])
    np.testing.assert_allclose(aux.activated_share, (2 + 4) / 8)

  def test_output_layer_is_what_is_left_out(self):
    # No positions and segments either: one document from its beginning.
    apply = functools.partial(LLM(_CONFIG).apply, with_logits=False)
    x, aux = jax.jit(apply)(_variables(_CONFIG), _tokens())
    kernel = llm.output_kernel(_variables(_CONFIG)["params"], _CONFIG)
    expected, expected_aux = _forward()
    logits = llm.output_logits(x, kernel)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(aux, expected_aux, rtol=1e-6)

  def test_tied_output_layer_is_the_embedding(self):
    params = _variables(_TIED)["params"]
    self.assertNotIn("head", params)
    kernel = llm.output_kernel(params, _TIED)
    np.testing.assert_array_equal(kernel, params["embed"]["embedding"].T)
    untied = dataclasses.replace(_TIED, tie_embeddings=False)
    logits, _ = _forward(
      untied, {"params": params | {"head": {"kernel": kernel}}}
    )
    expected, _ = _forward(_TIED)
    np.testing.assert_allclose(logits, expected, atol=1e-5)

  def test_matrices_start_with_one_deviation(self):
    config = dataclasses.replace(_BIASED, width=64, vocab_size=200)
    init = functools.partial(init_params, LLM(config))
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = unbox(jax.jit(init)(jax.random.key(0), [tokens]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
      name = jax.tree_util.keystr(path)
      if "scale" in name:
        np.testing.assert_array_equal(leaf, 1.0)
      elif "bias" in name:
        np.testing.assert_array_equal(leaf, 0.0)
      else:
        spread = 4 / np.sqrt(leaf.size)
        np.testing.assert_allclose(leaf.std(), 0.02, rtol=spread, err_msg=name)

  @parameterized.parameters(
    ("qkv_bias", ("attn/kv", "attn/q")),
    ("out_bias", ("attn/out",)),
    ("mlp_bias", ("mlp/down", "mlp/gate", "mlp/up")),
  )
  def test_biases_are_there_and_count(self, field, modules):
    alone = _variables(_config(**{field: True}))["params"]["blocks0"]
    paths = traverse_util.flatten_dict(alone, sep="/")
    found = [path for path in paths if path.endswith("bias")]
    self.assertCountEqual(found, [f"{module}/bias" for module in modules])
    logits, _ = _forward(_BIASED)
    for module in modules:
      flat = traverse_util.flatten_dict(_variables(_BIASED), sep="/")
      flat[f"params/blocks0/{module}/bias"] *= 0
      zeroed = traverse_util.unflatten_dict(flat, sep="/")
      without, _ = _forward(_BIASED, zeroed)
      self.assertGreater(float(jnp.abs(logits - without).max()), 1e-3)


class RouterTest(parameterized.TestCase):
  def test_query_norm_with_all_heads_on_is_multi_head_attention_exactly(self):
    plain = _config("none")
    routed = _config("query_norm", top_k=(3, 3))
    variables = _variables(plain)
    chex.assert_trees_all_equal_shapes(variables, _variables(routed))
    logits, aux = _forward(routed, variables)
    expected, _ = _forward(plain, variables)
    np.testing.assert_array_equal(logits, expected)
    self.assertEqual(float(aux.activated_share), 1.0)

  def test_only_the_two_stage_router_has_parameters(self):
    stacks = {r: _variables(_config(r))["params"]["blocks0"] for r in _ROUTERS}
    found = {
      router for router in _ROUTERS if "router" in stacks[router]["attn"]
    }
    self.assertEqual(found, {"two_stage"})

  def test_top_k_as_an_input_is_that_of_the_config(self):
    top_k = jnp.array(_UNEQUAL.top_k, jnp.int32)
    logits, aux = _forward(top_k=top_k)
    params = restack(_variables(_CONFIG)["params"], _CONFIG, _UNEQUAL)
    expected, expected_aux = _forward(_UNEQUAL, {"params": params})
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    for name in ("activated_share", "balance_loss"):
      np.testing.assert_allclose(
        getattr(aux, name), getattr(expected_aux, name), rtol=1e-5
      )

  def test_order_of_heads_is_as_if_the_weights_of_each_layer_were_moved(self):
    order = ((3, 0, 1, 2), (1, 2, 3, 0))
    plain = _config("query_norm", num_kv_heads=4)
    variables = _variables(plain)
    ordered, _ = _forward(
      dataclasses.replace(plain, head_order=order), variables
    )
    moved = jax.tree.map(jnp.copy, variables)
    attn = moved["params"]["blocks0"]["attn"]
    for layer, heads in enumerate(np.array(order)):
      qkv, out = attn["qkv"]["kernel"], attn["out"]["kernel"]
      attn["qkv"]["kernel"] = qkv.at[layer].set(qkv[layer][:, :, heads])
      attn["out"]["kernel"] = out.at[layer].set(out[layer][heads])
    expected, _ = _forward(plain, moved)
    np.testing.assert_allclose(ordered, expected, atol=2e-5)
    unmoved, _ = _forward(plain, variables)
    self.assertGreater(float(jnp.abs(ordered - unmoved).max()), 1e-2)

  def test_gates_of_query_norm_are_zero_or_one(self):
    _, recorded = _record(_config("query_norm"))
    (routing,) = recorded["blocks0"]["attn"]["router"]["routing"]
    chex.assert_shape(routing.gates, (2, _B, _N, 4))
    np.testing.assert_array_equal(np.unique(routing.gates), [0, 1])
    np.testing.assert_array_equal(routing.gates.sum(-1), 3)


class PrecisionTest(parameterized.TestCase):
  def test_router_and_logits_of_bfloat16_are_float32(self):
    config = _config(dtype="bfloat16")
    (logits, aux), recorded = _record(config)
    chex.assert_type(jax.tree.leaves((logits, aux)), jnp.float32)
    chex.assert_type(jax.tree.leaves(_variables(config)), jnp.float32)
    (routing,) = recorded["blocks0"]["attn"]["router"]["routing"]
    chex.assert_type([routing.gates, routing.probs], jnp.float32)
    # Not rounded to bfloat16 on the way.
    rounded = routing.probs.astype(jnp.bfloat16).astype(jnp.float32)
    self.assertGreater(float(jnp.abs(rounded - routing.probs).max()), 1e-4)

  def test_bfloat16_is_close_to_float32(self):
    # Without a router: a rounding cannot choose another head.
    logits, _ = _forward(_config("none", dtype="bfloat16"))
    expected, _ = _forward(_config("none"))
    scale = float(jnp.abs(expected).max())
    gap = float(jnp.abs(logits - expected).max())
    self.assertBetween(gap, 1e-4, 0.05 * scale)

  @parameterized.parameters("full", "dots")
  def test_remat_gives_equal_gradients(self, remat):
    chex.assert_trees_all_close(
      _gradient(_config(remat=remat)), _gradient(_CONFIG), rtol=1e-4, atol=1e-4
    )

  @parameterized.parameters(("none", 0), ("full", 1), ("dots", 1))
  def test_remat_recomputes_the_stack(self, remat, count):
    config = _config(remat=remat)

    def loss(variables):
      return LLM(config).apply(variables, _tokens())[0].sum()

    program = str(jax.make_jaxpr(loss)(_variables(_CONFIG)))
    self.assertEqual(program.count("prevent_cse"), count)

  def test_gradients_are_finite_and_reach_every_parameter(self):
    grads = _gradient(_CONFIG)
    chex.assert_tree_all_finite(grads)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
      name = jax.tree_util.keystr(path)
      self.assertGreater(float(jnp.abs(leaf).max()), 0.0, name)


@functools.cache
def _gradient(config: LLMConfig):
  def loss(variables):
    logits, aux = LLM(config).apply(variables, _tokens())
    return jnp.sum(jnp.sin(logits)) + aux.balance_loss

  return jax.jit(jax.grad(loss))(_variables(_CONFIG))


_CACHED = {
  "two_stage_grouped": (_CONFIG, False),
  "query_norm_tied_mha": (_TIED, True),
  "none_unequal": (_config("none", shared_heads=(4, 3), top_k=(0, 1)), True),
}
_SLOTS, _PROMPT = 12, 4


def _decode(config: LLMConfig, unrolled: bool, dtype: str = "float32"):
  """Logits of every place, [B, N, V], by a cache: a prompt, then one by one."""
  params = _variables(config)["params"]
  if unrolled:
    params = llm.unroll(params, config)
  cache = llm.new_cache(config, _B, _SLOTS, dtype, unrolled=unrolled)
  apply = _apply(config, unrolled, "cache")
  pad = jnp.array([0, 2])[:, None]
  place = jnp.arange(_N) - pad
  logits = []
  for start in (0, *range(_PROMPT, _N)):
    stop = _PROMPT if start == 0 else start + 1
    inputs = {"token_mask": place[:, :stop] >= 0}
    if start:
      slots = jnp.arange(_SLOTS)
      visible = (slots >= pad) & (slots <= start)
      inputs = {"visible": visible[:, None]}
    (out, _), written = apply(
      {"params": params, "cache": cache},
      _tokens()[:, start:stop],
      positions=jnp.maximum(place[:, start:stop], 0),
      slot=jnp.int32(start),
      **inputs,
    )
    cache = written["cache"]
    logits.append(out)
  return jnp.concatenate(logits, axis=1), cache


class CacheTest(parameterized.TestCase):
  def _whole(self, config):
    place = jnp.arange(_N) - jnp.array([0, 2])[:, None]
    logits, _ = _forward(
      config, positions=jnp.maximum(place, 0), token_mask=place >= 0
    )
    return logits

  @parameterized.parameters(*_CACHED)
  def test_logits_of_every_place_are_those_of_the_whole(self, name):
    config, unrolled = _CACHED[name]
    logits, _ = _decode(config, unrolled)
    expected = self._whole(config)
    np.testing.assert_allclose(logits[0], expected[0], atol=2e-5)
    np.testing.assert_allclose(logits[1, 2:], expected[1, 2:], atol=2e-5)

  def test_int8_cache_is_close(self):
    config, unrolled = _CACHED["none_unequal"]
    logits, cache = _decode(config, unrolled, "int8")
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(cache)}
    self.assertEqual(kinds, {"int8", "float32"})
    expected = self._whole(config)
    gap = float(jnp.abs(logits - expected)[0].max())
    self.assertBetween(gap, 1e-5, 0.05 * float(jnp.abs(expected).max()))

  def test_new_cache_has_a_layer_axis_unless_unrolled(self):
    stacked = llm.new_cache(_CONFIG, 3, 5, "int8")
    keys = stacked["blocks0"]["attn"]["keys_values"].k
    chex.assert_shape(keys, (2, 3, 2, 5, 8))
    each = llm.new_cache(_CONFIG, 3, 5, "int8", unrolled=True)
    self.assertCountEqual(each, ["blocks0_0", "blocks0_1"])
    chex.assert_shape(each["blocks0_1"]["attn"]["keys_values"].k, (3, 2, 5, 8))
    for leaf in jax.tree.leaves(each):
      np.testing.assert_array_equal(leaf, 0)


class LayoutTest(parameterized.TestCase):
  def test_unrolled_layers_give_equal_logits(self):
    params = llm.unroll(_variables(_BIASED)["params"], _BIASED)
    names = ["blocks0_0", "blocks0_1"]
    self.assertCountEqual(params, ["embed", "head", "norm", *names])
    apply = jax.jit(LLM(_BIASED, unrolled=True).apply)
    logits, aux = apply({"params": params}, _tokens())
    expected, expected_aux = _forward(_BIASED)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    chex.assert_trees_all_close(aux, expected_aux, rtol=1e-5)

  def test_unrolled_layers_of_several_runs_are_counted_in_each(self):
    config = _config(
      num_heads=(4,) * 3, shared_heads=(1, 1, 2), top_k=(2, 2, 1)
    )
    variables = _variables(config)["params"]
    params = llm.unroll(variables, config)
    names = ["blocks0_0", "blocks0_1", "blocks1_0"]
    self.assertCountEqual(params, ["embed", "head", "norm", *names])
    for name, run, layer in (
      ("blocks0_1", "blocks0", 1),
      ("blocks1_0", "blocks1", 0),
    ):
      for module in ("attn_norm", "mlp_norm"):
        np.testing.assert_array_equal(
          params[name][module]["scale"], variables[run][module]["scale"][layer]
        )
      chex.assert_trees_all_equal(
        params[name]["attn"]["router"],
        jax.tree.map(lambda x: x[layer], variables[run]["attn"]["router"]),  # noqa: B023
      )

  def test_unrolled_kernels_have_their_outputs_first(self):
    whole = _variables(_BIASED)["params"]
    params = llm.unroll(whole, _BIASED)
    ours, theirs = params["blocks0_1"], whole["blocks0"]
    for module, leaf, inputs in (
      ("attn", "q", 1),
      ("attn", "kv", 1),
      ("attn", "out", 2),
      ("mlp", "gate", 1),
      ("mlp", "up", 1),
      ("mlp", "down", 1),
    ):
      kernel = np.asarray(theirs[module][leaf]["kernel"][1])
      last = range(kernel.ndim - inputs, kernel.ndim)
      expected = np.moveaxis(kernel, range(inputs), last)
      np.testing.assert_array_equal(ours[module][leaf]["kernel"], expected)
      bias = theirs[module][leaf]["bias"][1]
      np.testing.assert_array_equal(ours[module][leaf]["bias"], bias)
    np.testing.assert_array_equal(
      params["head"]["kernel"].T,
      llm.output_kernel(whole, _BIASED),
    )

  def test_restack_groups_the_same_layers_in_other_runs(self):
    params = _variables(_CONFIG)["params"]
    split = restack(params, _CONFIG, _UNEQUAL)
    chex.assert_trees_all_equal_shapes(split, _variables(_UNEQUAL)["params"])
    for layer in range(2):
      chex.assert_trees_all_equal(
        jax.tree.map(lambda x: x[0], split[f"blocks{layer}"]),
        jax.tree.map(lambda x: x[layer], params["blocks0"]),  # noqa: B023
      )
    chex.assert_trees_all_equal(restack(split, _UNEQUAL, _CONFIG), params)

  @parameterized.parameters(_CONFIG, _TIED)
  def test_new_tokens_are_the_mean_of_the_old(self, config):
    params = _variables(config)["params"]
    grown = llm.grow_vocabulary(params, 70)
    wanted = dataclasses.replace(config, vocab_size=70)
    chex.assert_trees_all_equal_shapes(grown, _variables(wanted)["params"])
    table = grown["embed"]["embedding"]
    np.testing.assert_array_equal(table[:60], params["embed"]["embedding"])
    mean = np.asarray(params["embed"]["embedding"], np.float64).mean(0)
    np.testing.assert_allclose(table[60:], np.stack([mean] * 10), atol=1e-6)
    if not config.tie_embeddings:
      kernel, old = (p["head"]["kernel"] for p in (grown, params))
      np.testing.assert_array_equal(kernel[:, :60], old)
      mean = np.asarray(old, np.float64).mean(1, keepdims=True)
      np.testing.assert_allclose(kernel[:, 60:], mean.repeat(10, 1), atol=1e-6)

  def test_fit_params_grows_the_vocabulary_and_regroups(self):
    trained = tiny.llm_config()
    wanted = tiny.llm_config(model={"vocab_size": 64, "top_k": (1, 3)})
    params = _variables(_CONFIG)["params"]
    fitted = get_family("llm").fit_params(params, trained, wanted)
    chex.assert_trees_all_equal_shapes(
      fitted, _variables(wanted.model)["params"]
    )
    grown = llm.grow_vocabulary(params, 64)
    chex.assert_trees_all_equal(
      fitted, restack(grown, trained.model, wanted.model)
    )

  def test_fit_params_of_the_same_model_changes_nothing(self):
    config, params = tiny.llm_config(), _variables(_CONFIG)["params"]
    self.assertIs(get_family("llm").fit_params(params, config, config), params)

  def test_parameters_name_their_logical_axes(self):
    init = functools.partial(init_params, LLM(_CONFIG), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    boxed = jax.eval_shape(init, [tokens])
    names = {
      jax.tree_util.keystr(path): leaf.names
      for path, leaf in jax.tree_util.tree_leaves_with_path(
        boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
      )
      if isinstance(leaf, nn.LogicallyPartitioned)
    }
    self.assertEqual(names["['embed']['embedding']"], ("vocab", "embed"))
    self.assertEqual(names["['head']['kernel']"], ("embed", "vocab"))
    self.assertEqual(
      names["['blocks0']['attn']['q']['kernel']"],
      ("layers", "embed", None, "heads", "head_dim"),
    )
    self.assertEqual(
      names["['blocks0']['mlp']['down']['kernel']"], ("layers", "mlp", "embed")
    )


if __name__ == "__main__":
  absltest.main()
