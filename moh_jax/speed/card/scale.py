"""How much `bench card` measures: all of it on a card, next to nothing on CPUs.

A CPU takes the same way through the same code, so that tests can run it.
"""

import dataclasses
from typing import Any

from moh_jax import config as config_lib

MODES = ("forward", "causal", "forward_backward", "causal_forward_backward")


@dataclasses.dataclass(frozen=True)
class ModelCase:
  """A model whose training step is measured.

  Attributes:
    name: of the stage.
    model: the model section.
    batch: examples per step on a card of 80 GB, to begin with.
    length: tokens of a sequence; None for images.
  """

  name: str
  model: Any
  batch: int
  length: int | None = None


@dataclasses.dataclass(frozen=True)
class Scale:
  """Shapes of the stages; of several, those of the most value come first.

  Attributes:
    dtype: compute dtype of all but the exactness.
    dtypes: dtypes whose exactness is checked.
    heads: query heads of core, layer and decode.
    head_dims: head dims of core and decode.
    exact_head_dims: head dims whose exactness is checked in bfloat16.
    exact_tokens: tokens of a sequence in these checks.
    lengths: tokens of a sequence of the core.
    first_lengths: how many of `lengths` are measured in every mode before the
      others are begun.
    layer_lengths: the same of the layer.
    slots: slots of the cache.
    tokens: tokens of a batch of core and layer.
    texts: texts that decode at once.
    shares: percentages of the heads that are active.
    rounds: measured turns.
    models: models whose training step is measured.
  """

  dtype: str
  dtypes: tuple[str, ...]
  heads: int
  head_dims: tuple[int, ...]
  exact_head_dims: tuple[int, ...]
  exact_tokens: int
  lengths: tuple[int, ...]
  first_lengths: int
  layer_lengths: tuple[int, ...]
  slots: tuple[int, ...]
  tokens: int
  texts: int
  shares: tuple[float, ...]
  rounds: int
  models: tuple[ModelCase, ...]


def scale_for(platform: str) -> Scale:
  """The shapes for a platform."""
  return _tiny() if platform == "cpu" else _full()


def _full() -> Scale:
  baselines = {
    "dit-xl2": ("moh-dit-xl2-90", 256, None),
    "vit-b": ("moh-vit-b50", 128, None),
    "llm-b": ("moh-llm-b-50", 32, 2048),
  }
  models = []
  for released, batch, length in baselines.values():
    model = _in_bfloat16(config_lib.released_model(released))
    models.append(ModelCase(released, model, batch, length))
  for name, (released, batch, length) in baselines.items():
    model = _in_bfloat16(config_lib.released_model(released))
    baseline = config_lib.without_router(model)
    models.append(ModelCase(f"{name}-mha", baseline, batch, length))
  return Scale(
    dtype="bfloat16",
    dtypes=("bfloat16", "float32"),
    heads=32,
    head_dims=(64, 128),
    exact_head_dims=(64, 128, 256),
    exact_tokens=512,
    lengths=(4096, 8192, 16384, 512, 256, 1024, 2048),
    first_lengths=3,
    layer_lengths=(512, 4096, 256, 1024),
    slots=(4096, 1024),
    tokens=16384,
    texts=32,
    shares=(50, 75, 90.625),
    rounds=5,
    models=tuple(models),
  )


def _in_bfloat16(model: Any) -> Any:
  return dataclasses.replace(model, dtype="bfloat16")


def _tiny() -> Scale:
  model = config_lib.LLMConfig(
    vocab_size=60,
    max_length=32,
    width=16,
    mlp_dim=24,
    num_heads=(4,),
    num_kv_heads=2,
    head_dim=8,
    shared_heads=(1,),
    top_k=(2,),
  )
  return Scale(
    dtype="float32",
    dtypes=("float32",),
    heads=4,
    head_dims=(8,),
    exact_head_dims=(8,),
    exact_tokens=32,
    lengths=(256,),
    first_lengths=1,
    layer_lengths=(32,),
    slots=(16,),
    tokens=512,
    texts=2,
    shares=(50,),
    rounds=1,
    models=(ModelCase("tiny", model, 2, 16),),
  )
