"""Cases of one new token and a cache, for tests of the decoding kernels."""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from moh_jax.ops.cache import LayerCache
from moh_jax.ops.head_blocks import ActiveHeads
from moh_jax.ops.kernels import tpu_decode, triton_decode
from moh_jax.ops.kernels.problem import Tile

BACKENDS = ("triton", "mosaic_tpu")
INT8 = "int8"


@contextlib.contextmanager
def small_tiles() -> Iterator[None]:
  """Context in which tiles have 16 slots, and splits at least as many."""
  tiles = {size: {512: Tile(16, 16)} for size in (2, 4)}
  with (
    mock.patch.object(triton_decode, "TILES", tiles),
    mock.patch.object(tpu_decode, "TILES", tiles),
    mock.patch.object(triton_decode, "_MIN_SLOTS", 16),
  ):
    yield


@dataclasses.dataclass(frozen=True)
class Case:
  """Shapes, what is visible, and which heads are active."""

  heads: int = 4
  kv_heads: int = 4
  slots: int = 40
  head_dim: int = 24
  choice: str = "random"  # of heads
  seen: tuple[tuple[int, int], ...] = ((13, 37), (0, 37))  # first, end of texts
  scale: float | None = None

  @property
  def batch(self) -> int:
    return len(self.seen)

  def factor(self) -> float:
    return self.head_dim**-0.5 if self.scale is None else self.scale

  def arrays(self, dtype=jnp.float32, cache_dtype=None):
    """Queries and the cache."""
    rng = np.random.default_rng(0)
    stored = self.batch, self.kv_heads, self.slots, self.head_dim
    q = rng.normal(size=(self.batch, 1, self.heads, self.head_dim))
    k, v = rng.normal(size=(2, *stored))
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    q = jnp.asarray(q, dtype)
    if cache_dtype != INT8:
      k, v = (jnp.asarray(x, cache_dtype) for x in (k, v))
      return q, LayerCache(k, v)
    k, v = (jnp.asarray(np.clip(40 * x, -127, 127), jnp.int8) for x in (k, v))
    scales = rng.uniform(0.01, 0.05, (2, *stored[:2], 1, self.slots))
    return q, LayerCache(k, v, *jnp.asarray(scales, jnp.float32))

  def bounds(self) -> tuple[jax.Array, jax.Array]:
    return tuple(jnp.asarray(x, jnp.int32) for x in zip(*self.seen))

  def visible(self) -> np.ndarray:
    """[B, M]."""
    first, end = (np.asarray(x)[:, None] for x in self.bounds())
    slot = np.arange(self.slots)
    return (slot >= first) & (slot < end)

  def active(self) -> ActiveHeads | None:
    if self.choice == "no table":
      return None
    shape = self.batch, 1, self.heads
    mask, most = np.zeros(shape, bool), self.heads
    if self.choice == "random":
      mask = np.random.default_rng(2).random(shape) < 0.5
      mask[..., -1] = False  # one head that nobody chose
    elif self.choice == "one head":
      mask[..., 1] = True
      most = 1
    elif self.choice == "few":
      mask[0, :, :2] = mask[1, :, 4] = True
      most = 2
    elif self.choice == "later text":
      mask[1:, :, -1] = True
    elif self.choice == "all":
      mask[...] = True
    return ActiveHeads(jnp.asarray(mask), most)

  def is_read(self) -> np.ndarray:
    """[B, K], the key/value heads that a text reads."""
    active = self.active()
    mask = np.ones((self.batch, self.heads), bool)
    if active is not None:
      mask = np.asarray(active.mask)[:, 0]
    used = mask.reshape(self.batch, self.kv_heads, -1).any(-1)
    return used & self.visible().any(-1)[:, None]


_LONG = ((13, 161), (70, 75), (0, 200), (192, 193))
CASES = {
  "padding": Case(),
  "many_splits": Case(slots=200, head_dim=64, seen=_LONG),
  "one_slot": Case(slots=1, head_dim=16, seen=((0, 1), (0, 1))),
  "hidden_text": Case(seen=((5, 5), (0, 37))),
  "text_that_begins_later": Case(seen=((39, 2), (0, 37))),
  "first_text_chose_nothing": Case(choice="later text"),
  "grouped": Case(heads=6, kv_heads=2, head_dim=80),
  "many_queries_of_a_head": Case(
    heads=70, kv_heads=1, slots=16, seen=((2, 15),)
  ),
  "many_queries_of_a_wide_head": Case(
    heads=18, kv_heads=1, slots=16, head_dim=136, seen=((2, 15),)
  ),
  "one_head": Case(choice="one head", scale=-0.3, slots=37),
  "no_head": Case(choice="none"),
  "all_heads": Case(
    choice="all", slots=160, head_dim=128, kv_heads=2, seen=((0, 160), (5, 96))
  ),
  "no_table": Case(choice="no table"),
}
