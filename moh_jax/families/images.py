"""What records of families that read images have in common."""

from typing import Any

from moh_jax.config import Config
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

  def bench_run(self, model: Any, batch: int) -> Config:
    """Random images with pixels in [-1, 1]."""
    halves = (0.5,) * model.channels
    data = self.data(batch_size=batch, mean=halves, std=halves)
    return self.example_run(model, data)

  def example_run(self, model: Any, data: Any) -> Config:
    """A run of a model on data, all else by default."""
    return Config(model=model, data=data)


def check_channels(config: Config) -> None:
  """Raises ValueError unless pixels are normalized per channel of the model."""
  if len(config.data.mean) != config.model.channels:
    raise ValueError(
      f"data.mean={config.data.mean} must have model.channels="
      f"{config.model.channels} values"
    )
