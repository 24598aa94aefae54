"""Parameters of stored runs, with the adapters as a part of them or apart.

A checkpoint of a run with adapters holds what was trained alone. The frozen
parameters are those of `train.init_from`, which may be a run with adapters too.
"""

from typing import Any

import jax
from etils import epath
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from moh_jax.config import Config
from moh_jax.models.adapters import Adapters, join, without_adapters
from moh_jax.models.registry import fit_params, make_model
from moh_jax.runtime import checkpoint, steps
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.parameters import abstract_boxed, abstract_params


def read_params(
  metadata: Metadata,
  directory: str | epath.Path,
  step: int,
  abstract: Any,
  mesh: Mesh | None,
  *,
  use_ema: bool = True,
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
    adapted: False leaves adapters out.

  Raises:
    FileNotFoundError: adapters lack the model that they were trained on.
    ValueError: parameters are damaged, or that model is another one.
  """
  config = metadata.config
  if not config.tune.lora.rank:
    return checkpoint.restore_params(directory, step, abstract, use_ema=use_ema)
  adapters = Adapters.of(abstract_params(*make_model(config)), config.tune.lora)
  frozen = read_frozen(config, adapters, mesh, metadata.base_mark)
  trained = abstract_boxed(adapters.trained, mesh)
  trained = checkpoint.restore_params(directory, step, trained, use_ema=use_ema)

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
) -> Any:
  """Reads the parameters that a run with adapters does not train.

  Args:
    config: of the run.
    adapters: of the run.
    mesh: the devices; None is the first device alone.
    expected: mark of the parameters that the adapters were trained on.

  Raises:
    FileNotFoundError: `train.init_from` is not there any more.
    ValueError: it is damaged, or another model.
  """
  source = config.train.init_from
  step = int(expected.partition(":")[0])
  try:
    metadata, _ = checkpoint.read_metadata(source, step)
  except FileNotFoundError as error:
    raise FileNotFoundError(
      f"train.init_from={source!r}, which the adapters were trained on, is not "
      f"there: {error}; name its new place"
    ) from error
  if (found := steps.mark(source, step)) != expected:
    raise ValueError(
      f"train.init_from={source!r} holds other parameters ({found}) than those "
      f"that the adapters were trained on ({expected})"
    )
  stored = base_abstract(metadata.config, adapters, mesh)
  params = read_params(metadata, source, step, stored, mesh)

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
