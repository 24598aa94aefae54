"""Sampling: which image an index is, and files that survive interruptions."""

import errno
import functools
import os
import pathlib
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from moh_jax.evaluation.fid import open_images
from moh_jax.inference import sample as sample_lib
from moh_jax.inference.sample import Sampler
from moh_jax.runtime.mesh import make_mesh
from tests.folders import FolderTest
from tests.inference import tiny_writer
from tests.training import tiny

_NUM, _SIZE = 29, 8  # four batches, the last one of five images
_STARTS = (0, 8, 16, 24)
# A tuple is stored as a list.
_SETTINGS = {"checkpoint": "here", "seed": 0, "tuple": (1, 2)}


@functools.cache
def _sampler(devices=1, sample=(), **options):
  config = tiny.dit_config(sample=dict(sample), mesh={"data": devices})
  mesh = make_mesh(config.mesh, jax.devices()[:devices])
  params = tiny.random_params(config)
  restored = tiny_writer.restored(config, params, mesh)
  return Sampler(restored, mesh=mesh, **options)


@functools.cache
def _images():
  return np.concatenate([_sampler().batch(start, _SIZE) for start in _STARTS])


class SamplerTest(parameterized.TestCase):
  @parameterized.parameters((1, 3), (1, 16), (8, 3))
  def test_images_do_not_depend_on_batch_and_devices(self, devices, size):
    images = _sampler(devices).batch(5, size)
    np.testing.assert_array_equal(images, _images()[5 : 5 + size])
    self.assertEqual((images.shape, images.dtype), ((size, 8, 8, 1), np.uint8))
    self.assertLen({image.tobytes() for image in images}, size)

  def test_label_and_seed_change_an_image_and_nothing_else_does(self):
    # Image 3 has label 3 with these labels as with all in turn.
    same = _sampler(labels=(5, 6, 7, 3)).batch(0, _SIZE)
    np.testing.assert_array_equal(same[3], _images()[3])
    self.assertFalse(np.array_equal(same[0], _images()[0]))
    other = _sampler(seed=2**31 - 1).batch(0, _SIZE)
    for ours, theirs in zip(other, _images()):
      self.assertFalse(np.array_equal(ours, theirs))

  def test_no_label_is_scale_0(self):
    none = _sampler(labels=(None,)).batch(0, 2)
    self.assertFalse(np.array_equal(none, _images()[:2]))
    free = _sampler(sample=(("cfg_scale", 0.0),), labels=(4,)).batch(0, 2)
    np.testing.assert_array_equal(free, none)

  def test_bad_labels_are_named(self):
    with self.assertRaisesRegex(ValueError, r"label 10 must be in \[0, 9\]"):
      _sampler(labels=(3, 10))

  def test_any_number_of_images_is_sampled(self):
    images = sample_lib.sample_images(_sampler(), 13, _SIZE)
    np.testing.assert_array_equal(images, _images()[:13])


class FilesTest(FolderTest):
  def _run(self):
    return sample_lib.sample_files(
      *(_sampler(labels=(9, None)), 4, self.root),
      batch_size=2,
      settings=_SETTINGS,
    )

  def test_what_is_missing_is_sampled_and_other_files_stay(self):
    np.save(self.root / "mine.npy", np.zeros(3))
    self.assertEqual(self._run(), 4)
    found = {str(f.relative_to(self.root)) for f in self.root.rglob("*.*")}
    images = {"9/000000.png", "9/000002.png"}
    images |= {"none/000001.png", "none/000003.png"}
    self.assertEqual(found - {"settings.json", "mine.npy"}, images)
    file = self.root / "none" / "000003.png"
    content = file.read_bytes()
    file.unlink()
    self.assertEqual(self._run(), 2)
    self.assertEqual(file.read_bytes(), content)


class NpzTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.out = self.root / "images.npz"
    self.parts = self.root / "images.npz.parts"
    self.stated = self.root / "images.npz.settings.json"
    self.sampled = []  # starts of the batches that were sampled to their end
    self.kill_before = None  # start of a batch
    images = _images()

    def batch(sampler, start, size):
      del sampler
      if start == self.kill_before:
        raise KeyboardInterrupt
      self.sampled.append(start)
      return images[start : start + size]

    self.enterContext(mock.patch.object(Sampler, "batch", batch))

  def _run(self, kill_before=None, num=_NUM, size=_SIZE, settings=_SETTINGS):
    self.kill_before = kill_before
    return sample_lib.sample_files(
      _sampler(), num, self.out, batch_size=size, settings=settings
    )

  def _killed(self, **options):
    with self.assertRaises(KeyboardInterrupt):
      self._run(**options)
    self.assertFalse(self.out.exists())

  def _assert_whole(self):
    with np.load(self.out, allow_pickle=False) as stored:
      self.assertEqual(stored.files, ["arr_0", "arr_1"])
      images, labels = stored["arr_0"], stored["arr_1"]
    np.testing.assert_array_equal(images, _images()[:_NUM])
    (scored,) = open_images(self.out).batches(_NUM)  # by `fid`
    np.testing.assert_array_equal(scored, np.broadcast_to(images, scored.shape))
    np.testing.assert_array_equal(labels, np.arange(_NUM) % 10)
    self.assertEqual((images.dtype, labels.dtype), (np.uint8, np.int32))
    self.assertCountEqual(self.root.iterdir(), [self.out, self.stated])

  @parameterized.parameters((), (8, 16), (0, 24), (24, 24))
  def test_kills_lose_nothing_and_nothing_is_sampled_again(self, *kills):
    for start in kills:
      self._killed(kill_before=start)
    left = _NUM - len(self.sampled) * _SIZE
    self.assertEqual(self._run(), left)
    self._assert_whole()
    written = self.out.read_bytes()
    self.assertEqual(self._run(), 0)
    self.assertEqual(self.sampled, list(_STARTS))
    self.assertEqual(self.out.read_bytes(), written)
    self._assert_whole()

  @parameterized.parameters(("000000016.npy", 2), ("images.npz", 4))
  def test_full_disk_keeps_whole_parts_and_is_continued(self, name, whole):
    replace = os.replace

    def fail(source, target):
      if pathlib.Path(target).name == name:
        raise OSError(errno.ENOSPC, "No space left")
      replace(source, target)

    with mock.patch.object(os, "replace", fail):
      with self.assertRaisesRegex(OSError, "No space left"):
        self._run()
    expected = {f"{start:09d}.npy" for start in _STARTS[:whole]}
    self.assertEqual({path.name for path in self.parts.iterdir()}, expected)
    self.assertFalse(self.out.exists())
    self.assertEqual(self._run(), max(_NUM - 8 * whole, 0))
    self._assert_whole()

  @parameterized.parameters(
    ({"settings": {**_SETTINGS, "seed": 1}}, "seed: 1 here, 0 there"),
    ({"num": 30}, "num: 30 here, 29 there"),
    ({"size": 16}, "batch_size: 16 here, 8 there"),
  )
  def test_other_settings_are_refused_by_name(self, options, message):
    self._killed(kill_before=8)
    with self.assertRaisesRegex(ValueError, message):
      self._run(**options)
    self.assertEqual(self._run(), _NUM - 8)  # the parts are untouched
    with self.assertRaisesRegex(ValueError, message):
      self._run(**options)
    self._assert_whole()

  def test_a_file_of_unknown_origin_is_not_overwritten(self):
    self.out.write_bytes(b"old")
    with self.assertRaisesRegex(ValueError, "images.npz exists, and no"):
      self._run()
    self.assertEqual(self.out.read_bytes(), b"old")
