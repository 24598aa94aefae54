"""The model section of MoH-DiT."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moh_jax.config.checks import (
  MOST_SIDE,
  MOST_TOKENS,
  MOST_WIDTH,
  at_least,
  at_most,
  in_range,
)
from moh_jax.config.diffusion import (
  FLOW,
  MOST_FLOW_STEPS,
  DiffusionConfig,
  SampleConfig,
)
from moh_jax.config.layers import ImageModel, LayerStack
from moh_jax.config.run import Config
from moh_jax.config.sources import get_source
from moh_jax.config.spacing import spaced_timesteps


@dataclasses.dataclass(frozen=True)
class DiTConfig(LayerStack, ImageModel):
  """Diffusion transformer (arXiv:2212.09748) with or without MoH.

  The head tuples hold one value per layer.

  Attributes:
    family: "dit".
    input_size: rows and columns of the input: latents, or pixels.
    channels: channels of the input, 4 for latents of Stable Diffusion; None is
      those of the data.
    num_classes: labels; None is those of the data.
    patch_size: rows and columns of the input that make one token.
    width: C, a multiple of 4.
    num_heads: heads of each layer; the length of the tuple is the depth.
    head_dim: width of a head; heads x head_dim need not equal the width.
    shared_heads: heads of each layer that are on for every token, the first
      ones.
    top_k: heads of each layer that a token chooses among the others.
    mlp_ratio: the MLP's width F as a ratio: F is floor(C * ratio).
    label_dropout: share of training examples that lose their label, in [0, 1),
      which teaches the unconditional model that guidance needs; 0 leaves it
      out.
    learn_sigma: whether to predict the variance too, in as many further
      channels.
    dtype: compute dtype of the layers' branches, "float32" or "bfloat16";
      parameters, residual stream, conditioning, both ends, router and softmax
      stay float32.
  """

  family: str = "dit"
  input_size: tuple[int, int] = (32, 32)
  channels: int | None = None
  num_classes: int | None = None
  patch_size: int = 2
  width: int = 384
  num_heads: tuple[int, ...] = (6,) * 12
  head_dim: int = 64
  shared_heads: tuple[int, ...] = (3,) * 8 + (6,) * 4
  top_k: tuple[int, ...] = (2,) * 8 + (0,) * 4
  mlp_ratio: float = 4.0
  label_dropout: float = 0.1
  learn_sigma: bool = True

  SECTIONS = {"diffusion": DiffusionConfig, "sample": SampleConfig}
  INPUTS = frozenset({"patch", "embed"})
  CLASS_AXES = {("embed", "label", "embedding"): 0}  # then, the null label

  def __post_init__(self):
    self.check_common("dit")
    at_least("model", 1, self, "channels", "head_dim", most=MOST_WIDTH)
    at_most("model", MOST_WIDTH, self, "width")
    at_least("model", 1, self, "num_classes", most=MOST_TOKENS)
    at_least("model", 1, self, "patch_size", most=MOST_SIDE)
    at_most("model", MOST_SIDE, self, "input_size")
    at_most("model", 1024, self, "mlp_ratio")
    in_range("model", 0, 0.999, self, "label_dropout")
    if self.width < 4 or self.width % 4:
      raise ValueError(
        f"model.width={self.width} must be a multiple of 4: sines and cosines "
        "of rows and columns"
      )
    if self.width * self.mlp_ratio < 1:
      raise ValueError(
        f"model.mlp_ratio={self.mlp_ratio} leaves no MLP column at width "
        f"{self.width}"
      )
    sides = self.input_size
    if min(sides) < 1 or any(side % self.patch_size for side in sides):
      raise ValueError(
        f"model.input_size={sides} must be multiples of model.patch_size="
        f"{self.patch_size}"
      )
    self.check_layers()

  @property
  def input_shape(self) -> tuple[int, int, int]:
    """Rows, columns and channels of an example."""
    return (*self.input_size, self.channels)

  @property
  def grid(self) -> tuple[int, int]:
    """Rows and columns of tokens."""
    rows, columns = self.input_size
    return rows // self.patch_size, columns // self.patch_size

  @property
  def num_tokens(self) -> int:
    """N."""
    return self.grid[0] * self.grid[1]

  @property
  def out_channels(self) -> int:
    """Channels of the output: the prediction, then the variance if learned."""
    return self.channels * (2 if self.learn_sigma else 1)

  @property
  def mlp_dim(self) -> int:
    """F."""
    return int(self.width * self.mlp_ratio)

  @property
  def example_inputs(self) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Inputs [1, X, Y, channels] float32, timesteps [1], labels [1] int32."""
    number = ((1,), "int32")
    return (((1, *self.input_shape), "float32"), number, number)

  def token_grids(self) -> tuple[tuple[int, int], ...]:
    """The grid of patches, in every layer."""
    return (self.grid,) * len(self.layer_groups())

  def check_run(self, run: Config) -> None:
    """The data is in the space of the diffusion; sampling steps exist."""
    _check_space(run)
    _check_sampling(run)
    if run.diffusion.space != "latent":  # latents are normalized already
      self.check_channels(run)

  def inherited(
    self, trained: Config, stated: Mapping[str, Any]
  ) -> dict[str, dict[str, Any]]:
    """As for all images, the process of the weights, and how they sample.

    Labels and the reference of FID belong to the data of that run.
    """
    sections = {n: dataclasses.asdict(s) for n, s in trained.sections.items()}
    sections["sample"] |= {"labels": (), "fid_images": 0, "fid_reference": ""}
    return {**super().inherited(trained, stated), **sections}


# Fields of `data` that change pixels, and their values for latents.
_NEUTRAL = {
  "augment": "none",
  "auto_augment": "",
  "color_jitter": 0.0,
  "random_erasing": 0.0,
  "eval_resize": 0,
}


def _check_space(run: Config) -> None:
  data = run.data
  space, holds = run.diffusion.space, get_source(data).holds
  if ("latents" if space == "latent" else "images") not in holds:
    raise ValueError(
      f"diffusion.space={space!r} and data.source={data.source!r} do not go "
      "together: 'latent' needs 'latents', as `encode-latents` writes them, "
      "and 'pixel' an image source"
    )
  if "images" not in holds:
    for name, neutral in _NEUTRAL.items():
      if (value := getattr(data, name)) != neutral:
        raise ValueError(
          f"data.{name}={value!r} must be {neutral!r} for latents, which are "
          "cropped and mirrored when they are encoded"
        )
  if space == "pixel" and {*(data.mean or ()), *(data.std or ())} - {0.5}:
    raise ValueError(
      f"data.mean={data.mean} and data.std={data.std} must be 0.5 "
      "for diffusion.space='pixel': pixels in [-1, 1]"
    )


def _check_sampling(run: Config) -> None:
  sample, diffusion = run.sample, run.diffusion
  if sample.method not in diffusion.methods:
    raise ValueError(
      f"sample.method={sample.method!r} must be one of {diffusion.methods} for "
      f"diffusion.schedule={diffusion.schedule!r}"
    )
  if sample.eta and sample.method != "ddim":
    raise ValueError(
      f"sample.eta={sample.eta} must be 0 for sample.method={sample.method!r}: "
      "it is the noise of 'ddim'"
    )
  if diffusion.schedule == FLOW:
    _check_flow(run)
  else:
    try:
      spaced_timesteps(diffusion.steps, sample.steps)
    except ValueError as error:
      raise ValueError(f"sample.{error}") from error
  if sample.cfg_interval[0] >= diffusion.steps:
    raise ValueError(
      f"sample.cfg_interval={sample.cfg_interval} must begin below "
      f"diffusion.steps={diffusion.steps}"
    )
  classes = run.model.num_classes
  if classes is not None and max(sample.labels, default=-1) >= classes:
    raise ValueError(
      f"sample.labels={sample.labels} must be in [-1, {classes - 1}]"
    )
  if -1 in sample.labels and not run.model.label_dropout:
    raise ValueError(
      f"sample.labels={sample.labels}: a model with model.label_dropout=0 has "
      "no label that stands for none"
    )
  if sample.cfg_scale != 1 and not run.model.label_dropout:
    raise ValueError(
      f"sample.cfg_scale={sample.cfg_scale} must be 1 for a model with "
      "model.label_dropout=0: it has no unconditional form to guide away from"
    )


def _check_flow(run: Config) -> None:
  if run.model.learn_sigma:
    raise ValueError(
      "model.learn_sigma=True must be False for diffusion.schedule='flow': its "
      "samplers have no variance"
    )
  steps = run.sample.steps
  if not steps.isdecimal() or not 1 <= int(steps[:9]) <= MOST_FLOW_STEPS:
    raise ValueError(
      f"sample.steps={steps!r} must be a number in [1, {MOST_FLOW_STEPS}] for "
      "diffusion.schedule='flow'"
    )
