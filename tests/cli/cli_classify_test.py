import json
import pathlib
import tempfile

import numpy as np
from absl.testing import absltest, parameterized
from PIL import Image

from tests.cli import tiny_checkpoint

_RGB = np.random.RandomState(0).randint(0, 256, (8, 8, 3), np.uint8)


class ClassifyCommandTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    root = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.root = pathlib.Path(root)
    cls.workdir = cls.root / "run"
    tiny_checkpoint.save(cls.workdir)
    cls.image = cls.root / "good.png"
    Image.fromarray(_RGB).save(cls.image)

  def _call(self, *argv):
    return tiny_checkpoint.call("classify", *argv, "--checkpoint", self.workdir)

  def test_json_has_the_predictions_of_every_image(self):
    other = self.root / "other.jpg"
    Image.fromarray(255 - _RGB).resize((20, 13)).save(other)
    status, out, _ = self._call(self.image, other, "--json", "-")
    rows = json.loads(out)  # nothing else on stdout
    self.assertEqual(status, 0)
    self.assertEqual([r["image"] for r in rows], [str(self.image), str(other)])
    for row in rows:
      best = row["predictions"]
      values = [p["probability"] for p in best]
      self.assertLen(best, 5)
      self.assertEqual(values, sorted(values, reverse=True))
      self.assertLessEqual(sum(values), 1 + 1e-6)
      for p in best:
        self.assertEqual(p["name"], tiny_checkpoint.CLASS_NAMES[p["label"]])

  def test_folder_is_all_images_in_it_and_below(self):
    folder = self.root / "folder"
    for name in ("b/2.PNG", "a.png", ".hidden/3.png", "notes.txt"):
      path = folder / name
      path.parent.mkdir(parents=True, exist_ok=True)
      Image.fromarray(_RGB).save(path, format="PNG")
    status, out, _ = self._call(folder, self.image, "--batch-size", 2)
    self.assertEqual(status, 0)
    files = [line.partition(": ")[0] for line in out.splitlines()]
    expected = [folder / "a.png", folder / "b/2.PNG", self.image]
    self.assertEqual(files, [str(path) for path in expected])


if __name__ == "__main__":
  absltest.main()
