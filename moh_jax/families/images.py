"""What records of families that read images have in common."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from moh_jax.config import ClassifierConfig, Config
from moh_jax.config.family import Family
from moh_jax.config.sources import SPLITS, get_source


class ImageFamily(Family):
  """A family whose examples are images, or their latents."""

  def data_at(self, config: Config, path: str) -> dict[str, Any]:
    """Latents are read as such, images as what `path` holds.

    These are shards, tables or folders. Without val/ all images of the latter
    two are held out.
    """
    if "images" not in get_source(config.data).holds:
      return {"path": path}
    # Their libraries take a while.
    from moh_jax.data.image_tables import is_tables
    from moh_jax.data.shards import METADATA

    if any((pathlib.Path(path) / n / METADATA).is_file() for n in SPLITS):
      of_tables = {"label_column": "", "class_list": ""}
      return {"source": "array_record", "path": path, **of_tables}
    all_of_it = {"path": path, "val_share": 1.0}
    if is_tables(path):
      return {"source": "parquet", **all_of_it}
    return {"source": "image_folder", "label_column": "", **all_of_it}

  def token_grids(self, model: Any) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the tokens, by layer group: here of square images.

    Families whose tokens are no square grid have their own.
    """
    sides = [math.isqrt(group.tokens) for group in model.layer_groups()]
    return tuple((side, side) for side in sides)

  def inherited(
    self, trained: Config, stated: Mapping[str, Any]
  ) -> dict[str, dict[str, Any]]:
    """The network and its normalization; the classes are those of the data."""
    found = super().inherited(trained, stated)
    data = trained.data
    return {
      **found,
      "model": {**found["model"], "num_classes": None},
      "data": {"mean": data.mean, "std": data.std},
    }

  def check_channels(self, config: Config) -> None:
    """Raises ValueError unless every channel of the model is normalized."""
    mean, channels = config.data.mean, config.model.channels
    if mean is not None and channels is not None and len(mean) != channels:
      raise ValueError(
        f"data.mean={mean} must have model.channels={channels} values"
      )


class ImageClassifierFamily(ImageFamily):
  """A family of image classifiers: a subclass adds its network.

  The network maps images [B, X, Y, channels] to (logits [B, num_classes],
  ModelAux) and takes the keyword `train`. The model section has the fields
  `channels` and `num_classes` and the property `input_shape`, beside those that
  `Family` names.
  """

  sections = {"classifier": ClassifierConfig}
  commands = frozenset({"classify"})

  def check(self, config: Config) -> None:
    """Classifiers read images, normalized per channel."""
    if "images" not in get_source(config.data).holds:
      raise ValueError(
        f"data.source={config.data.source!r} is for diffusion models, "
        f"model.family={self.name!r}"
      )
    self.check_channels(config)

  def probe(self, model: Any, config: Config) -> Any:
    """Images by class."""
    from moh_jax.analysis.probe import Probe

    def apply(params: Any, batch: Any, **options: Any) -> Any:
      return model.apply({"params": params}, batch["image"], **options)

    return Probe(apply, grids=self.token_grids(config.model))

  def tasks(self) -> Any:
    """Image classification; accuracy on held-out images."""
    from moh_jax.training import classification

    return classification
