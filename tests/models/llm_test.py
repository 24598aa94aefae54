"""The language model: who sees whom, caches, routers, layouts of parameters."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from flax import traverse_util

from moh_jax.config import LLMConfig, RotaryConfig
from moh_jax.models.llm import LLM, output_kernel, output_logits
from moh_jax.models.registry import restack
from moh_jax.runtime.sharding import init_params, unbox
from tests.models import small


@functools.cache
def _reach(config: LLMConfig):
  """A function of segments [N]: [N, N], how much logits n depend on token m."""
  tokens = small.random_tokens(batch=1)

  def output(table, segments):  # [N]
    params = {
      **small.random_variables(config)["params"],
      "embed": {"embedding": table},
    }
    logits, _ = LLM(config).apply(
      {"params": params}, tokens, segments=segments[None]
    )
    return jnp.sin(logits).sum((0, 2))

  jacobian = jax.jit(jax.jacrev(output))  # [N, V, C]
  table = small.random_variables(config)["params"]["embed"]["embedding"]

  def reach(segments):
    moved = np.abs(jacobian(table, jnp.array(segments))).sum(-1)
    return moved[:, np.asarray(tokens[0])]

  return reach


class VisibilityTest(parameterized.TestCase):
  @parameterized.parameters(*small.ROUTERS)
  def test_logits_have_gradients_of_what_they_may_see(self, router):
    reach = _reach(small.changed(router))
    for segments in ((1,) * small.N, (1, 1, 1, 2, 2, 3, 3, 3)):
      seen = np.tri(small.N, dtype=bool) & np.equal.outer(segments, segments)
      np.testing.assert_array_equal(reach(segments) > 0, seen)

  @parameterized.parameters(
    *({"router": router} for router in small.ROUTERS),
    # Documents keep a dynamic base of their own.
    {"rope": RotaryConfig(scaling="dynamic", factor=4.0, original_length=2)},
  )
  def test_packed_documents_are_as_those_alone(self, **changes):
    config, tokens = small.changed(**changes), small.random_tokens()
    packed, _ = small.forward(
      config,
      tokens,
      segments=jnp.array([[1, 1, 1, 2, 2, 2, 2, 2]] * 2),
      positions=jnp.array([[0, 1, 2, 0, 1, 2, 3, 4]] * 2),
    )
    for part in (slice(0, 3), slice(3, 8)):
      alone, _ = small.forward(config, tokens[:, part])
      np.testing.assert_allclose(packed[:, part], alone, atol=1e-5)

  def test_scores_follow_the_differences_of_positions(self):
    positions = jnp.broadcast_to(jnp.arange(small.N), (small.B, small.N))
    logits, _ = small.forward()
    shifted, _ = small.forward(positions=positions + 5)
    np.testing.assert_allclose(shifted, logits, atol=1e-4)
    spread, _ = small.forward(positions=positions * 3)
    self.assertGreater(float(jnp.abs(spread - logits).max()), 1e-2)

  @parameterized.parameters(*small.ROUTERS)
  def test_left_padding_changes_no_logits(self, router):
    config, tokens = small.changed(router), small.random_tokens()
    place = jnp.arange(small.N)[None] - jnp.array([0, 3])[:, None]
    padded, aux = small.forward(
      config, tokens, positions=jnp.maximum(place, 0), token_mask=place >= 0
    )
    whole, _ = small.forward(config)
    alone, _ = small.forward(config, jnp.roll(tokens, -3, axis=1))
    np.testing.assert_allclose(padded[0], whole[0], atol=1e-5)
    np.testing.assert_allclose(padded[1, 3:], alone[1, :-3], atol=1e-5)
    chex.assert_tree_all_finite((padded, aux))

  def test_padding_does_not_count_in_the_side_values(self):
    mask = jnp.array([[True] * small.N, [False] * small.N])
    _, aux = small.forward(token_mask=mask)
    _, other = small.forward(
      small.LLM, small.random_tokens().at[1].set(7), token_mask=mask
    )
    chex.assert_trees_all_close(aux, other, rtol=1e-6)
    _, counted = small.forward()
    gap = abs(float(aux.balance_loss) - float(counted.balance_loss))
    self.assertGreater(gap, 1e-4)


class OutputTest(parameterized.TestCase):
  def test_output_layer_is_what_is_left_out(self):
    # No positions and segments either: one document from its beginning.
    apply = functools.partial(LLM(small.CONFIG).apply, with_logits=False)
    x, aux = jax.jit(apply)(
      small.random_variables(small.CONFIG), small.random_tokens()
    )
    kernel = output_kernel(
      small.random_variables(small.CONFIG)["params"], small.CONFIG
    )
    expected, expected_aux = small.forward()
    logits = output_logits(x, kernel)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(aux, expected_aux, rtol=1e-6)

  def test_tied_output_layer_is_the_embedding(self):
    params = small.random_variables(small.TIED)["params"]
    self.assertNotIn("head", params)
    kernel = output_kernel(params, small.TIED)
    np.testing.assert_array_equal(kernel, params["embed"]["embedding"].T)
    untied = dataclasses.replace(small.TIED, tie_embeddings=False)
    logits, _ = small.forward(
      untied, variables={"params": params | {"head": {"kernel": kernel}}}
    )
    expected, _ = small.forward(small.TIED)
    np.testing.assert_allclose(logits, expected, atol=1e-5)

  def test_matrices_start_with_one_deviation(self):
    config = dataclasses.replace(small.BIASED, width=64, vocab_size=200)
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

  def test_parameters_name_their_logical_axes(self):
    init = functools.partial(init_params, LLM(small.CONFIG), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    boxed = jax.eval_shape(init, [tokens])
    block = boxed["blocks0"]
    for leaf, *names in (
      (boxed["embed"]["embedding"], "vocab", "embed"),
      (boxed["head"]["kernel"], "embed", "vocab"),
      (block["attn"]["q"]["kernel"], "layers", "embed", None, "heads",
       "head_dim"),
      (block["mlp"]["down"]["kernel"], "layers", "mlp", "embed"),
    ):  # fmt: skip
      self.assertSequenceEqual(leaf.names, names)

  @parameterized.parameters(
    (small.changed(qkv_bias=True), ("attn/kv/bias", "attn/q/bias")),
    (small.changed(out_bias=True), ("attn/out/bias",)),
    (
      small.changed(mlp_bias=True),
      ("mlp/down/bias", "mlp/gate/bias", "mlp/up/bias"),
    ),
    (small.NORMED, ("attn/q_norm/scale", "attn/k_norm/scale")),
  )
  def test_optional_parameters_are_there_and_count(self, config, paths):
    flat = traverse_util.flatten_dict(small.random_variables(config), sep="/")
    plain = traverse_util.flatten_dict(
      small.random_variables(small.CONFIG), sep="/"
    )
    paths = [f"params/blocks0/{path}" for path in paths]
    more = [path for path in flat.keys() - plain if "router" not in path]
    self.assertCountEqual(more, paths)
    logits, _ = small.forward(config)
    for path in paths:
      moved = traverse_util.unflatten_dict(
        {**flat, path: 2 * flat[path]}, sep="/"
      )
      changed, _ = small.forward(config, variables=moved)
      self.assertGreater(float(jnp.abs(logits - changed).max()), 1e-3)


class RouterTest(parameterized.TestCase):
  def test_query_norm_with_all_heads_on_is_multi_head_attention_exactly(self):
    plain = small.changed("none")
    routed = small.changed("query_norm", top_k=(3, 3))
    variables = small.random_variables(plain)
    self.assertNotIn("router", variables["params"]["blocks0"]["attn"])
    chex.assert_trees_all_equal_shapes(
      variables, small.random_variables(routed)
    )
    logits, aux = small.forward(routed, variables=variables)
    expected, _ = small.forward(plain, variables=variables)
    np.testing.assert_array_equal(logits, expected)
    self.assertEqual(float(aux.activated_share), 1.0)

  def test_top_k_as_an_input_is_that_of_the_config(self):
    top_k = jnp.array(small.UNEQUAL.top_k, jnp.int32)
    logits, aux = small.forward(top_k=top_k)
    params = restack(
      small.random_variables(small.CONFIG)["params"],
      small.CONFIG,
      small.UNEQUAL,
    )
    expected, expected_aux = small.forward(
      small.UNEQUAL, variables={"params": params}
    )
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    for name in ("activated_share", "balance_loss"):
      np.testing.assert_allclose(
        getattr(aux, name), getattr(expected_aux, name), rtol=1e-5
      )

  def test_order_of_heads_is_as_if_the_weights_of_each_layer_were_moved(self):
    order = ((3, 0, 1, 2), (1, 2, 3, 0))
    plain = small.changed("query_norm", num_kv_heads=4)
    variables = small.random_variables(plain)
    ordered, _ = small.forward(
      dataclasses.replace(plain, head_order=order), variables=variables
    )
    moved = jax.tree.map(jnp.copy, variables)
    attn = moved["params"]["blocks0"]["attn"]
    for layer, heads in enumerate(np.array(order)):
      qkv, out = attn["qkv"]["kernel"], attn["out"]["kernel"]
      attn["qkv"]["kernel"] = qkv.at[layer].set(qkv[layer][:, :, heads])
      attn["out"]["kernel"] = out.at[layer].set(out[layer][heads])
    expected, _ = small.forward(plain, variables=moved)
    np.testing.assert_allclose(ordered, expected, atol=2e-5)
    unmoved, _ = small.forward(plain, variables=variables)
    self.assertGreater(float(jnp.abs(ordered - unmoved).max()), 1e-2)

  def test_gates_of_query_norm_are_zero_or_one(self):
    _, recorded = small.record(small.changed("query_norm"))
    (routing,) = recorded["blocks0"]["attn"]["router"]["routing"]
    chex.assert_shape(routing.gates, (2, small.B, small.N, 4))
    np.testing.assert_array_equal(np.unique(routing.gates), [0, 1])
    np.testing.assert_array_equal(routing.gates.sum(-1), 3)


class PrecisionTest(parameterized.TestCase):
  def test_router_and_logits_of_bfloat16_are_float32(self):
    config = small.changed(dtype="bfloat16")
    (logits, aux), recorded = small.record(config)
    chex.assert_type(jax.tree.leaves((logits, aux)), jnp.float32)
    chex.assert_type(
      jax.tree.leaves(small.random_variables(config)), jnp.float32
    )
    (routing,) = recorded["blocks0"]["attn"]["router"]["routing"]
    chex.assert_type([routing.gates, routing.probs], jnp.float32)
    # Not rounded to bfloat16 on the way.
    rounded = routing.probs.astype(jnp.bfloat16).astype(jnp.float32)
    self.assertGreater(float(jnp.abs(rounded - routing.probs).max()), 1e-4)
