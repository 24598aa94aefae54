"""MoH-ViT: image classifiers on a TransNeXt backbone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moh_jax.config import Config, ViTConfig
from moh_jax.config.family import register_family
from moh_jax.families.images import ImageFamily, check_channels


class ViTFamily(ImageFamily):
  """MoH-ViT and TransNeXt."""

  name = "vit"
  model = ViTConfig
  commands = frozenset({"classify"})
  position_bias = True
  formats = {"moh-vit": ("moh-vit",), "transnext": ("transnext",)}

  def check(self, config: Config) -> None:
    """Classifiers read images, normalized per channel."""
    if config.data.source == "latents":
      raise ValueError(
        "data.source='latents' is for diffusion models, model.family='vit'"
      )
    check_channels(config)

  def released(self) -> Mapping[str, ViTConfig]:
    """MoH-ViT and TransNeXt by released name."""
    from moh_jax.config.sizes_vit import VIT_MODELS

    return VIT_MODELS

  def released_run(
    self, model: ViTConfig, tensors: Mapping[str, Any]
  ) -> Config:
    """Evaluation as in the release; the classes are those of the tensors."""
    from moh_jax.convert import vit

    return vit.released_run(model, tensors)

  def make_model(self, config: Config) -> tuple:
    """Images [1, X, Y, channels] float32."""
    import jax

    from moh_jax.models.vit import ViT

    shape = (1, *config.model.input_shape)
    return ViT(config.model), (jax.ShapeDtypeStruct(shape, "float32"),)

  def make_task(self, config: Config, decode: Any = None) -> Any:
    """Image classification."""
    from moh_jax.training import classification

    del decode
    return classification.make_task(config)

  def make_evaluate(
    self,
    model: Any,
    config: Config,
    *,
    class_names: tuple[str, ...] = (),
    tokenizer_sha256: str = "",
  ) -> Any:
    """Accuracy on the held-out split."""
    from moh_jax.training import classification

    del tokenizer_sha256
    return classification.make_evaluate(model, config, class_names)

  def conversion_rules(self, model: ViTConfig) -> list:
    """Names of the public PyTorch releases."""
    from moh_jax.convert import vit

    return vit.model_rules(model)

  def resized(self, config: Config, size: int) -> Config:
    """Position tables and the crop of evaluation follow the size."""
    model = config.model
    pretrain = model.pretrain_image_size or model.image_size[0]
    # Keep the ratio of crop to resize that the model was evaluated with.
    resize = config.data.eval_resize * size // model.image_size[0]
    return dataclasses.replace(
      config,
      model=dataclasses.replace(
        model, image_size=(size, size), pretrain_image_size=pretrain
      ),
      data=dataclasses.replace(config.data, eval_resize=resize),
    )


register_family(ViTFamily())
