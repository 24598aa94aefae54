"""MoH-DiT: class-conditional diffusion transformers."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from moh_jax import config as config_lib
from moh_jax.config import Config, DiTConfig
from moh_jax.config.diffusion import FLOW, MOST_FLOW_STEPS
from moh_jax.config.registry import register_family
from moh_jax.config.sources import get_source
from moh_jax.config.spacing import spaced_timesteps
from moh_jax.families.images import ImageFamily

_EMA_DECAY = 0.9999  # of the released recipe
_TIME_GROUPS = 10  # ranges of timesteps that head statistics tell apart


class DiTFamily(ImageFamily):
  """MoH-DiT and DiT."""

  name = "dit"
  model = DiTConfig
  sections = {
    "diffusion": config_lib.DiffusionConfig,
    "sample": config_lib.SampleConfig,
  }
  commands = frozenset({"sample"})
  inputs = frozenset({"patch", "embed"})
  class_axes = {("embed", "label", "embedding"): 0}  # then, the null label
  formats = {"moh-dit": ("moh-dit",), "dit": ("dit",), "diffusers": ()}
  exports = ("", "diffusers")

  def check(self, config: Config) -> None:
    """The data is in the space of the diffusion; sampling steps exist."""
    _check_space(config)
    _check_sampling(config)
    if config.diffusion.space != "latent":  # latents are normalized already
      self.check_channels(config)

  def inherited(
    self, trained: Config, stated: Mapping[str, Any]
  ) -> dict[str, dict[str, Any]]:
    """As for all images, the process of the weights, and how they sample.

    Labels and the reference of FID belong to the data of that run.
    """
    found = super().inherited(trained, stated)
    sections = {n: dataclasses.asdict(s) for n, s in trained.sections.items()}
    sections["sample"] |= {"labels": (), "fid_images": 0, "fid_reference": ""}
    return {**found, **sections}

  def released(self) -> Mapping[str, DiTConfig]:
    """MoH-DiT and DiT by released name."""
    from moh_jax.config.sizes_dit import DIT_MODELS

    return DIT_MODELS

  def bench_run(self, model: DiTConfig, batch: int) -> Config:
    """Latent diffusion with averaged parameters, as released."""
    return Config(
      model=model,
      data=self.data(batch_size=batch),
      optim=config_lib.OptimConfig(ema_decay=_EMA_DECAY),
    )

  def make_model(self, config: Config) -> tuple:
    """Inputs [1, X, Y, channels] float32, timesteps [1], labels [1] int32."""
    import jax

    from moh_jax.models.dit import DiT

    shape = (1, *config.model.input_shape)
    number = jax.ShapeDtypeStruct((1,), "int32")
    inputs = (jax.ShapeDtypeStruct(shape, "float32"), number, number)
    return DiT(config.model), inputs

  def fit_params(self, params: Any, trained: Config, wanted: Config) -> Any:
    """Stacks the layers as the wanted head budgets group them."""
    from moh_jax.models.restack import restack

    return restack(params, trained.model, wanted.model)

  def tasks(self) -> Any:
    """Denoising of examples; denoising losses on held-out ones."""
    from moh_jax.training import denoising

    return denoising

  def further_metrics(self, config: Config, mesh: Any, decode: Any) -> Any:
    """The metric "fid", where `sample.fid_images` asks for it.

    Raises:
      FileNotFoundError: a file that the section `sample` names is missing.
      ValueError: the files do not belong together, or latents lack `decode`.
    """
    sample = config.sample
    if not sample.fid_images:
      return None
    import jax

    from moh_jax.convert.inception import load_inception
    from moh_jax.evaluation.image_metrics import make_extractor
    from moh_jax.evaluation.statistics_files import read_statistics
    from moh_jax.models import inception
    from moh_jax.models.weights_hash import params_sha256
    from moh_jax.runtime import sharding
    from moh_jax.training.sampled_fid import make_fid

    sizes = inception.POOL_DIM, inception.SPATIAL_DIM
    reference = read_statistics(sample.fid_reference, *sizes)
    params = load_inception(sample.fid_inception)
    ours = {"resize": sample.fid_resize, "inception": params_sha256(params)}
    reference.check_made_with(ours, sample.fid_reference)
    params = jax.device_put(params, sharding.replicated(mesh))
    features = make_extractor(inception.InceptionV3(), sample.fid_resize)

    def extract(images: Any) -> Any:
      return features(params, images).pool3

    return make_fid(config, reference.pool3, extract, decode)

  def token_grids(self, model: DiTConfig) -> tuple[tuple[int, int], ...]:
    """The grid of patches, in every layer."""
    return (model.grid,) * len(model.layer_groups())

  def probe(self, model: Any, config: Config) -> Any:
    """Noisy examples by class and by timestep."""
    import jax.numpy as jnp

    from moh_jax.analysis.probe import Grouping, Probe
    from moh_jax.diffusion.process import make_process, q_sample
    from moh_jax.evaluation.denoising import noise_of_index

    process = make_process(config.diffusion.schedule, config.diffusion.steps)
    steps = process.num_steps
    parts = min(_TIME_GROUPS, steps)
    bounds = [part * steps // parts for part in range(parts + 1)]
    names = [f"{a}-{b - 1}" for a, b in itertools.pairwise(bounds)]

    def apply(params: Any, batch: Any, **options: Any) -> Any:
      x0, labels = batch["image"], batch["label"]
      t, noise = noise_of_index(batch["index"], x0.shape[1:], process)
      x = q_sample(process, x0, t, noise)
      times = jnp.asarray(process.timesteps)[t]
      return model.apply({"params": params}, x, times, labels, **options)

    def time_group(batch: Any) -> Any:
      shape = batch["image"].shape[1:]
      t, _ = noise_of_index(batch["index"], shape, process)
      inner = jnp.asarray(bounds[1:-1], jnp.int32)
      return (t[:, None] >= inner[None]).sum(-1)

    timestep = Grouping(tuple(names), time_group)
    return Probe(
      apply,
      groupings={"timestep": timestep},
      grids=self.token_grids(config.model),
    )

  def measure_inference(
    self, options: Any, run: Config, models: Mapping[str, Any]
  ) -> tuple[list[Any], dict[str, Any]]:
    """Time of a guided sampler."""
    from moh_jax.speed import sampling

    return [], {"sampler": sampling.measure(options, run)}

  def converter(self) -> Any:
    """Tensor names of the public PyTorch releases."""
    from moh_jax.convert.dit import CONVERTER

    return CONVERTER


# Fields of `data` that change pixels, and their values for latents.
_NEUTRAL = {
  "augment": "none",
  "auto_augment": "",
  "color_jitter": 0.0,
  "random_erasing": 0.0,
  "eval_resize": 0,
}


def _check_space(config: Config) -> None:
  data = config.data
  space, holds = config.diffusion.space, get_source(data).holds
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


def _check_sampling(config: Config) -> None:
  sample, diffusion = config.sample, config.diffusion
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
    _check_flow(config)
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
  classes = config.model.num_classes
  if classes is not None and max(sample.labels, default=-1) >= classes:
    raise ValueError(
      f"sample.labels={sample.labels} must be in [-1, {classes - 1}]"
    )
  if -1 in sample.labels and not config.model.label_dropout:
    raise ValueError(
      f"sample.labels={sample.labels}: a model with model.label_dropout=0 has "
      "no label that stands for none"
    )
  if sample.cfg_scale != 1 and not config.model.label_dropout:
    raise ValueError(
      f"sample.cfg_scale={sample.cfg_scale} must be 1 for a model with "
      "model.label_dropout=0: it has no unconditional form to guide away from"
    )


def _check_flow(config: Config) -> None:
  if config.model.learn_sigma:
    raise ValueError(
      "model.learn_sigma=True must be False for diffusion.schedule='flow': its "
      "samplers have no variance"
    )
  steps = config.sample.steps
  if not steps.isdecimal() or not 1 <= int(steps[:9]) <= MOST_FLOW_STEPS:
    raise ValueError(
      f"sample.steps={steps!r} must be a number in [1, {MOST_FLOW_STEPS}] for "
      "diffusion.schedule='flow'"
    )


register_family(DiTFamily())
