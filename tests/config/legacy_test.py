from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.config import legacy

_OLD = {
  "model": {
    "family": "llm",
    "router": "query_norm",
    "gate_form": "paper",
    "two_stage": False,
    "straight_through": "all",
    "rope_theta": 5.0,
    "rope_scaling": "llama3",
    "rope_factor": 2.0,
    "rope_low_freq_factor": 1.5,
    "rope_high_freq_factor": 3.0,
    "rope_original_length": 7,
  },
  "train": {
    "steps": 9,
    "mixup": 0.0,
    "cutmix": 0.0,
    "cutmix_prob": 0.5,
    "label_smoothing": 0.0,
  },
}


class UpgradeTest(parameterized.TestCase):
  def test_values_move_to_their_sections(self):
    config = config_lib.from_config_dict(legacy.upgrade(_OLD))
    self.assertEqual(
      config.model.router,
      config_lib.RouterConfig("query_norm", "paper", False, "all"),
    )
    self.assertEqual(
      config.model.rope,
      config_lib.RotaryConfig(5.0, "llama3", 2.0, 1.5, 3.0, 7),
    )
    self.assertEqual(config.train, config_lib.TrainConfig(steps=9))

  def test_classifiers_keep_how_targets_are_made(self):
    train = {"mixup": 0.2, "cutmix_prob": 0.25, "label_smoothing": 0.1}
    old = {"model": {"family": "vit", "router": "none"}, "train": train}
    config = config_lib.from_config_dict(legacy.upgrade(old))
    self.assertEqual(
      config.classifier,
      config_lib.ClassifierConfig(0.1, mixup=0.2, cutmix_prob=0.25),
    )
    self.assertEqual(config.model.router, config_lib.RouterConfig("none"))

  def test_reduced_decoding_was_exact_in_evaluation(self):
    data = {"source": "image_folder", "path": "x", "augment": "crop_flip"}
    old = {"model": {"family": "vit"}, "data": {**data, "decode": "reduced"}}
    config = config_lib.from_config_dict(legacy.upgrade(old))
    self.assertEqual(config.data.decode, "exact")

  def test_present_configs_stay_as_they_are(self):
    cfg = config_lib.to_config_dict(
      config_lib.Config(config_lib.LLMConfig(rope=config_lib.RotaryConfig(9.0)))
    ).to_dict()
    self.assertEqual(legacy.upgrade(cfg), cfg)

  def test_the_stored_dict_is_not_changed(self):
    before = repr(_OLD)
    legacy.upgrade(_OLD)
    self.assertEqual(repr(_OLD), before)

  @parameterized.parameters(*legacy.MOVED.items())
  def test_present_keys_exist(self, _, present):
    family = "llm" if present.startswith("model") else "vit"
    cls = config_lib.get_family(family).model
    cfg = config_lib.to_config_dict(config_lib.Config(cls())).to_dict()
    for part in present.split("."):
      cfg = cfg[part]


if __name__ == "__main__":
  absltest.main()
