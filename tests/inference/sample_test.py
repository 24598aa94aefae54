"""Sampling: which image an index is, and files that survive interruptions."""

import errno
import functools
import os
import pathlib
import zipfile
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from moh_jax.inference import sample as sample_lib
from moh_jax.inference.restore import Restored
from moh_jax.inference.sample import Sampler
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from tests.folders import FolderTest
from tests.training import tiny

_NUM, _SIZE = 29, 8  # four batches, the last one of five images
_STARTS = (0, 8, 16, 24)
# A tuple is stored as a list.
_SETTINGS = {"checkpoint": "here", "seed": 0, "tuple": (1, 2)}


@functools.cache
def _mesh(devices=1):
  config = tiny.dit_config(mesh={"data": devices})
  return sharding.make_mesh(config.mesh, jax.devices()[:devices])


@functools.cache
def _restored(devices=1, **sample):
  config = tiny.dit_config(sample=sample)
  whole = sharding.replicated(_mesh(devices))
  params = jax.device_put(tiny.random_params(config), whole)
  return Restored(config, make_model(config)[0], params, 0, ())


@functools.cache
def _sampler(devices=1, sample=(), labels=(), **options):
  restored = _restored(devices, **dict(sample))
  return Sampler(restored, labels=labels, mesh=_mesh(devices), **options)


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

  def test_own_noise_is_what_images_begin_with(self):
    rows = np.random.default_rng(0).normal(size=(2, 8, 8, 1))
    restored = _restored(method="ddim")
    sampler = Sampler(restored, labels=(3,), mesh=_mesh(), noise=rows)
    images = sampler.batch(0, 4)
    np.testing.assert_array_equal(images[:2], images[2:])
    self.assertFalse(np.array_equal(images[0], images[1]))

  @parameterized.parameters(
    ({"noise": np.zeros((8, 8, 1))}, r"noise of shape \(8, 8, 1\) must be"),
    ({"start": np.zeros((0, 8, 8, 1))}, "start of shape .* n at least 1"),
    ({"strength": 0.5}, "strength=0.5 is of `start`"),
    ({"start": np.zeros((1, 8, 8, 1)), "strength": 0.0}, "strength=0.0 must"),
    ({"start": np.full((1, 8, 8, 1), 2.0)}, r"start: pixels must be in \[-1"),
    ({"noise": np.full((1, 8, 8, 1), np.nan)}, "noise holds NaN"),
    ({"labels": (1.5,)}, "label 1.5 must be in"),
    ({"labels": (3, 10)}, r"label 10 must be in \[0, 9\]"),
    ({"seed": -1}, r"seed=-1 must be in \[0, 2147483647\]"),
  )
  def test_bad_requests_are_named(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      Sampler(_restored(), mesh=_mesh(), **options)

  @parameterized.parameters((0, 0), (-1, 2), (2**31, 2))
  def test_batches_begin_at_a_number_and_have_images(self, start, size):
    with self.assertRaisesRegex(ValueError, f"start={start} must"):
      _sampler().batch(start, size)

  @parameterized.parameters(5, 8, 13)
  def test_any_number_of_images_is_sampled(self, num):
    images = sample_lib.sample_images(_sampler(), num, _SIZE)
    np.testing.assert_array_equal(images, _images()[:num])


class FilesTest(FolderTest):
  def _run(self):
    sampler = Sampler(_restored(), labels=(9, None), mesh=_mesh())
    return sample_lib.sample_files(
      sampler, 4, self.root, batch_size=2, settings=_SETTINGS
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
    other = (self.root / "none" / "000001.png").read_bytes()
    for wrong in (content[:60], b"", other):
      file.write_bytes(wrong)
      with self.assertRaisesRegex(ValueError, "none/000003.png: .*remove it"):
        self._run()
    sample_lib.write_png(file, _images()[3])
    with self.assertRaisesRegex(ValueError, "is not the image sampled here"):
      self._run()
    (self.root / "settings.json").unlink()
    with self.assertRaisesRegex(ValueError, "9/000000.png is there, and no"):
      self._run()


class NpzTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.out = self.root / "images.npz"
    self.parts = self.root / "images.npz.parts"
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

  def _assert_whole(self, *others):
    with np.load(self.out, allow_pickle=False) as stored:
      self.assertEqual(stored.files, ["arr_0", "arr_1"])
      images, labels = stored["arr_0"], stored["arr_1"]
    np.testing.assert_array_equal(images, _images()[:_NUM])
    np.testing.assert_array_equal(labels, np.arange(_NUM) % 10)
    self.assertEqual((images.dtype, labels.dtype), (np.uint8, np.int32))
    self.assertCountEqual(self.root.iterdir(), [self.out, *others])

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

  def test_a_finished_file_that_was_changed_is_named(self):
    self._run()
    content = bytearray(self.out.read_bytes())
    content[500] ^= 1
    self.out.write_bytes(content)
    with self.assertRaisesRegex(ValueError, "images.npz .* is damaged; remove"):
      self._run()
    content[500] ^= 1
    self.out.write_bytes(content[1:] + content[:1])
    with self.assertRaisesRegex(ValueError, "images.npz .* is damaged; remove"):
      self._run()
    self.out.write_bytes(content)
    with zipfile.ZipFile(self.out) as archive:
      comment = archive.comment
    with zipfile.ZipFile(self.out, "w") as archive:  # one member is hidden
      archive.writestr("arr_0.npy", b"")
      archive.comment = comment
    with self.assertRaisesRegex(ValueError, "images.npz .* is damaged; remove"):
      self._run()
    with mock.patch.object(zipfile, "ZipFile", side_effect=OSError(5, "I/O")):
      with self.assertRaisesRegex(OSError, "I/O"):
        self._run()

  def test_other_files_among_the_parts_stay(self):
    self.parts.mkdir()
    np.save(self.parts / "mine.npy", np.zeros(3))
    other = self.parts / "123456789.npz"  # a part of no call of this size
    np.savez(other, np.zeros(3))
    self._run()
    self.assertEqual(self._run(), 0)
    self.assertLen(list(self.parts.iterdir()), 2)
    self._assert_whole(self.parts)

  def test_what_a_kill_left_of_a_file_goes(self):
    self._killed(kill_before=16)
    (self.parts / ".000000008.npz.0123-45-6789ab.tmp").touch()
    self._run()
    self._assert_whole()

  def test_a_part_of_other_images_is_named(self):
    self._killed(kill_before=16)
    part = self.parts / "000000000.npz"
    with np.load(part) as stored:
      mark = stored["mark"]
    np.savez(part, images=np.zeros((_SIZE, 2, 2, 3), np.uint8), mark=mark)
    with self.assertRaisesRegex(ValueError, "is not what was sampled here"):
      self._run()

  @parameterized.parameters(
    ("cut", "not an npz file, or a truncated one; remove it"),
    ("swapped", "is not what was sampled here; remove it"),
    ("flipped", "damaged npz file: .*; remove it"),
    ("archive", "not an npz file, or a truncated one; remove it"),
    ("pipe", "is a pipe"),
  )
  def test_damaged_parts_are_named(self, how, message):
    self._killed(kill_before=16)
    part = self.parts / "000000000.npz"
    whole = part.read_bytes()
    other = (self.parts / "000000008.npz").read_bytes()
    contents = {"cut": whole[:-1], "swapped": other, "archive": b"PK\3\4"}
    contents["flipped"] = whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]
    if how in contents:
      part.write_bytes(contents[how])
    else:
      part.unlink()
      os.mkfifo(part)
    with self.assertRaisesRegex(ValueError, f"000000000.npz: {message}"):
      self._run()

  @parameterized.parameters(
    ("settings.json", "000000000.npz is there, and no"),
    (None, "parts is a symbolic link"),
  )
  def test_parts_of_unknown_origin_are_not_taken(self, missing, message):
    self._killed(kill_before=16)
    if missing:
      (self.parts / missing).unlink()
    else:
      self.parts.symlink_to(self.parts.rename(self.root / "other"))
    with self.assertRaisesRegex(ValueError, message):
      self._run()

  @parameterized.parameters(("000000016.npz", 2), ("images.npz", 4))
  def test_full_disk_keeps_whole_parts_and_is_continued(self, name, whole):
    replace = os.replace

    def fail(source, target):
      if pathlib.Path(target).name == name:
        raise OSError(errno.ENOSPC, "No space left")
      replace(source, target)

    message = f"{name} cannot be written: .*No space left.* make space"
    with mock.patch.object(os, "replace", fail):
      with self.assertRaisesRegex(OSError, message):
        self._run()
    expected = {f"{start:09d}.npz" for start in _STARTS[:whole]}
    names = {path.name for path in self.parts.iterdir()}
    self.assertEqual(names, expected | {"settings.json"})
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
    self._assert_whole()

  @parameterized.parameters(False, True)
  def test_file_of_other_settings_is_not_overwritten(self, whole):
    if whole:
      self._run(settings={**_SETTINGS, "seed": 1})
    else:
      self.out.write_bytes(b"old")
    written = self.out.read_bytes()
    with self.assertRaisesRegex(ValueError, "exists and was made with other"):
      self._run()
    self.assertEqual(self.out.read_bytes(), written)
