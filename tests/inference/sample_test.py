"""Sampling: which image an index is, and files that survive what may happen."""

import errno
import functools
import os
import pathlib
import tempfile
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax import memory
from moh_jax.inference import sample as sample_lib
from moh_jax.inference.restore import Restored
from moh_jax.models.registry import make_model
from moh_jax.runtime import sharding
from tests.training import tiny

_NUM, _SIZE = 29, 8  # four parts, the last one of five images
_STARTS = (0, 8, 16, 24)
_SETTINGS = {"checkpoint": "here", "seed": 0}


@functools.cache
def _mesh(devices):
  config = tiny.dit_config(mesh={"data": devices})
  return sharding.make_mesh(config.mesh, jax.devices()[:devices])


@functools.cache
def _restored(devices=1, **sample):
  config = tiny.dit_config(sample=sample)
  model, _ = make_model(config)
  whole = sharding.replicated(_mesh(devices))
  params = jax.device_put(tiny.random_params(config), whole)
  return Restored(config, model, params, 0, ())


@functools.cache
def _sampler(devices=1, labels=(), seed=0):
  return sample_lib.Sampler(
    _restored(devices), labels=labels, seed=seed, mesh=_mesh(devices)
  )


@functools.cache
def _images():
  return np.concatenate([_sampler().batch(start, _SIZE) for start in _STARTS])


class SamplerTest(parameterized.TestCase):
  @parameterized.parameters(3, 16)
  def test_images_do_not_depend_on_the_batch_size(self, size):
    images = _sampler().batch(5, size)
    np.testing.assert_array_equal(images, _images()[5 : 5 + size])

  @parameterized.parameters(3, 8)
  def test_images_are_the_same_on_eight_devices(self, size):
    images = _sampler(devices=8).batch(5, size)
    np.testing.assert_array_equal(images, _images()[5 : 5 + size])

  def test_images_are_pixels_and_differ(self):
    images = _images()
    self.assertEqual(images.shape, (32, 8, 8, 1))
    self.assertEqual(images.dtype, np.uint8)
    self.assertLen({image.tobytes() for image in images}, 32)

  def test_labels_are_those_of_all_classes_in_turn(self):
    labels = _sampler().label(np.arange(23))
    np.testing.assert_array_equal(labels, np.arange(23) % 10)
    self.assertEqual(labels.dtype, np.int32)

  def test_wanted_labels_repeat(self):
    labels = _sampler(labels=(3, 3, 7)).label(np.arange(7))
    np.testing.assert_array_equal(labels, [3, 3, 7, 3, 3, 7, 3])

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
    restored = _restored(cfg_scale=0.0)
    free = sample_lib.Sampler(restored, labels=(4,), mesh=_mesh(1)).batch(0, 2)
    np.testing.assert_array_equal(free, none)

  def test_own_noise_is_what_images_begin_with(self):
    rows = np.random.default_rng(0).normal(size=(2, 8, 8, 1))
    sampler = sample_lib.Sampler(
      _restored(method="ddim"), labels=(3,), mesh=_mesh(1), noise=rows
    )
    images = sampler.batch(0, 4)
    np.testing.assert_array_equal(images[:2], images[2:])
    self.assertFalse(np.array_equal(images[0], images[1]))

  def test_start_images_are_kept_the_more_the_less_the_strength(self):
    start = np.tanh(np.random.default_rng(0).normal(size=(1, 8, 8, 1)))
    pixels = (start + 1) * 127.5

    def distance(strength):
      sampler = sample_lib.Sampler(
        _restored(steps="50"), mesh=_mesh(1), labels=(3,),
        start=start, strength=strength,
      )  # fmt: skip
      return np.abs(sampler.batch(0, 1) - pixels).mean()

    self.assertLess(distance(0.02), 20)
    self.assertLess(distance(0.02), distance(1.0))

  @parameterized.parameters(
    ({"noise": np.zeros((8, 8, 1))}, r"noise of shape \(8, 8, 1\) must be"),
    ({"start": np.zeros((0, 8, 8, 1))}, "start of shape .* n at least 1"),
    ({"strength": 0.5}, "strength=0.5 is of `start`"),
    ({"start": np.zeros((1, 8, 8, 1)), "strength": 0.0}, "strength=0.0 must"),
  )
  def test_wrong_beginnings_are_named(self, options, text):
    with self.assertRaisesRegex(ValueError, text):
      sample_lib.Sampler(_restored(), mesh=_mesh(1), **options)

  @parameterized.parameters(1, 5, 8, 13)
  def test_few_images_come_in_full_batches(self, num):
    with mock.patch.object(
      sample_lib.Sampler, "batch", autospec=True,
      side_effect=sample_lib.Sampler.batch,
    ) as batch:  # fmt: skip
      images = sample_lib.sample_images(_sampler(), num, _SIZE)
    np.testing.assert_array_equal(images, _images()[:num])
    self.assertEqual({call.args[2] for call in batch.call_args_list}, {_SIZE})

  @parameterized.parameters(
    ({"labels": (3, 10)}, r"label 10 must be in \[0, 9\]"),
    ({"labels": (-1,)}, r"label -1 must be in \[0, 9\]"),
    ({"seed": -1}, r"seed=-1 must be in \[0, 2147483647\]"),
    ({"seed": 2**31}, "seed=2147483648 must be in"),
  )
  def test_bad_labels_and_seeds_are_named(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      sample_lib.Sampler(_restored(), mesh=_mesh(1), **options)

  def test_model_that_does_not_draw_is_refused(self):
    config = tiny.config()
    restored = Restored(config, make_model(config)[0], {}, 0, ())
    with self.assertRaisesRegex(
      ValueError, r"family 'vit'; `sample` needs 'dit'"
    ):
      sample_lib.Sampler(restored, mesh=_mesh(1))

  def test_latents_need_their_autoencoder(self):
    config = tiny.dit_config(
      data={"source": "fake"}, diffusion={"space": "latent"}
    )
    restored = Restored(config, make_model(config)[0], {}, 0, ())
    with self.assertRaisesRegex(ValueError, "--vae PATH"):
      sample_lib.Sampler(restored, mesh=_mesh(1))


class SampleNpzTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
    self.out = self.root / "images.npz"
    self.parts = self.root / "images.npz.parts"
    self.sampled = []  # starts of the batches that were sampled to their end
    self.kill_before = None  # start of a batch
    draw = sample_lib.Sampler.batch

    def batch(sampler, start, size):
      if start == self.kill_before:
        raise KeyboardInterrupt
      self.sampled.append(start)
      return draw(sampler, start, size)

    self.enterContext(mock.patch.object(sample_lib.Sampler, "batch", batch))

  def _run(self, kill_before=None, num=_NUM, size=_SIZE, settings=_SETTINGS):
    self.kill_before = kill_before
    return sample_lib.sample_npz(
      _sampler(), num, self.out, batch_size=size, settings=settings
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

  def test_killed_before_the_parts_are_removed_keeps_the_file(self):
    with mock.patch.object(
      sample_lib.shutil, "rmtree", side_effect=KeyboardInterrupt
    ):
      with self.assertRaises(KeyboardInterrupt):
        self._run()
    self.assertTrue(self.out.exists())
    self.assertEqual(self._run(), 0)
    self._assert_whole()

  @parameterized.parameters(
    ("x.png", memory, "total", "of memory"),
    ("x.npz", sample_lib.shutil, "disk_usage", "bytes are free"),
  )
  def test_more_images_than_there_is_room_for(self, name, place, call, text):
    config, out = tiny.dit_config(mesh={"data": -1}), self.root / name
    size = 64 * 10  # ten images of 8 x 8 grey pixels
    have = {"total": size, "disk_usage": mock.Mock(free=size)}[call]
    with mock.patch.object(place, call, lambda *_: have):
      sample_lib.check_size(config, 10, out)
      with self.assertRaisesRegex(ValueError, f"11 images.*{text}"):
        sample_lib.check_size(config, 11, out)

  def test_parts_are_not_written_through_a_link(self):
    other = self.root / "other"
    other.mkdir()
    np.save(other / "mine.npy", np.zeros(3))
    self.parts.symlink_to(other)
    with self.assertRaisesRegex(ValueError, "parts is a symbolic link"):
      self._run()
    self.assertTrue((other / "mine.npy").exists())

  def test_parts_of_unknown_settings_are_not_taken(self):
    # As a kill leaves them that comes while the parts are being removed.
    self._killed(kill_before=16)
    for start in (0, 8):
      np.save(self.parts / f"{start:09d}.npy", np.zeros((8, 8, 8, 1), np.uint8))
    (self.parts / "settings.json").unlink()
    self._run()
    self._assert_whole()

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
