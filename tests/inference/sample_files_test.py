"""Files of sampled images, which survive what may happen."""

import dataclasses
import errno
import functools
import os
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.inference import sample
from moh_jax.inference.sample import Sampler
from moh_jax.runtime import devices
from tests.inference import tiny_sampler
from tests.training import tiny

_NUM, _SIZE = 29, 8  # four parts, the last one of five images
_STARTS = (0, 8, 16, 24)
_SETTINGS = {"checkpoint": "here", "seed": 0}


@functools.cache
def _images():
  return np.concatenate(
    [tiny_sampler.sampler().batch(start, _SIZE) for start in _STARTS]
  )


class SampleFolderTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def _run(self, names, num=4):
    restored = dataclasses.replace(tiny_sampler.restored(), class_names=names)
    sampler = Sampler(restored, labels=(9, None), mesh=tiny_sampler.mesh(1))
    return sample.sample_files(
      sampler, num, self.out, batch_size=2, settings=_SETTINGS
    )

  @parameterized.parameters(
    ((), "9"), (tuple(f"class {i}" for i in range(10)), "class 9")
  )
  def test_folders_are_named_by_label(self, names, folder):
    self.assertEqual(self._run(names), 4)
    found = {str(f.relative_to(self.out)) for f in self.out.rglob("*.png")}
    first = {f"{folder}/000000.png", f"{folder}/000002.png"}
    self.assertEqual(found, first | {"none/000001.png", "none/000003.png"})

  def test_files_of_others_stay_and_are_not_taken_for_samples(self):
    np.save(self.out / "mine.npy", np.zeros(3))
    self._run(())
    self.assertTrue((self.out / "mine.npy").exists())
    (self.out / "settings.json").unlink()
    with self.assertRaisesRegex(ValueError, "9/000000.png is there, and no"):
      self._run(())

  def test_a_missing_file_is_sampled_again_with_its_batch(self):
    self._run(())
    file = self.out / "none" / "000003.png"
    content = file.read_bytes()
    file.unlink()
    self.assertEqual(self._run(()), 2)
    self.assertEqual(file.read_bytes(), content)


class SampleNpzTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.out = self.root / "images.npz"
    self.parts = self.root / "images.npz.parts"
    self.sampled = []  # starts of the batches that were sampled to their end
    self.kill_before = None  # start of a batch
    draw = Sampler.batch

    def batch(sampler, start, size):
      if start == self.kill_before:
        raise KeyboardInterrupt
      self.sampled.append(start)
      return draw(sampler, start, size)

    self.enterContext(mock.patch.object(Sampler, "batch", batch))

  def _run(self, kill_before=None, num=_NUM, size=_SIZE, settings=_SETTINGS):
    self.kill_before = kill_before
    return sample.sample_files(
      tiny_sampler.sampler(), num, self.out, batch_size=size, settings=settings
    )

  def _killed(self, **options):
    with self.assertRaises(KeyboardInterrupt):
      self._run(**options)
    self.assertFalse(self.out.exists())

  def _failing(self, name, error, calls=1):
    """Fails the replacement of a file of that name, as often as is said."""
    replace, left = os.replace, [calls]

    def fail(source, target):
      if pathlib.Path(target).name == name and left[0]:
        left[0] -= 1
        raise error
      replace(source, target)

    return mock.patch.object(os, "replace", fail)

  def _assert_whole(self):
    with np.load(self.out, allow_pickle=False) as stored:
      self.assertEqual(stored.files, ["arr_0", "arr_1"])
      images, labels = stored["arr_0"], stored["arr_1"]
    np.testing.assert_array_equal(images, _images()[:_NUM])
    np.testing.assert_array_equal(labels, np.arange(_NUM) % 10)
    self.assertEqual((images.dtype, labels.dtype), (np.uint8, np.int32))
    self.assertEqual(images.shape, (_NUM, 8, 8, 1))
    self.assertEqual(list(self.root.iterdir()), [self.out])

  def test_file_holds_images_and_labels_and_nothing_else_stays(self):
    self.assertEqual(self._run(), _NUM)
    self.assertEqual(self.sampled, list(_STARTS))
    self._assert_whole()

  @parameterized.parameters((8, 16), (0, 24), (16, 16), (24, 24))
  def test_killed_twice_loses_and_repeats_nothing(self, first, second):
    self._killed(kill_before=first)
    self._killed(kill_before=second)
    before = len(self.sampled)
    sampled = self._run()
    self.assertEqual(self.sampled, list(_STARTS))
    self.assertEqual(sampled, _NUM - before * _SIZE)
    self._assert_whole()

  def test_killed_before_a_part_is_in_place_draws_that_part_again(self):
    with self._failing("000000008.npy", KeyboardInterrupt()):
      self._killed()
    self.assertEqual(self._run(), _NUM - 8)
    self.assertEqual(self.sampled, [0, 8, 8, 16, 24])
    self._assert_whole()

  def test_killed_before_the_file_is_in_place_draws_nothing_again(self):
    with self._failing("images.npz", KeyboardInterrupt()):
      self._killed()
    self.assertEqual(self._run(), 0)
    self.assertEqual(self.sampled, list(_STARTS))
    self._assert_whole()

  @parameterized.parameters(range(6))
  def test_killed_while_the_parts_are_removed_keeps_the_file(self, removed):
    # Four parts, the settings and the folder.
    left, removals = [removed], []
    for name in ("unlink", "rmdir"):
      call = getattr(os, name)

      def remove(path, *args, call=call, **options):
        if "images.npz.parts" in str(path) and str(path)[-4:] != ".tmp":
          removals.append(path)
          if len(removals) > left[0]:
            raise KeyboardInterrupt
        call(path, *args, **options)

      self.enterContext(mock.patch.object(os, name, remove))
    with self.assertRaises(KeyboardInterrupt):
      self._run()
    self.assertTrue(self.out.exists())
    left[0] = 100
    self.assertEqual(self._run(), 0)
    self._assert_whole()

  def test_parts_that_an_older_version_left_do_not_matter(self):
    self._killed(kill_before=16)
    part = self.parts / "000000008.npy"
    content = part.read_bytes()
    self._run()
    self.parts.mkdir()
    part.write_bytes(content)
    self.assertEqual(self._run(), 0)
    self._assert_whole()

  def test_other_files_among_the_parts_stay(self):
    self.parts.mkdir()
    np.save(self.parts / "mine.npy", np.zeros(3))
    self._run()
    self.assertEqual(self._run(), 0)
    self.assertEqual([f.name for f in self.parts.iterdir()], ["mine.npy"])

  def test_numbered_files_that_are_no_parts_stay(self):
    self.parts.mkdir()
    other = self.parts / "123456789.npy"  # a part of no call of this size
    np.save(other, np.zeros(3))
    self._run()
    self.assertEqual(self._run(), 0)
    self.assertEqual(list(self.parts.iterdir()), [other])

  @parameterized.parameters(
    ("x.png", devices, "total_memory", "of memory"),
    ("x.npz", sample.shutil, "disk_usage", "bytes are free"),
  )
  def test_more_images_than_there_is_room_for(self, name, place, call, text):
    config, out = tiny.dit_config(mesh={"data": -1}), self.root / name
    size = 64 * 10  # ten images of 8 x 8 grey pixels
    have = {"total_memory": size, "disk_usage": mock.Mock(free=size)}[call]
    with mock.patch.object(place, call, lambda *_: have):
      sample.check_size(config, 10, out)
      with self.assertRaisesRegex(ValueError, f"11 images.*{text}"):
        sample.check_size(config, 11, out)

  def test_parts_are_not_written_through_a_link(self):
    other = self.root / "other"
    other.mkdir()
    np.save(other / "mine.npy", np.zeros(3))
    self.parts.symlink_to(other)
    with self.assertRaisesRegex(ValueError, "parts is a symbolic link"):
      self._run()
    self.assertTrue((other / "mine.npy").exists())

  def test_parts_of_unknown_settings_are_not_taken(self):
    self._killed(kill_before=16)
    (self.parts / "settings.json").unlink()
    with self.assertRaisesRegex(ValueError, "000000000.npy is there, and no"):
      self._run()

  @parameterized.parameters("save", "replace")
  def test_full_disk_leaves_whole_parts_and_continues(self, where):
    error = OSError(errno.ENOSPC, "No space left on device")
    failing = self._failing("000000016.npy", error)
    if where == "save":
      save, calls = np.save, []

      def fail(stream, array):
        calls.append(stream)
        if len(calls) == 3:
          stream.write(b"half")
          raise error
        save(stream, array)

      failing = mock.patch.object(np, "save", fail)
    message = "000000016.npy cannot be written: .*No space left.* make space"
    with failing, self.assertRaisesRegex(OSError, message):
      self._run()
    names = sorted(path.name for path in self.parts.iterdir())
    self.assertEqual(names, ["000000000.npy", "000000008.npy", "settings.json"])
    for start in (0, 8):
      stored = np.load(self.parts / f"{start:09d}.npy")
      np.testing.assert_array_equal(stored, _images()[start : start + 8])
    self.assertFalse(self.out.exists())

    self.assertEqual(self._run(), _NUM - 16)
    self.assertEqual(self.sampled, [0, 8, 16, 16, 24])
    self._assert_whole()

  def test_full_disk_at_the_end_keeps_the_parts(self):
    error = OSError(errno.ENOSPC, "No space left on device")
    with self._failing("images.npz", error):
      with self.assertRaisesRegex(OSError, "No space left"):
        self._run()
    self.assertEqual(list(self.root.iterdir()), [self.parts])
    self.assertEqual(self._run(), 0)
    self._assert_whole()

  @parameterized.parameters(
    ({"settings": {**_SETTINGS, "seed": 1}}, "seed: 1 here, 0 there"),
    ({"settings": {"seed": 0}}, "checkpoint: None here, 'here' there"),
    ({"settings": {**_SETTINGS, "cfg": (0, 9)}}, r"cfg: \[0, 9\] here, None"),
    ({"num": 30}, "num: 30 here, 29 there"),
    ({"size": 16}, "batch_size: 16 here, 8 there"),
  )
  def test_other_settings_are_refused_by_name(self, options, message):
    self._killed(kill_before=8)
    with self.assertRaisesRegex(ValueError, message):
      self._run(**options)
    self.assertEqual(self._run(), _NUM - 8)  # the parts are untouched
    self._assert_whole()

  def test_tuples_of_settings_equal_their_stored_lists(self):
    settings = {**_SETTINGS, "labels": (1, 2)}
    self._killed(kill_before=8, settings=settings)
    self.assertEqual(self._run(settings=settings), _NUM - 8)

  def test_finished_file_is_not_drawn_again(self):
    self._run()
    written = self.out.read_bytes()
    self.assertEqual(self._run(), 0)
    self.assertEqual(self.sampled, list(_STARTS))
    self.assertEqual(self.out.read_bytes(), written)

  @parameterized.parameters(False, True)
  def test_file_of_other_settings_is_not_overwritten(self, whole):
    self.out.write_bytes(b"old")
    if whole:
      self.out.unlink()
      self._run(settings={**_SETTINGS, "seed": 1})
    written = self.out.read_bytes()
    with self.assertRaisesRegex(ValueError, "exists and was made with other"):
      self._run()
    self.assertEqual(self.out.read_bytes(), written)


if __name__ == "__main__":
  absltest.main()
