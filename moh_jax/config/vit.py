"""The model section of MoH-ViT."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from moh_jax.config import base
from moh_jax.config.layers import ImageClassifier, LayerGroup, LayerStack
from moh_jax.config.run import Config, Fields


@dataclasses.dataclass(frozen=True)
class StageShape:
  """Token grids of one ViT stage, (rows, columns).

  Attributes:
    grid: the stage's tokens.
    pool_grid: pooled keys; None where the stage attends to all tokens.
    pretrain_grid: the stage's tokens at the pre-training image size.
  """

  grid: tuple[int, int]
  pool_grid: tuple[int, int] | None
  pretrain_grid: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ViTConfig(LayerStack, ImageClassifier):
  """TransNeXt classifier with or without MoH; tuples hold one value per stage.

  Attributes:
    family: "vit".
    image_size: rows and columns of the input, pixels; None is a square about as
      large as the images of the data, in steps of 32 up to 224.
    channels: channels of the images, 1 (grey) or 3 (RGB); None is those of the
      data.
    num_classes: classes, the outputs; None is those of the data.
    patch_stride: pixels between tokens of the first stage; each later stage
      halves the grid.
    embed_dims: width C of each stage.
    depths: number of blocks of each stage.
    num_heads: heads of each stage; they must divide its width.
    shared_heads: heads of each stage that are on for every token, the first
      ones.
    top_k: heads of each stage that a token chooses among the others.
    mlp_ratios: each stage's MLP width F as a ratio: F is floor(2/3 of floor(C *
      ratio)).
    sr_ratios: side of each stage's grid over that of its pooled keys; 1 attends
      to all tokens instead of window and pooled ones.
    window: side of the sliding window in tokens, odd.
    fixed_pool_size: rows and columns of the pooled grid whatever the image
      (TransNeXt's linear mode); 0 uses sr_ratios.
    pretrain_image_size: side in pixels of the images that the relative
      coordinates refer to; 0 is image_size.
    pretrain_columns: columns of those images where they are no squares; 0 is
      pretrain_image_size.
    router: section of the router; its kind is "two_stage", "none" for
      multi-head attention (TransNeXt), or a registered one that does not read
      the norms of queries.
    qkv_bias: whether the query, key and value projections have biases.
    drop_path: stochastic depth: probability of leaving out the last block, in
      [0, 1); earlier ones rise to it linearly from 0.
    attention_impl: form of the last stage's attention: "auto" takes the fastest
      that fits device and shapes; "dense" makes all logits at once; "packed"
      computes only the heads that tokens chose; "cudnn" is cuDNN's (NVIDIA
      GPUs).
    dtype: compute dtype, "float32" or "bfloat16"; parameters, router and
      softmax stay float32.
  """

  family: Literal["vit"] = "vit"
  image_size: tuple[base.Count, base.Count] | None = (224, 224)
  channels: base.Count | None = None
  num_classes: base.Count | None = None
  patch_stride: base.Count = 4
  embed_dims: tuple[base.Count, ...] = (72, 144, 288, 576)
  depths: tuple[base.Count, ...] = (5, 5, 22, 5)
  num_heads: tuple[base.Count, ...] = (3, 6, 12, 24)
  shared_heads: tuple[base.Natural, ...] = (3, 6, 3, 8)
  top_k: tuple[base.Natural, ...] = (0, 0, 6, 12)
  mlp_ratios: tuple[base.Positive, ...] = (8, 8, 4, 4)
  sr_ratios: tuple[base.Count, ...] = (8, 4, 2, 1)
  window: base.Count = 3
  fixed_pool_size: base.Natural = 0
  pretrain_image_size: base.Natural = 0
  pretrain_columns: base.Natural = 0
  qkv_bias: bool = True
  drop_path: Annotated[float, base.Range(0, 0.999)] = 0.0
  # The kernels add no position bias.
  attention_impl: Literal["auto", "dense", "packed", "cudnn"] = "auto"

  RUNTIME_FIELDS = (*ImageClassifier.RUNTIME_FIELDS, "drop_path")
  PART = "stage"
  FIRST = 1
  COUNTED_BY = "depths"
  OTHER_NAMES = {}
  COUNTED = (
    *("embed_dims", "num_heads", "shared_heads", "top_k"),
    *("mlp_ratios", "sr_ratios"),
  )
  CLASS_PARAMS = frozenset({"head/kernel", "head/bias"})

  def check(self) -> None:
    """Stages, head splits and grids add up; attention has a position bias."""
    if self.window % 2 == 0:
      self.fail("window", "must be odd")
    if self.router.reads_norms:
      # Those of a ViT have unit length.
      kind = f"model.router.kind={self.router.kind!r}"
      raise ValueError(f"{kind} must not read the norms of queries")
    super().check()
    for stage, (dim, heads) in enumerate(zip(self.embed_dims, self.num_heads)):
      if dim % heads:
        raise ValueError(
          f"model.embed_dims[{stage}]={dim} must be a multiple of "
          f"model.num_heads[{stage}]={heads}"
        )
    if self.image_size is not None:
      self.stage_shapes()

  @property
  def mlp_dims(self) -> tuple[int, ...]:
    """F of every stage."""
    pairs = zip(self.embed_dims, self.mlp_ratios)
    return tuple(2 * int(dim * ratio) // 3 for dim, ratio in pairs)

  @property
  def pretrain_size(self) -> tuple[int, int]:
    """Rows and columns of the images that the coordinates refer to."""
    (rows, columns), side = self.image_size, self.pretrain_image_size
    return side or rows, self.pretrain_columns or side or columns

  def head_dims(self) -> tuple[int, ...]:
    """The width of a head in every stage."""
    pairs = zip(self.embed_dims, self.num_heads)
    return tuple(width // heads for width, heads in pairs)

  def layer_groups(self) -> tuple[LayerGroup, ...]:
    """The blocks by stage."""
    groups = []
    stages = zip(self.budgets(), self.depths, self.embed_dims)
    for stage, shape in zip(stages, self.stage_shapes()):
      tokens = math.prod(shape.grid)
      sees = "window" if shape.pool_grid else "all"
      pairs = tokens * math.prod(shape.pool_grid or shape.grid)
      groups.append(LayerGroup(*stage, tokens, sees, pairs=pairs))
    return tuple(groups)

  def stack_names(self) -> tuple[str, ...]:
    """The stages."""
    return tuple(f"stage{i + 1}" for i in range(len(self.depths)))

  def token_grids(self) -> tuple[tuple[int, int], ...]:
    """The grids of the stages."""
    return tuple(shape.grid for shape in self.stage_shapes())

  def inherited(self, trained: Config, stated: Mapping[str, Any]) -> Fields:
    """As for all images; coordinates keep the size of the pre-training."""
    found = super().inherited(trained, stated)
    size = self.image_size
    if "image_size" in stated and stated["image_size"] != size:
      rows, columns = self.pretrain_size
      found["model"] |= {
        "pretrain_image_size": rows,
        "pretrain_columns": 0 if columns == rows else columns,
      }
    return found

  def stage_shapes(self) -> tuple[StageShape, ...]:
    """Token grids of every stage.

    Raises:
      ValueError: a stage whose grid cannot hold its pooled grid.
    """
    shapes = []
    grid, pretrain = tuple(self.image_size), self.pretrain_size
    for stage, ratio in enumerate(self.sr_ratios):
      stride = 2 if stage else self.patch_stride
      # A padded convolution with stride s keeps ceil(size / s) positions.
      grid = tuple(-(-size // stride) for size in grid)
      pretrain = tuple(-(-size // stride) for size in pretrain)
      pool = None
      if ratio > 1:
        pool = tuple(self.fixed_pool_size or size // ratio for size in grid)
        if not all(1 <= p <= size for p, size in zip(pool, grid)):
          pooled = f"a pooled grid {pool} in stage {stage + 1}"
          self.fail("image_size", f"is too small for {pooled}")
      shapes.append(StageShape(grid, pool, pretrain))
    return tuple(shapes)
