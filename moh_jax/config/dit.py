"""The sections of MoH-DiT: network, diffusion, sampling and autoencoder."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from moh_jax.config import base
from moh_jax.config.layers import ImageModel, LayerStack
from moh_jax.config.registry import get_source
from moh_jax.config.run import Config, Fields


@dataclasses.dataclass(frozen=True)
class LatentScaling(base.Section):
  """How latents become the input of a diffusion model, of about unit variance.

  The input is ((latents - mean) / std - shift) * scale. The defaults are those
  of Stable Diffusion 1 and 2.

  Attributes:
    scale: diffusers' `scaling_factor`.
    shift: diffusers' `shift_factor`.
    mean: of each channel, () is 0: diffusers' `latents_mean`.
    std: of each channel, () is 1: diffusers' `latents_std`.
  """

  NAME = "latents"

  scale: base.Positive = 0.18215
  shift: base.Number = 0.0
  mean: tuple[base.Number, ...] = ()
  std: tuple[base.Positive, ...] = ()

  def affine(self, channels: int) -> tuple[list[float], list[float]]:
    """Offset and factor: the input is (latents - offset) * factor.

    Args:
      channels: of the latents.
    """
    mean, std = self.mean or (0.0,) * channels, self.std or (1.0,) * channels
    offset = [m + self.shift * s for m, s in zip(mean, std)]
    return offset, [self.scale / s for s in std]


@dataclasses.dataclass(frozen=True)
class VAEConfig(base.Section):
  """Convolutional autoencoder of Stable Diffusion (arXiv:2112.10752).

  The defaults are the public sizes (diffusers' AutoencoderKL).

  Attributes:
    block_out_channels: width of each resolution, the full one first; each
      further one halves the sides.
    layers_per_block: residual blocks of each resolution in the encoder; the
      decoder has one more.
    image_channels: channels of the images.
    latent_channels: channels of the latents.
    norm_groups: groups of every GroupNorm.
    norm_eps: epsilon of every GroupNorm.
    use_quant_conv: whether a 1x1 convolution ends the encoder.
    use_post_quant_conv: whether a 1x1 convolution begins the decoder.
    mid_attention: whether attention stands between the residual blocks at the
      lowest resolution.
    scaling: how diffusion models read its latents.
    dtype: compute dtype, "float32" or "bfloat16"; parameters, norms, softmax
      and results stay float32.
  """

  NAME = "vae"

  block_out_channels: tuple[base.Count, ...] = (128, 256, 512, 512)
  layers_per_block: base.Count = 2
  image_channels: base.Count = 3
  latent_channels: base.Count = 4
  norm_groups: base.Count = 32
  norm_eps: Annotated[float, base.Range(1e-12, 1)] = 1e-6
  use_quant_conv: bool = True
  use_post_quant_conv: bool = True
  mid_attention: bool = True
  scaling: LatentScaling = LatentScaling()
  dtype: base.Dtype = "float32"

  def check(self) -> None:
    """Groups divide the widths; the scaling has the channels of latents."""
    channels = self.latent_channels
    for name in ("mean", "std"):
      if len(getattr(self.scaling, name)) not in (0, channels):
        self.scaling.fail(name, f"must have {channels} values, one per channel")
    widths = self.block_out_channels
    if not widths or any(width % self.norm_groups for width in widths):
      groups = f"multiples of vae.norm_groups={self.norm_groups}"
      self.fail("block_out_channels", f"must be {groups}, at least one")

  @property
  def downscale(self) -> int:
    """Side of an image over the side of its latents."""
    return 2 ** (len(self.block_out_channels) - 1)


FLOW = "flow"
DIFFUSION_METHODS = ("ddpm", "ddim", "dpm")
FLOW_METHODS = ("euler", "heun")


@dataclasses.dataclass(frozen=True)
class DiffusionConfig(base.Section):
  """The diffusion process and its training objective.

  Attributes:
    space: what the model reads and predicts: "latent" (latents of the Stable
      Diffusion autoencoder) or "pixel".
    latent_scale: factor that brings latents to about unit variance; None is
      that of the data, with the three that follow, or Stable Diffusion's.
    latent_shift: subtracted before, see `LatentScaling`.
    latent_mean: of each channel, () is 0.
    latent_std: of each channel, () is 1.
    schedule: noise levels of the steps: "linear" betas (arXiv:2006.11239),
      "cosine" (arXiv:2102.09672), or "flow", the straight path of flow matching
      (arXiv:2210.02747) as in SiT (arXiv:2401.08740).
    steps: timesteps of the training process, at least 21.
    prediction: what the network predicts: "epsilon" (the noise), "x0" (the
      clean example) or "v" (arXiv:2202.00512); "velocity" (noise minus clean
      example) for "flow", and for it alone.
    vb_weight: weight of the variational bound that trains a learned variance.
  """

  NAME = "diffusion"
  # Those of the objective.
  RUNTIME_FIELDS = ("vb_weight",)
  NUMERIC_FIELDS = ("space", "schedule", "steps", "prediction")

  space: Literal["latent", "pixel"] = "latent"
  latent_scale: base.Positive | None = None
  latent_shift: base.Number = 0.0
  latent_mean: tuple[base.Number, ...] = ()
  latent_std: tuple[base.Positive, ...] = ()
  schedule: Literal["linear", "cosine", "flow"] = "linear"
  # The linear betas scale with 1000 / steps and must stay below 1.
  steps: Annotated[int, base.Range(21)] = 1000
  prediction: Literal["epsilon", "x0", "v", "velocity"] = "epsilon"
  vb_weight: base.Amount = 1.0

  def check(self) -> None:
    """Flow matching predicts velocities."""
    is_flow = self.schedule == FLOW
    if is_flow != (self.prediction == "velocity"):
      wanted = "'velocity'" if is_flow else "'epsilon', 'x0' or 'v'"
      self.fail("prediction", f"must be {wanted} for {self.schedule!r}")

  @property
  def scaling(self) -> LatentScaling:
    """How latents become the model's input."""
    scale = self.latent_scale or LatentScaling.scale
    others = self.latent_shift, self.latent_mean, self.latent_std
    return LatentScaling(scale, *others)


@dataclasses.dataclass(frozen=True)
class SampleConfig(base.Section):
  """How images are sampled: a run's grids, and defaults of `sample`.

  Attributes:
    every: optimizer steps between grids of samples; 0 writes none, None is a
      fifth of `train.steps`, from 20 to 1,000.
    num: images of a grid.
    labels: of the grid's images in turn; -1 is no label. Empty goes through
      the classes.
    zoom: repeats of a pixel of a grid, each way; 0 is to 112 pixels of width.
    method: sampler: "ddpm" (ancestral), "ddim" (arXiv:2010.02502) or "dpm"
      (DPM-Solver++ 2M, arXiv:2211.01095); for flow matching "euler" or "heun",
      which evaluates the network twice a step.
    steps: timesteps visited: "N" spread evenly ("dpm": evenly in the logarithm
      of the signal-to-noise ratio), "ddimN" at a fixed stride, or "N,M,..." for
      that many in each of equal sections; for flow matching "N".
    eta: noise that "ddim" adds, as a part of what the ancestral sampler adds:
      0, none, to 1.
    cfg_scale: strength of classifier-free guidance (arXiv:2207.12598); 1 is
      none, 0 samples without labels.
    cfg_channels: channels that are guided: the first "three", as released, or
      "all".
  """

  NAME = "sample"

  every: base.Natural | None = 0
  num: base.Count = 16
  labels: tuple[Annotated[int, base.Range(-1)], ...] = ()
  zoom: Annotated[int, base.Range(0, 64)] = 0
  method: Literal["ddpm", "ddim", "dpm", "euler", "heun"] = "ddpm"
  steps: str = "250"
  eta: base.Share = 0.0
  cfg_scale: base.Amount = 1.5
  cfg_channels: Literal["three", "all"] = "three"

  # All of them: they train nothing.
  RUNTIME_FIELDS = (
    *("every", "num", "labels", "zoom", "method", "steps", "eta"),
    *("cfg_scale", "cfg_channels"),
  )


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

  family: Literal["dit"] = "dit"
  input_size: tuple[base.Count, base.Count] = (32, 32)
  channels: base.Count | None = None
  num_classes: base.Count | None = None
  patch_size: base.Count = 2
  width: base.Count = 384
  num_heads: tuple[base.Natural, ...] = (6,) * 12
  head_dim: base.Count = 64
  shared_heads: tuple[base.Natural, ...] = (3,) * 8 + (6,) * 4
  top_k: tuple[base.Natural, ...] = (2,) * 8 + (0,) * 4
  mlp_ratio: base.Positive = 4.0
  label_dropout: Annotated[float, base.Range(0, 0.999)] = 0.1
  learn_sigma: bool = True

  SECTIONS = {"diffusion": DiffusionConfig, "sample": SampleConfig}
  SIZE = "input_size"
  INPUTS = frozenset({"patch", "embed"})
  CLASS_PARAMS = frozenset({"embed/label/embedding"})
  HAS_TIME = True
  MLP_MATRICES = 2  # between the width and that of the MLP

  def check(self) -> None:
    """Widths, patches and head splits add up."""
    if self.width % 4:  # sines and cosines of rows and columns
      self.fail("width", "must be a multiple of 4")
    size = self.patch_size
    if any(side % size for side in self.input_size):
      self.fail("input_size", f"must be multiples of model.patch_size={size}")
    super().check()

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

  def with_mlp_dim(self, dim: int) -> "DiTConfig":
    """The section with another width of the MLP."""
    return dataclasses.replace(self, mlp_ratio=(dim + 0.5) / self.width)

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
    _check_labels(run)
    _check_steps(run)
    if run.diffusion.space != "latent":  # latents are normalized already
      self.check_channels(run)

  def inherited(self, trained: Config, stated: Mapping[str, Any]) -> Fields:
    """As for all images, the process of the weights, and how they sample.

    Labels belong to the data of that run.
    """
    sections = {n: dataclasses.asdict(s) for n, s in trained.sections.items()}
    sections["sample"] |= {"labels": ()}
    return {**super().inherited(trained, stated), **sections}


# Fields of `data` that change pixels; latents have their defaults.
_OF_PIXELS = "augment", "auto_augment", "random_erasing", "eval_resize"


def _check_space(run: Config) -> None:
  data, space = run.data, run.diffusion.space
  holds, is_latent = get_source(data).holds, space == "latent"
  made = ", as `prepare encode-latents` writes them," if is_latent else ""
  kind = "latents" if is_latent else "images"
  if kind not in holds:
    data.fail("source", f"must hold {kind}{made} for diffusion.space={space!r}")
  if "images" not in holds:
    for name in _OF_PIXELS:
      if getattr(data, name) != (neutral := getattr(type(data), name)):
        # They were cropped and mirrored when they were encoded.
        data.fail(name, f"must be {neutral!r} for latents")
  for name in ("mean", "std"):
    if not is_latent and {*(getattr(data, name) or ())} - {0.5}:
      data.fail(name, "must be 0.5 for diffusion.space='pixel': [-1, 1]")


def _check_labels(run: Config) -> None:
  sample, classes = run.sample, run.model.num_classes
  if classes is not None and max(sample.labels, default=-1) >= classes:
    sample.fail("labels", f"must be in [-1, {classes - 1}]")
  if run.model.label_dropout:
    return
  lack = "a model with model.label_dropout=0 has no unconditional form"
  if -1 in sample.labels:
    sample.fail("labels", f"must be at least 0: {lack}")
  if sample.cfg_scale != 1:
    sample.fail("cfg_scale", f"must be 1: {lack}")


def _check_steps(run: Config) -> None:
  sample, diffusion = run.sample, run.diffusion
  schedule = f"the schedule {diffusion.schedule!r}"
  is_flow = diffusion.schedule == FLOW
  methods = FLOW_METHODS if is_flow else DIFFUSION_METHODS
  if sample.method not in methods:
    sample.fail("method", f"must be one of {methods} for {schedule}")
  if sample.eta and sample.method != "ddim":
    sample.fail("eta", f"must be 0 for sample.method={sample.method!r}")
  if is_flow:
    if run.model.learn_sigma:  # its samplers have no variance
      run.model.fail("learn_sigma", "must be False for the schedule 'flow'")
    if not re.fullmatch("[1-9][0-9]*", sample.steps):
      sample.fail("steps", "must be a number of at least 1")
  else:
    try:
      spaced_timesteps(diffusion.steps, sample.steps)
    except ValueError as error:
      raise ValueError(f"sample.{error}") from error


def spaced_timesteps(num_steps: int, spacing: str) -> list[int]:
  """Timesteps that a shorter process keeps, ascending.

  Args:
    num_steps: timesteps of the training process.
    spacing: "N", N of them spread evenly from the first to the last; "ddimN",
      N at a fixed stride from the first (arXiv:2010.02502); or "N,M,...", that
      many from each of equal sections. "10,5" of 100 timesteps are 10 of the
      first 50 and 5 of the last 50.

  Raises:
    ValueError: more steps than the process (or a section) has, or a stride
      that no integer gives.
  """
  counts = spacing.removeprefix("ddim").split(",")
  is_strided = spacing.startswith("ddim")
  well_formed = all(re.fullmatch(r"\s*0*[1-9][0-9]{0,8}\s*", n) for n in counts)
  if not well_formed or (is_strided and len(counts) > 1):
    raise ValueError(
      f"steps={spacing!r} must be N, 'ddimN' or 'N,M,...' with numbers of at "
      "least 1"
    )
  if is_strided:
    count = int(counts[0])
    # The smallest stride that takes at most so many steps.
    kept = range(0, num_steps, -(-num_steps // count))
    if len(kept) != count:
      raise ValueError(
        f"steps='ddim{count}' must be the number of steps that an integer "
        f"stride takes through {num_steps} timesteps"
      )
    return list(kept)
  size, extra = divmod(num_steps, len(counts))
  kept, start = [], 0
  for section, count in enumerate(map(int, counts)):
    length = size + (section < extra)
    if count > length:
      raise ValueError(
        f"steps={spacing!r} asks for {count} of the {length} timesteps in "
        f"section {section + 1} of {len(counts)}; the process has {num_steps}"
      )
    stride = (length - 1) / (count - 1) if count > 1 else 1.0
    place = 0.0  # accumulated and rounded half to even, as released
    for _ in range(count):
      kept.append(start + round(place))
      place += stride
    start += length
  return kept
