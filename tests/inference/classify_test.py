import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from PIL import Image

from moh_jax.config import Config, DataConfig
from moh_jax.data.infer import resolve
from moh_jax.inference.restore import Restored
from moh_jax.models.registry import make_model
from tests.folders import FolderTest
from tests.models import small
from tests.training import tiny

_NAMES = ("ant", "bee", "cat", "dog", "eel", "fox")
_RGB = np.random.RandomState(0).randint(0, 256, (8, 8, 3), np.uint8)


def _restored(names=_NAMES, channels=3, **data):
  config = Config(
    model=dataclasses.replace(small.ONE_STAGE, channels=channels),
    data=DataConfig(**data),
  )
  config = resolve(config)
  params = tiny.random_params(config)
  return Restored(config, make_model(config)[0], params, 0, names)


class ClassifyTest(FolderTest):
  def _write(self, picture, name="x.png"):
    path = self.root / name
    picture.save(path)
    return str(path)

  @parameterized.parameters(((),), (_NAMES,))
  def test_are_the_models_softmax_most_probable_first(self, names):
    restored = _restored(names)
    (every,) = restored.predict([self._write(Image.fromarray(_RGB))], top=50)
    data = restored.config.data
    pixels = (_RGB / 255 - np.array(data.mean)) / np.array(data.std)
    logits, _ = jax.jit(restored.model.apply)(
      {"params": restored.params}, jnp.float32(pixels[None])
    )
    expected = np.asarray(jax.nn.softmax(logits[0]))
    order = np.argsort(-expected).tolist()
    self.assertEqual([p.label for p in every], order)
    values = [p.probability for p in every]
    np.testing.assert_allclose(values, expected[order], rtol=1e-4)
    for p in every:
      self.assertEqual(p.name, names[p.label] if names else str(p.label))
    (best,) = restored.predict([_RGB])
    self.assertEqual(best, every[:5])
    self.assertEqual(restored.predict([]), [])

  def test_files_pictures_and_arrays_in_any_batches(self):
    picture, restored = Image.fromarray(_RGB), _restored()
    images = [
      self._write(picture, "a.bmp"),
      pathlib.Path(self._write(picture.convert("P").resize((16, 16)))),
      picture,
      _RGB,
      picture.convert("L").resize((31, 5)),
    ]
    alone = [restored.predict([image])[0] for image in images]
    self.assertEqual(alone, [restored.predict(image)[0] for image in images])

    def numbers(found):
      return [[(p.label, p.probability) for p in best] for best in found]

    for size in (2, 3, 32):
      found = restored.predict(images, batch_size=size)
      np.testing.assert_allclose(numbers(found), numbers(alone), rtol=1e-5)
    self.assertEqual(alone[0], alone[2])
    self.assertEqual(alone[2], alone[3])
    stacked = restored.predict(np.stack([_RGB, 255 - _RGB]))
    self.assertEqual(stacked[0][0].label, alone[3][0].label)
    self.assertNotEqual(stacked[0], stacked[1])

  def test_crop_of_evaluation_is_applied(self):
    restored, cropping = _restored(), _restored(eval_resize=8)
    wide = np.concatenate([255 - _RGB[:, :4], _RGB, 255 - _RGB[:, :4]], 1)
    centre = self._write(Image.fromarray(_RGB), "centre.png")
    path = self._write(Image.fromarray(wide), "wide.png")
    self.assertEqual(cropping.predict([path]), restored.predict([centre]))

  @parameterized.parameters(
    ([_RGB, "nope.png"], "nope.png"),
    ([_RGB, np.zeros((8, 8, 3), np.float32)],
     "image 1 of float32 .* must be uint8"),
    ([_RGB, np.zeros((8, 8, 2), np.uint8)],
     r"image 1 of uint8 and shape \(8, 8, 2\) must be uint8 \[X, Y, 3\]"),
    ([np.zeros((0, 8, 3), np.uint8)], r"image 0 .*\(0, 8, 3\) must be"),
  )  # fmt: skip
  def test_others_are_refused_before_the_model_runs(self, images, message):
    broken = dataclasses.replace(_restored(), model=None, params=None)
    with self.assertRaisesRegex((ValueError, FileNotFoundError), message):
      broken.predict(images)
