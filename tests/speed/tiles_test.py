"""Which tiles of the kernels are chosen, and the file that they are put in."""

import pathlib
from unittest import mock

import jax.numpy as jnp
from absl.testing import absltest, parameterized

from moh_jax.ops.kernels.backends import BACKENDS, read
from moh_jax.ops.kernels.sizes import BlockSizes, Key, Tile
from moh_jax.speed import programs, tiles, timing
from tests.ops import devices

_TRITON = BACKENDS["triton"]
_WORKLOAD = tiles.Workload(1, 16, 2, 1, 16, "float32", rounds=1)


class TuningTest(parameterized.TestCase):
  @parameterized.parameters(("triton", 2), ("mosaic_tpu", 1))
  def test_runs_every_tile_in_every_kernel(self, backend, count):
    devices.need(backend)
    known = [Tile(16, 16), Tile(16, 8)][:count]
    lines = []
    tiles.tune(_WORKLOAD, backend, known, interpret=True, report=lines.append)
    self.assertLen(lines, 3 * count)
    for line in lines:
      self.assertRegex(line, r"^(forward|dq|dkv) R=16 Tile.*: \d+\.\d+ ms$")

  @parameterized.parameters(
    (9.0, lambda a, b, c: BlockSizes(b, a, a)),
    (1.0, lambda a, b, c: BlockSizes(c, c, b)),
  )
  def test_the_smallest_times_win(self, forward_of_32, expected):
    known = a, b, c = Tile(16, 16), Tile(16, 32), Tile(32, 16)
    seconds = {
      # Of blocks of 16 rows, the least add up to 6; of 32, to 4.5 or 12.5.
      f"forward R=16 {a}": 5.0,
      f"forward R=16 {b}": 3.0,
      f"dq R=16 {a}": 2.0,
      f"dq R=16 {b}": 4.0,
      f"dkv R=16 {a}": 1.0,
      f"dkv R=16 {b}": 6.0,
      f"forward R=32 {c}": forward_of_32,
      f"dq R=32 {a}": 4.0,
      f"dq R=32 {b}": 3.0,
      f"dq R=32 {c}": 2.0,
      f"dkv R=32 {a}": 2.0,
      f"dkv R=32 {b}": 1.5,
      f"dkv R=32 {c}": 3.0,
    }
    loops, calls, lines = 4, [], []
    nothing = programs.Program(lambda: jnp.zeros(()), loops)

    def interleaved(runs, rounds):
      self.assertEqual(rounds, _WORKLOAD.rounds)
      calls.append(list(runs))
      return {name: timing.Timing(seconds[name] * loops, 0) for name in runs}

    with (
      mock.patch.object(tiles, "compile_program", return_value=nothing),
      mock.patch.object(timing, "interleaved", interleaved),
    ):
      best = tiles.tune(_WORKLOAD, "triton", known, report=lines.append)
    self.assertEqual(best, expected(a, b, c))
    self.assertLen(calls, 6)  # of a kernel and rows all take turns in one
    self.assertEqual(
      lines, [f"{name}: {x * 1e3:.3f} ms" for name, x in seconds.items()]
    )

  def test_tiles_that_do_not_run_are_reported_and_passed_over(self):
    devices.need("triton")
    wrong, right = Tile(16, 8), Tile(16, 16)
    forward, lines = _TRITON.forward, []

    def fails(*args):
      if args[-1] == wrong:
        raise RuntimeError("too\nlarge")
      return forward(*args)

    with mock.patch.object(_TRITON, "forward", fails):
      best = tiles.tune(
        _WORKLOAD, "triton", (wrong, right), interpret=True, report=lines.append
      )
    self.assertEqual(best.forward, right)
    self.assertLen(lines, 6)
    self.assertEqual(
      [line for line in lines if not line.endswith("ms")],
      [f"forward R=16 {wrong} does not run: RuntimeError: too large"],
    )

  def test_no_tile_that_runs_is_an_error(self):
    too_large = RuntimeError("too large")
    with mock.patch.object(_TRITON, "forward", side_effect=too_large):
      with self.assertRaisesRegex(ValueError, "none of 1 tiles .*too large"):
        tiles.tune(_WORKLOAD, "triton", [Tile(16, 16)], interpret=True)


class NearTest(parameterized.TestCase):
  @parameterized.parameters(("triton", 3), ("mosaic_tpu", 6))
  def test_differ_in_one_step_and_hold_the_given_ones(self, backend, count):
    given = Tile(64, 32, 8, 3)
    near = tiles.near(BlockSizes(given, given, given), backend)
    self.assertEqual(near[0], given)
    self.assertLen(near, count)
    self.assertEqual({tile.keys for tile in near}, {16, 32, 64})
    self.assertEqual({(tile.warps, tile.stages) for tile in near}, {(8, 3)})

  def test_keys_stay_a_tile(self):
    smallest = Tile(16, 16)
    near = tiles.near(BlockSizes(smallest, smallest, smallest), "triton")
    self.assertEqual(near, [smallest, Tile(16, 32)])


class WorkloadTest(parameterized.TestCase):
  @parameterized.parameters(
    ("batch", 0, "at least 1"), ("tokens", -1, "at least 1"),
    ("heads", 0, "at least 1"), ("rounds", 0, "at least 1"),
    ("active", 0, r"in \[1, 16\]"), ("active", 17, r"in \[1, 16\]"),
    ("head_dim", 0, r"in \[1, 256\]"), ("head_dim", 257, r"in \[1, 256\]"),
    ("dtype", "int8", "one of bfloat16, float16, float32"),
  )  # fmt: skip
  def test_fields_out_of_range_are_named(self, name, value, allowed):
    flag = "--" + name.replace("_", "-")
    with self.assertRaisesRegex(
      ValueError, f"{flag} '?{value}'? must be {allowed}"
    ):
      tiles.Workload(**{name: value})


class FileTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self._path = pathlib.Path(self.create_tempdir()) / "tiles.json"
    tile = Tile(16, 32, 8, 3)
    self._one = {
      Key("triton", "GPU X", 64, "float32"): BlockSizes(tile, tile, tile)
    }

  def test_entries_are_merged(self):
    tile = Tile(32, 64)
    other = {
      Key("triton", "GPU X", 64, "bfloat16"): BlockSizes(tile, tile, tile)
    }
    tiles.write(self._path, self._one)
    tiles.write(self._path, other)
    self.assertEqual(read(self._path), self._one | other)

  def test_a_failing_disk_leaves_the_old_file(self):
    tiles.write(self._path, self._one)
    full = OSError("No space left on device")
    with mock.patch("os.fsync", side_effect=full):
      with self.assertRaisesRegex(OSError, "No space"):
        tiles.write(self._path, {})
    self.assertEqual(read(self._path), self._one)
    self.assertEqual(list(self._path.parent.iterdir()), [self._path])


if __name__ == "__main__":
  absltest.main()
