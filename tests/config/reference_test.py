import dataclasses
from typing import Literal

from absl.testing import absltest, parameterized

from docs import write_reference
from moh_jax import config as config_lib
from moh_jax.config import reference


@dataclasses.dataclass(frozen=True)
class _Part:
  """A part.

  Attributes:
    size: of the part,
      on two lines.
  """

  size: int | None = None


@dataclasses.dataclass(frozen=True)
class _Whole:
  """A section with a part. More of it.

  Attributes:
    part: the part.
    kind: what it is.
    free: any text.

  Raises:
    ValueError: a kind that there is not.
  """

  part: _Part = _Part()
  kind: Literal["a", "b"] = "a"
  free: str = "b"


class KeysTest(parameterized.TestCase):
  def test_sections_nest(self):
    part, kind, free = reference.keys("whole", _Whole(part=_Part(3)))
    self.assertEqual(
      part,
      reference.Key(
        "whole.part.size", 3, "int | None", "of the part, on two lines.", ()
      ),
    )
    self.assertEqual(kind.choices, ("'a'", "'b'"))
    self.assertEqual(free.choices, ())
    self.assertEqual(free.meaning, "any text.")

  @parameterized.parameters(
    ("train.seed", "int", ()),
    ("optim.schedule", "str", ("'cosine'", "'constant'", "'wsd'")),
    ("optim.no_decay", "tuple[str, ...]", ()),
    ("optim.warmup_steps", "int | None", ()),
    ("model.image_size", "tuple[int, int] | None", ()),
    ("model.dtype", "str", ("'float32'", "'bfloat16'")),
  )
  def test_of_a_real_config(self, name, type_name, choices):
    config = config_lib.Config(config_lib.ViTConfig())
    section = name.partition(".")[0]
    found = {
      key.name: key for key in reference.keys(section, getattr(config, section))
    }
    self.assertEqual(found[name].type, type_name)
    self.assertEqual(found[name].choices, choices)

  @parameterized.parameters("vit", "dit", "llm")
  def test_every_key_has_a_meaning(self, family):
    config = config_lib.from_config_dict({"model": {"family": family}})
    for name in config_lib.to_config_dict(config):
      for key in reference.keys(name, getattr(config, name)):
        self.assertNotEmpty(key.meaning, key.name)


class TextTest(absltest.TestCase):
  def test_description_shows_the_configs_values(self):
    config = config_lib.Config(
      config_lib.ViTConfig(), train=config_lib.TrainConfig(steps=7)
    )
    text = reference.describe(config)
    self.assertIn("\n  --config.train.steps=7  (int)\n", text)
    self.assertNotIn("--config.sample", text)  # of diffusion models
    self.assertLessEqual(max(map(len, text.splitlines())), 120)

  def test_markdown_has_every_key_of_every_family_once(self):
    text = write_reference.sections()
    for line in ("| `optim.lr` | `0.001` | `float` |", "### diffusion"):
      self.assertIn(line, text)
    for family in ("vit", "dit", "llm"):
      self.assertIn(f"| `model.family` | `'{family}'` | `str` |", text)
    self.assertEqual(text.count("| `train.steps` |"), 1)
    self.assertEqual(text.count("| `data.augment` |"), 1)
    for line in text.splitlines():
      if line.startswith("|"):
        self.assertEqual(line.replace(r"\|", "").count("|"), 5, line)


if __name__ == "__main__":
  absltest.main()
