"""MoH-ViT: image classifiers on a TransNeXt backbone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moh_jax.config import Config, ViTConfig
from moh_jax.config.registry import register_family
from moh_jax.families.images import ImageClassifierFamily


class ViTFamily(ImageClassifierFamily):
  """MoH-ViT and TransNeXt."""

  name = "vit"
  model = ViTConfig
  position_bias = True
  class_axes = {("head", "kernel"): 1, ("head", "bias"): 0}
  formats = {"moh-vit": ("moh-vit",), "transnext": ("transnext",)}

  def released(self) -> Mapping[str, ViTConfig]:
    """MoH-ViT and TransNeXt by released name."""
    from moh_jax.config.sizes_vit import VIT_MODELS

    return VIT_MODELS

  def inherited(
    self, trained: Config, stated: Mapping[str, Any]
  ) -> dict[str, dict[str, Any]]:
    """As for all images; coordinates keep the size of the pre-training."""
    found = super().inherited(trained, stated)
    size = trained.model.image_size
    if "image_size" in stated and stated["image_size"] != size:
      found["model"] |= _pretrained(trained.model)
    return found

  def stack_names(self, model: ViTConfig) -> tuple[str, ...]:
    """The stages."""
    return tuple(f"stage{i + 1}" for i in range(len(model.depths)))

  def token_grids(self, model: ViTConfig) -> tuple[tuple[int, int], ...]:
    """The grids of the stages."""
    return tuple(shape.grid for shape in model.stage_shapes())

  def make_model(self, config: Config) -> tuple:
    """Images [1, X, Y, channels] float32."""
    import jax

    from moh_jax.models.vit import ViT

    shape = (1, *config.model.input_shape)
    return ViT(config.model), (jax.ShapeDtypeStruct(shape, "float32"),)

  def converter(self) -> Any:
    """Tensor names of the public PyTorch releases."""
    from moh_jax.convert.vit import CONVERTER

    return CONVERTER

  def resized(self, config: Config, size: int) -> Config:
    """Position tables and the crop of evaluation follow the size."""
    model, fields = config.model, _pretrained(config.model)
    # Keep the ratio of crop to resize that the model was evaluated with.
    resize = config.data.eval_resize * size // min(model.image_size)
    return dataclasses.replace(
      config,
      model=dataclasses.replace(model, image_size=(size, size), **fields),
      data=dataclasses.replace(config.data, eval_resize=resize),
    )


def _pretrained(model: ViTConfig) -> dict[str, int]:
  """Fields of another image size that keep the coordinates of this one."""
  rows, columns = model.pretrain_size
  pretrain_columns = 0 if columns == rows else columns
  return {"pretrain_image_size": rows, "pretrain_columns": pretrain_columns}


register_family(ViTFamily())
