"""Adapters: what they add, merged and apart, and the parameters beside them."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax.traverse_util import flatten_dict

from moh_jax.config import LoraConfig
from moh_jax.layers.linear import adapter_dropout
from moh_jax.models import adapters as lib
from moh_jax.models.registry import make_model
from moh_jax.runtime.parameters import abstract_params, unbox
from tests.training import tiny

_RNG = np.random.RandomState(0)
_ALL = ("*/attn/*", "*/mlp/*", "*modulation*", "embed/*")


def _model(family):
  config = tiny.CONFIGS[family]()
  model, inputs = make_model(config)
  boxed = abstract_params(model, inputs)
  examples = []
  for x in inputs:
    shape = (2, 12) if family == "llm" else (2, *x.shape[1:])
    is_whole = x.dtype == np.int32
    values = _RNG.randint(0, 9, shape) if is_whole else _RNG.normal(size=shape)
    examples.append(np.asarray(values, x.dtype))
  params = tiny.random_params(config)

  def apply(tree, **options):
    return model.apply({"params": tree}, *examples, **options)[0]

  return boxed, params, apply


def _noisy(tree):
  return jax.tree.map(lambda x: x + 0.1 * _RNG.normal(size=x.shape), tree)


class AdaptersTest(parameterized.TestCase):
  @parameterized.parameters(
    *itertools.product(("llm", "dit"), ("float32", "int8")),
    ("llm", "bfloat16"), ("vit", "int8"),
  )  # fmt: skip
  @pytest.mark.integration
  def test_merged_ones_compute_the_same(self, family, dtype):
    boxed, params, apply = _model(family)
    targets = [name for name in _ALL if family == "dit" or name in _ALL[:2]]
    config = LoraConfig(3, 6.0, targets=tuple(targets), base_dtype=dtype)
    adapters = lib.Adapters.of(boxed, config)
    frozen = jax.jit(adapters.freeze)(params)
    first = jax.jit(adapters.begin)(jax.random.key(0), params)
    for tree, boxes in ((first, adapters.trained), (frozen, adapters.frozen)):
      chex.assert_trees_all_equal_shapes_and_dtypes(tree, unbox(boxes))
    # Adapters begin with nothing, and routers with what the network has.
    start = apply(lib.join(frozen, first))
    plain = apply(adapters.merge(lib.join(frozen, first)))
    chex.assert_trees_all_close(start, plain, rtol=0, atol=2e-6)
    if dtype == "float32":
      chex.assert_trees_all_close(plain, apply(params), rtol=0, atol=2e-6)
    trained = jax.tree.map(jnp.asarray, _noisy(first))
    joined = lib.join(frozen, trained)
    merged = adapters.merge(joined)
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, params)
    out = apply(joined)
    self.assertGreater(float(jnp.abs(out - start).max()), 1e-3)
    np.testing.assert_allclose(
      out, apply(merged), atol=1e-5 * float(jnp.abs(out).max())
    )

  @pytest.mark.integration
  def test_only_named_parts_of_a_kernel_adapt(self):
    boxed, params, _ = _model("dit")
    config = LoraConfig(3, targets=("*/q", "*/v"), whole=())
    adapters = lib.Adapters.of(boxed, config)
    trained = adapters.begin(jax.random.key(0), params)
    paths = {"/".join(path[1:]) for path in flatten_dict(trained)}
    self.assertEqual(paths, {"attn/qkv/lora_a", "attn/qkv/lora_b"})
    frozen = adapters.freeze(params)

    def loss(trained):
      merged = adapters.merge(lib.join(frozen, trained))
      return jnp.square(merged["blocks0"]["attn"]["qkv"]["kernel"]).sum()

    grads = jax.grad(loss)(trained)["blocks0"]["attn"]["qkv"]
    # Both factors of the keys are 0, so that neither gets a gradient.
    for part, adapts in enumerate((True, False, True)):
      a = trained["blocks0"]["attn"]["qkv"]["lora_a"][:, :, part]
      self.assertEqual(bool(a.any()), adapts)
      self.assertEqual(bool(grads["lora_b"][:, part].any()), adapts)
      self.assertFalse(grads["lora_a"][:, :, part].any())  # since B is 0

  @pytest.mark.integration
  def test_quantized_kernels_are_near_and_small(self):
    boxed, params, _ = _model("llm")
    adapters = lib.Adapters.of(boxed, LoraConfig(2, base_dtype="int8"))
    frozen = adapters.freeze(params)
    for path, leaf in flatten_dict(frozen).items():
      if path[-1] == "kernel" and "mlp" in path:
        self.assertEqual(leaf.dtype, jnp.int8)
        scale = frozen[path[0]]["mlp"][path[2]]["kernel_scale"]
        given = flatten_dict(params)[path]
        self.assertEqual(scale.shape, (len(given), 1, given.shape[-1]))
        error = np.abs(leaf * scale - given)
        self.assertTrue((error <= scale / 2 + 1e-7).all())
      if path[-1] == "embedding":
        self.assertEqual(leaf.dtype, jnp.bfloat16)

  @parameterized.parameters("llm", "dit", "vit")
  @pytest.mark.integration
  def test_the_backward_pass_keeps_kernels_as_they_are_stored(self, family):
    boxed, params, apply = _model(family)
    kept, kernels = {}, 0
    for dtype in ("float32", "bfloat16", "int8"):
      adapters = lib.Adapters.of(boxed, LoraConfig(2, base_dtype=dtype))
      frozen = jax.eval_shape(adapters.freeze, params)
      first = jax.eval_shape(adapters.begin, jax.random.key(0), params)

      def backward(frozen, trained):
        return jax.vjp(lambda tree: apply(lib.join(frozen, tree)), trained)[1]

      leaves = jax.tree.leaves(jax.eval_shape(backward, frozen, first))
      kept[dtype] = sum(x.size * x.dtype.itemsize for x in leaves)
      kernels = sum(x.size for x in leaves if x.dtype == dtype)
    self.assertGreater(kernels, 0)
    self.assertGreater(kept["float32"] - kept["bfloat16"], 1.9 * kernels)
    self.assertGreater(kept["float32"] - kept["int8"], 2.7 * kernels)

  @pytest.mark.integration
  def test_dropout_changes_adapters_alone(self):
    boxed, params, apply = _model("llm")
    adapters = lib.Adapters.of(boxed, LoraConfig(2, whole=()))
    frozen = adapters.freeze(params)
    first = adapters.begin(jax.random.key(0), params)
    trained = jax.tree.map(jnp.asarray, _noisy(first))

    def at(tree, seed, rate):
      with adapter_dropout(rate):
        return apply(tree, rngs={"dropout": jax.random.key(seed)})

    at = jax.jit(at, static_argnums=2)
    joined, plain = lib.join(frozen, trained), lib.join(frozen, first)
    np.testing.assert_array_equal(at(plain, 0, 0.5), at(plain, 0, 0.0))
    self.assertTrue((at(joined, 0, 0.5) != at(joined, 1, 0.5)).any())
    # Their mean over draws is what they are without.
    few, many = (
      np.mean([at(joined, s, 0.1) for s in range(n)], 0) - apply(joined)
      for n in (1, 64)
    )
    self.assertLess(np.abs(many).mean(), np.abs(few).mean() / 3)

  @parameterized.parameters(
    ({"targets": ("*/up", "*/query")}, r"targets: '\*/query' matches none of "),
    ({"whole": ("*/router/*", "*norm*", "x")}, "whole: 'x' matches none of "),
  )
  def test_patterns_that_match_nothing_are_refused(self, fields, words):
    boxed, _, _ = _model("llm")
    with self.assertRaisesRegex(ValueError, f"tune.lora.{words}"):
      lib.Adapters.of(boxed, LoraConfig(2, **fields))
