import dataclasses

import numpy as np
from PIL import Image

from moh_jax.inference.restore import restore
from tests.cli import tiny_checkpoint


class ClassifyTest(tiny_checkpoint.CommandTest):
  COMMAND, STORED = "classify", "vit"

  def test_best_classes_of_every_image_of_a_folder_and_below(self):
    pixels = np.random.RandomState(0).randint(0, 256, (8, 8, 3), np.uint8)
    for name in ("b/2.PNG", "a.png", ".hidden/3.png", "notes.txt"):
      path = self.root / name
      path.parent.mkdir(exist_ok=True)
      Image.fromarray(pixels).save(path, format="PNG")
    argv = (self.root, self.root / "b/2.PNG", "--top=2")
    rows = self.report(*argv)
    files = [str(self.root / n) for n in ("a.png", "b/2.PNG", "b/2.PNG")]
    self.assertEqual([row["image"] for row in rows], files)
    (best,) = restore(tiny_checkpoint.stored("vit")).predict([pixels], top=2)
    self.assertIn(best[0].name, tiny_checkpoint.CLASS_NAMES)
    for row in rows:
      self.assertEqual(row["predictions"], list(map(dataclasses.asdict, best)))
    told = ", ".join(f"{p.name} {p.probability:.1%}" for p in best)
    lines = [f"{file}: {told}" for file in files]
    self.assertEqual(self.done(*argv).splitlines(), lines)
