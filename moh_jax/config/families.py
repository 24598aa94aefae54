"""What each family's config consists of, and how its sections fit together."""

import dataclasses
from collections.abc import Callable
from typing import Any

from moh_jax.config.classifier import ClassifierConfig
from moh_jax.config.diffusion import DiffusionConfig, SampleConfig
from moh_jax.config.dit import DiTConfig
from moh_jax.config.llm import LLMConfig
from moh_jax.config.sections import DataConfig
from moh_jax.config.spacing import spaced_timesteps
from moh_jax.config.text import TextDataConfig, TuneConfig
from moh_jax.config.vit import ViTConfig


@dataclasses.dataclass(frozen=True)
class Family:
  """A family's config.

  Attributes:
    model: its model section.
    data: its data section.
    sections: sections that only some families have.
    check: refuses a config whose sections do not fit together.
  """

  model: type
  data: type
  check: Callable[[Any], None]
  sections: dict[str, type] = dataclasses.field(default_factory=dict)


def _check_vit(config: Any) -> None:
  if config.data.source == "latents":
    raise ValueError(
      "data.source='latents' is for diffusion models, model.family='vit'"
    )
  _check_channels(config)


def _check_channels(config: Any) -> None:
  mean, channels = config.data.mean, config.model.channels
  if mean is not None and channels is not None and len(mean) != channels:
    raise ValueError(
      f"data.mean={mean} must have model.channels={channels} values"
    )


def _check_dit(config: Any) -> None:
  _check_space(config)
  _check_sampling(config)
  if config.diffusion.space != "latent":  # latents are normalized already
    _check_channels(config)


def _check_space(config: Any) -> None:
  data = config.data
  space, source = config.diffusion.space, data.source
  if (space == "latent") != (source == "latents") and source != "fake":
    raise ValueError(
      f"diffusion.space={space!r} and data.source={source!r} do not go "
      "together: 'latent' needs 'latents', as `encode-latents` writes them, "
      "and 'pixel' an image source"
    )
  if source == "latents":
    for name, neutral in (("augment", "none"), ("eval_resize", 0)):
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


def _check_sampling(config: Any) -> None:
  sample, diffusion = config.sample, config.diffusion
  try:
    spaced_timesteps(diffusion.steps, sample.steps)
  except ValueError as error:
    raise ValueError(f"sample.{error}") from error
  if sample.cfg_interval[0] >= diffusion.steps:
    raise ValueError(
      f"sample.cfg_interval={sample.cfg_interval} must begin below "
      f"diffusion.steps={diffusion.steps}"
    )
  if sample.cfg_scale != 1 and not config.model.label_dropout:
    raise ValueError(
      f"sample.cfg_scale={sample.cfg_scale} must be 1 for a model with "
      "model.label_dropout=0: it cannot do without labels"
    )


def _check_llm(config: Any) -> None:
  model, data, tune = config.model, config.data, config.tune
  if data.sequence_length > model.max_length:
    raise ValueError(
      f"data.sequence_length={data.sequence_length} must be at most "
      f"model.max_length={model.max_length}, the range of its positions"
    )
  if not tune.top_k_values:
    return
  routing = [budget for budget in model.budgets() if budget.top_k]
  top_k = {budget.top_k for budget in routing}
  if top_k != {tune.top_k_values[-1]}:
    raise ValueError(
      f"tune.top_k_values={tune.top_k_values} must end with the model.top_k of "
      f"the layers that route, {tuple(sorted(top_k))}"
    )
  if tune.top_k_steps[-1] >= config.train.steps:
    raise ValueError(
      f"tune.top_k_steps={tune.top_k_steps} must end before train.steps="
      f"{config.train.steps}"
    )
  least = min(budget.routed for budget in routing)
  if max(tune.top_k_values) > least:
    raise ValueError(
      f"tune.top_k_values={tune.top_k_values} must be at most the {least} "
      "routed heads of a layer"
    )


FAMILIES = {
  "vit": Family(
    ViTConfig, DataConfig, _check_vit, {"classifier": ClassifierConfig}
  ),
  "dit": Family(
    DiTConfig,
    DataConfig,
    _check_dit,
    {"diffusion": DiffusionConfig, "sample": SampleConfig},
  ),
  "llm": Family(LLMConfig, TextDataConfig, _check_llm, {"tune": TuneConfig}),
}
