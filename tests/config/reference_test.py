from absl.testing import absltest, parameterized

from docs import write_reference
from moh_jax import config as config_lib
from moh_jax.config import reference
from moh_jax.config.registry import ROUTERS


class KeysTest(parameterized.TestCase):
  @parameterized.parameters(
    ("train.seed", "int", ()),
    ("optim.schedule", "str", ("'cosine'", "'constant'", "'wsd'")),
    ("optim.no_decay", "tuple[str, ...]", ()),
    ("optim.warmup_steps", "int | None", ()),
    ("model.image_size", "tuple[int, int] | None", ()),
    ("model.dtype", "str", ("'float32'", "'bfloat16'")),
    ("model.router.two_stage", "bool", ()),
    ("model.router.kind", "str", tuple(map(repr, ROUTERS.names()))),
  )
  def test_of_a_real_config(self, name, type_name, choices):
    config = config_lib.Config(config_lib.ViTConfig())
    section = name.partition(".")[0]
    found = {
      key.name: key for key in reference.keys(section, getattr(config, section))
    }
    self.assertEqual(found[name].type, type_name)
    # Other tests of the process may have added routers behind ours.
    self.assertEqual(found[name].choices[: len(choices) or None], choices)

  def test_meaning_may_have_several_lines(self):
    found = reference.meanings(config_lib.TrainConfig)["rewind"]
    self.assertEqual(
      found, "what the run does when its loss is NaN or a spike."
    )
    found = reference.meanings(config_lib.OptimConfig)["layer_decay"]
    self.assertEndsWith(found, "1 is one rate for all.")
    self.assertIn("as fine-tuning wants it: the output has", found)

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
