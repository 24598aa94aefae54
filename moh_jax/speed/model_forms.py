"""The form of attention that the layers of a run get, and what it computes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from moh_jax.config import Config, LayerGroup, get_family
from moh_jax.ops.attention_forms import AttentionCase, choose_form
from moh_jax.ops.target import Target, has_cudnn, target
from moh_jax.runtime.sharding import BATCH_AXES, head_placement


@dataclasses.dataclass(frozen=True)
class LayerForm:
  """How a layer computes attention.

  Attributes:
    name: of the form, see `ops.attention_forms`, or "window".
    heads: heads that attention computes over all heads.
    keys: keys that it computes over those that tokens see, on average. Blocks
      that are hidden in part count by what is seen.
  """

  name: str
  heads: float = 1.0
  keys: float = 1.0


def attention_form(
  config: Config,
  group: LayerGroup,
  mesh: Sequence[int] = (1, 1),
  device: Target | None = None,
  *,
  examples: int = 1,
  tokens: int | None = None,
) -> LayerForm:
  """The form that a layer has in training.

  Args:
    config: of the run.
    group: the layer's.
    mesh: sizes of the axes tensor and sequence, which split the heads.
    device: which computes its part of the heads, with the libraries that its
      kind can have; None is one like those of this machine.
    examples: that the device computes at a time.
    tokens: of an example; None is the most that the layer takes.

  Raises:
    ValueError: the form that the config asks for is impossible there.
  """
  if group.sees == "window":
    return LayerForm("window")
  model, budget, tokens = config.model, group.budget, tokens or group.tokens
  every = model.router.needs_all_heads or model.router.varies
  every = every or changes_heads(config)
  share = 1.0 if every else budget.share
  devices = math.prod(mesh)
  if (placement := head_placement(group, *mesh)) is None:
    devices = 1
  elif share < 1 and not group.orders:
    share = max(placement.expected_active(budget)) * devices / budget.num_heads
  causal = group.sees == "before"
  case = AttentionCase(
    target=device or target(),
    batch=examples,
    queries=tokens,
    keys=tokens,
    num_heads=budget.num_heads // devices,
    head_dim=budget.head_dim,
    share=share,
    causal=causal,
    masked=causal,  # texts are packed, in training
    biased=get_family(model.family).position_bias,
    dtype=model.dtype,
    has_cudnn=device is not None or has_cudnn(),
  )
  form = choose_form(model.attention_impl, case)
  hidden = causal and form.name == "dense"
  return LayerForm(
    form.name,
    share if form.packs else 1.0,
    2 * tokens / (tokens + 1) if hidden else 1.0,
  )


def changes_heads(config: Config) -> bool:
  """Whether the number of active heads changes in a run, down to its own."""
  tune = config.sections.get("tune")
  return tune is not None and bool(tune.top_k_steps)


def step_forms(
  config: Config, sizes: Mapping[str, int], device: Target | None = None
) -> tuple[LayerForm, ...]:
  """The form of each group of equal layers in a training step.

  Args:
    config: of the run.
    sizes: of the mesh's axes; those that are left out are 1.
    device: as in `attention_form`.
  """
  shards = math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)
  examples = config.data.batch_size // (shards * config.optim.accumulation)
  return tuple(
    attention_form(
      config,
      group,
      [sizes.get(axis, 1) for axis in ("tensor", "sequence")],
      device,
      examples=max(1, examples),
      tokens=getattr(config.data, "sequence_length", None),
    )
    for group in config.model.layer_groups()
  )


def summary(config: Config, forms: Sequence[LayerForm]) -> tuple[str, float]:
  """Names of a run's forms, and the share of all heads that they compute.

  Args:
    config: of the run.
    forms: of its groups of layers.
  """
  groups = config.model.layer_groups()
  heads = [group.depth * group.budget.num_heads for group in groups]
  computed = sum(n * form.heads for n, form in zip(heads, forms))
  names = dict.fromkeys(form.name for form in forms)
  return ", ".join(names), computed / sum(heads)
