"""Parameters of stored runs, with the adapters as a part of them or apart.

A checkpoint of a run with adapters holds what was trained alone. The frozen
parameters are those of `train.init_from`, which may be a run with adapters too.
"""

from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.models.adapters import Adapters, join, without_adapters
from moh_jax.models.registry import fit_params, make_model
from moh_jax.runtime import checkpoint
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.sharding import abstract_boxed, abstract_params

_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # of xxHash


def read_params(
  metadata: Metadata,
  directory: str | epath.Path,
  step: int,
  abstract: Any,
  mesh: Mesh | None,
  *,
  use_ema: bool = True,
  verify: bool = True,
  adapted: bool = True,
) -> Any:
  """Reads the parameters of a checkpoint's network.

  Args:
    metadata: of the checkpoint.
    directory: its working directory.
    step: of the checkpoint.
    abstract: the network's parameters as ShapeDtypeStructs with shardings.
    mesh: the devices; None is the first device alone.
    use_ema: prefer averaged parameters where there are any.
    verify: compare what is read with its checksums first.
    adapted: False leaves adapters out.

  Raises:
    FileNotFoundError: adapters lack the model that they were trained on.
    ValueError: parameters are damaged, or that model is another one.
  """
  config = metadata.config
  how = {"use_ema": use_ema, "verify": verify}
  if not config.tune.lora.rank:
    return checkpoint.restore_params(directory, step, abstract, **how)
  adapters = Adapters.of(abstract_params(*make_model(config)), config.tune.lora)
  frozen = read_frozen(config, adapters, mesh, metadata.base_mark, verify)
  trained = abstract_boxed(adapters.trained, mesh)
  trained = checkpoint.restore_params(directory, step, trained, **how)

  def merge(trained: Any, frozen: Any) -> Any:
    params = join(frozen, trained)
    merged = adapters.merge(params if adapted else without_adapters(params))
    return jax.tree.map(lambda x, to: x.astype(to.dtype), merged, abstract)

  shardings = jax.tree.map(lambda x: x.sharding, abstract)
  return jax.jit(merge, out_shardings=shardings)(trained, frozen)


def read_frozen(
  config: Config,
  adapters: Adapters,
  mesh: Mesh | None,
  expected: str,
  verify: bool = True,
) -> Any:
  """Reads the parameters that a run with adapters does not train.

  Args:
    config: of the run.
    adapters: of the run.
    mesh: the devices; None is the first device alone.
    expected: mark of the parameters that the adapters were trained on.
    verify: compare what is read with its checksums first.

  Raises:
    FileNotFoundError: `train.init_from` is not there any more.
    ValueError: it is damaged, or another model.
  """
  source = config.train.init_from
  step, _, _ = expected.partition(":")
  try:
    metadata, step = checkpoint.read_metadata(source, int(step), verify=verify)
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f"train.init_from={source!r}, which the adapters were trained on, is not "
      f"there: {error}; name its new place"
    ) from error
  stored = base_abstract(metadata.config, adapters, mesh)
  params = read_params(metadata, source, step, stored, mesh, verify=verify)
  found = base_mark(step, params)
  if found != expected:
    raise ValueError(
      f"train.init_from={source!r} holds other parameters ({found}) than those "
      f"that the adapters were trained on ({expected})"
    )

  def freeze(params: Any) -> Any:
    return adapters.freeze(
      fit_params(params, metadata.config.model, config.model)
    )

  held = abstract_boxed(adapters.frozen, mesh)
  shardings = jax.tree.map(lambda x: x.sharding, held)
  return jax.jit(freeze, out_shardings=shardings, donate_argnums=0)(params)


def base_abstract(config: Config, adapters: Adapters, mesh: Mesh | None) -> Any:
  """What to read the parameters of a run into, that adapters are trained on.

  Args:
    config: of that run.
    adapters: their matrices may be held in 16 bits, and are read so.
    mesh: the devices; None is the first device alone.
  """
  boxed = abstract_params(*make_model(config))
  dtypes = {
    path: leaf.dtype
    for path, leaf in flatten_dict(abstract_boxed(adapters.base, mesh)).items()
  }
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf.update(
      dtype=dtypes.get(tuple(key.key for key in path), leaf.dtype)
    ),
    abstract_boxed(boxed, mesh),
  )


def base_mark(step: int, params: Any) -> str:
  """What a run with adapters stores of the checkpoint that it is trained on.

  Args:
    step: of the checkpoint.
    params: its parameters.

  Returns:
    "STEP:HASH".
  """
  return f"{step}:{params_hash(params)}"


def params_hash(params: Any) -> str:
  """Identifies parameters by their bits, on whatever devices they lie.

  Nothing is copied to the host, as `registry.params_sha256` does.

  Args:
    params: tree of arrays.

  Returns:
    32 hexadecimal digits.
  """

  def mixed(x: jax.Array) -> jax.Array:
    for prime, shift in zip(_PRIMES, (15, 13, 16)):
      x = (x ^ (x >> shift)) * jnp.uint32(prime)
    return x ^ (x >> 15)

  def one(leaf: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
    place = jnp.zeros(leaf.shape, jnp.uint32)
    for axis, size in enumerate(leaf.shape):
      index = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
      place = place * jnp.uint32(size) + index
    word = mixed(bits.astype(jnp.uint32) + mixed(place))
    return jnp.stack(
      [
        mixed(word + jnp.uint32(seed)).sum(dtype=jnp.uint32)
        for seed in range(4)
      ]
    )

  def whole(params: Any) -> jax.Array:
    flat = flatten_dict(params, sep="/")
    sums = [one(flat[name]) for name in sorted(flat)]
    total = jnp.zeros(4, jnp.uint32)
    for each in sums:
      total = mixed(total + each)
    return total

  words = jax.device_get(jax.jit(whole)(params))
  return "".join(f"{int(word):08x}" for word in words)
