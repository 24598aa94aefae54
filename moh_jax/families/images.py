"""What records of families that read images have in common."""

from typing import Any

from moh_jax.config import ClassifierConfig, Config
from moh_jax.config.family import Family

# Sources whose examples are files of one kind; other sources read folders.
_STORED = ("latents", "array_record")


class ImageFamily(Family):
  """A family whose examples are images, or their latents."""

  def data_at(self, config: Config, path: str) -> dict[str, Any]:
    """Shards are read as such, anything else as folders of images."""
    stored = config.data.source in _STORED
    source = config.data.source if stored else "image_folder"
    return {"source": source, "path": path}

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
    if config.data.source == "latents":
      raise ValueError(
        "data.source='latents' is for diffusion models, model.family="
        f"{self.name!r}"
      )
    self.check_channels(config)

  def tasks(self) -> Any:
    """Image classification; accuracy on held-out images."""
    from moh_jax.training import classification

    return classification
