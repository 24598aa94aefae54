"""The sections of diffusion models, and what a whole run checks of them."""

import dataclasses
import json
import math

from absl.testing import absltest, parameterized

from moh_jax import config as config_lib

_SECTIONS = {
  "diffusion": config_lib.DiffusionConfig,
  "sample": config_lib.SampleConfig,
}
# Section, field, a value just outside its range, what the message allows.
_OUT_OF_RANGE = (
  ("diffusion", "space", "wavelet", "('latent', 'pixel')"),
  ("diffusion", "schedule", "sqrt", "('linear', 'cosine', 'flow')"),
  ("diffusion", "prediction", "score", "('epsilon', 'x0', 'v', 'velocity')"),
  ("diffusion", "loss_weight", "snr", "('uniform', 'min_snr')"),
  ("diffusion", "steps", 20, "[21, 100000]"),
  ("diffusion", "steps", 100_001, "[21, 100000]"),
  ("diffusion", "vb_weight", -1.0, "at least 0"),
  ("diffusion", "vb_weight", math.inf, "finite"),
  ("diffusion", "latent_scale", 0.0, "above 0"),
  ("diffusion", "latent_scale", math.nan, "above 0"),
  ("diffusion", "snr_gamma", -5.0, "above 0"),
  ("diffusion", "snr_gamma", math.inf, "above 0"),
  ("sample", "every", -1, "at least 0"),
  ("sample", "num", 0, "at least 1"),
  ("sample", "cfg_scale", -0.1, "at least 0"),
  ("sample", "cfg_scale", math.nan, "at least 0"),
  ("sample", "eta", 1.5, "in [0, 1]"),
  ("sample", "labels", (3, -2), "at least -1"),
  ("sample", "zoom", 0, "in [1, 64]"),
  ("sample", "method", "rk4", "('ddpm', 'ddim', 'dpm', 'euler', 'heun')"),
  ("sample", "cfg_channels", "four", "('three', 'all')"),
  ("sample", "cfg_interval", (5, 5), "0 <= low < high"),
  ("sample", "cfg_interval", (-1, 5), "0 <= low < high"),
)
_CONFIG = config_lib.Config(
  model=config_lib.DiTConfig(
    num_heads=(6,), shared_heads=(3,), top_k=(2,), num_classes=10
  ),
  data=config_lib.DataConfig(source="latents", path="some/latents"),
  diffusion=config_lib.DiffusionConfig(steps=500, prediction="v"),
  sample=config_lib.SampleConfig(steps="ddim50", cfg_interval=(100, 400)),
)
_PIXEL = dataclasses.replace(
  _CONFIG,
  model=dataclasses.replace(_CONFIG.model, channels=1, input_size=(8, 8)),
  data=config_lib.DataConfig(source="digits", mean=(0.5,), std=(0.5,)),
  diffusion=config_lib.DiffusionConfig(space="pixel"),
)
_FLOW = dataclasses.replace(
  _PIXEL,
  model=dataclasses.replace(_PIXEL.model, learn_sigma=False),
  diffusion=config_lib.DiffusionConfig(
    space="pixel", schedule="flow", prediction="velocity"
  ),
  sample=config_lib.SampleConfig(method="heun", steps="20"),
)
_VIT = config_lib.Config(model=config_lib.ViTConfig())


def _with(config, **sections):
  """The run with fields of some sections changed, checked once at the end."""
  changed = {
    name: dataclasses.replace(getattr(config, name), **fields)
    for name, fields in sections.items()
  }
  return dataclasses.replace(config, **changed)


class SectionsTest(parameterized.TestCase):
  @parameterized.parameters(*_OUT_OF_RANGE)
  def test_message_names_field_value_and_what_is_allowed(
    self, section, field, value, allowed
  ):
    with self.assertRaises(ValueError) as caught:
      _SECTIONS[section](**{field: value})
    message = str(caught.exception)
    self.assertStartsWith(message, f"{section}.{field}={value!r} must be ")
    self.assertIn(allowed, message)

  @parameterized.parameters(
    ("diffusion", "steps", 21),
    ("diffusion", "vb_weight", 0.0),
    ("sample", "every", 0),
    ("sample", "cfg_scale", 0.0),
    ("sample", "cfg_interval", (0, 1)),
  )
  def test_range_includes_its_last_value(self, section, field, value):
    built = _SECTIONS[section](**{field: value})
    self.assertEqual(getattr(built, field), value)

  def test_runtime_fields_exist(self):
    cls = config_lib.DiffusionConfig
    names = {field.name for field in dataclasses.fields(cls)}
    self.assertContainsSubset(cls.RUNTIME_FIELDS, names)


class FamilyTest(parameterized.TestCase):
  @parameterized.parameters("diffusion", "sample")
  def test_diffusion_models_need_the_section(self, name):
    with self.assertRaisesRegex(
      ValueError, f"section '{name}' must be a .*Config for .*, not a NoneType"
    ):
      dataclasses.replace(_CONFIG, **{name: None})

  @parameterized.parameters("diffusion", "sample")
  def test_classifiers_do_not_know_the_section(self, name):
    with self.assertRaisesRegex(
      ValueError, f"unknown config section '{name}' for model.family='vit'"
    ):
      dataclasses.replace(_VIT, **{name: _SECTIONS[name]()})

  @parameterized.parameters("diffusion", "sample")
  def test_dict_of_a_classifier_may_not_have_the_section(self, name):
    cfg = {**config_lib.to_config_dict(_VIT).to_dict(), name: {}}
    with self.assertRaisesRegex(ValueError, f"unknown config section '{name}'"):
      config_lib.from_config_dict(cfg)

  @parameterized.parameters(
    ({"augment": "shift"}, r"data\.augment='shift' must be 'none' for latents"),
    ({"auto_augment": "3a"}, r"data\.auto_augment='3a' must be '' for latents"),
    ({"color_jitter": 0.1}, r"data\.color_jitter=0\.1 must be 0\.0 for lat"),
    ({"random_erasing": 0.1}, r"data\.random_erasing=0\.1 must be 0\.0 for"),
    ({"eval_resize": 9}, r"data\.eval_resize=9 must be 0 for latents"),
  )
  def test_latents_are_augmented_when_they_are_encoded(self, data, message):
    with self.assertRaisesRegex(ValueError, message):
      _with(_CONFIG, data=data)

  def test_interval_begins_within_the_process(self):
    with self.assertRaisesRegex(ValueError, r"must begin below .*steps=500"):
      _with(_CONFIG, sample={"cfg_interval": (1000, 2000)})

  def test_classifiers_read_no_latents(self):
    with self.assertRaisesRegex(
      ValueError, r"data\.source='latents' is for diffusion .*family='vit'"
    ):
      _with(_VIT, data={"source": "latents", "path": "some/latents"})

  def test_the_section_of_classifiers_is_refused(self):
    with self.assertRaisesRegex(
      ValueError, "unknown config section 'classifier' for model.family='dit'"
    ):
      dataclasses.replace(_CONFIG, classifier=config_lib.ClassifierConfig())


class SpaceTest(parameterized.TestCase):
  @parameterized.parameters(
    ("latent", "digits", ""),
    ("latent", "image_folder", "some/images"),
    ("pixel", "latents", "some/latents"),
  )
  def test_space_and_source_go_together(self, space, source, path):
    with self.assertRaisesRegex(
      ValueError,
      rf"diffusion\.space='{space}' and data\.source='{source}' do not go",
    ):
      _with(
        _PIXEL,
        data={"source": source, "path": path},
        diffusion={"space": space},
      )

  @parameterized.parameters("latent", "pixel")
  def test_fake_data_are_of_either_space(self, space):
    config = _with(_PIXEL, data={"source": "fake"}, diffusion={"space": space})
    self.assertEqual(config.diffusion.space, space)

  @parameterized.parameters(
    {"mean": (0.3,)}, {"std": (0.37,)}, {"mean": (0.0,), "std": (1.0,)}
  )
  def test_pixels_are_between_minus_one_and_one(self, **fields):
    with self.assertRaisesRegex(
      ValueError, r"data\.mean=.* and data\.std=.* must be 0\.5 for .*'pixel'"
    ):
      _with(_PIXEL, data=fields)

  def test_pixels_have_one_mean_per_channel(self):
    with self.assertRaisesRegex(
      ValueError, r"data\.mean=\(0\.5, 0\.5\) must have model\.channels=1"
    ):
      _with(_PIXEL, data={"mean": (0.5, 0.5), "std": (0.5, 0.5)})

  def test_latents_are_not_normalized_by_the_data(self):
    five = {"mean": (0.1,) * 5, "std": (0.2,) * 5}
    config = _with(_CONFIG, model={"channels": 4}, data=five)
    self.assertEqual(config.data.mean, (0.1,) * 5)


class SamplingTest(parameterized.TestCase):
  @parameterized.parameters(
    ("501", "501 of the 500 timesteps"),
    ("250,251", "251 of the 250 timesteps in section 2 of 2"),
    ("ddim499", "integer stride"),
    ("0", "'ddimN' or 'N,M,...'"),
    ("many", "'ddimN' or 'N,M,...'"),
  )
  def test_steps_fit_the_process(self, steps, message):
    with self.assertRaises(ValueError) as caught:
      _with(_CONFIG, sample={"steps": steps})
    self.assertStartsWith(str(caught.exception), f"sample.steps={steps!r} ")
    self.assertIn(message, str(caught.exception))

  def test_guidance_needs_label_dropout(self):
    with self.assertRaisesRegex(
      ValueError,
      r"sample\.cfg_scale=1\.5 must be 1 .*model\.label_dropout=0",
    ):
      _with(_CONFIG, model={"label_dropout": 0.0})

  def test_no_guidance_needs_no_label_dropout(self):
    config = _with(
      _CONFIG, model={"label_dropout": 0.0}, sample={"cfg_scale": 1.0}
    )
    self.assertEqual(config.model.label_dropout, 0.0)


class RoundTripTest(parameterized.TestCase):
  @parameterized.parameters(_CONFIG, _PIXEL)
  def test_config_dict(self, config):
    cfg = config_lib.to_config_dict(config)
    self.assertEqual(config_lib.from_config_dict(cfg), config)

  @parameterized.parameters(_CONFIG, _PIXEL)
  def test_json(self, config):
    text = config_lib.to_json(config)
    self.assertEqual(config_lib.from_config_dict(json.loads(text)), config)
    self.assertEqual(json.loads(text)["model"]["family"], "dit")

  def test_only_diffusion_models_have_the_sections(self):
    extra = set(config_lib.to_config_dict(_CONFIG)) - set(
      config_lib.to_config_dict(_VIT)
    )
    self.assertEqual(extra, {"diffusion", "sample"})

  def test_missing_sections_take_their_defaults(self):
    model = dataclasses.asdict(_CONFIG.model)
    config = config_lib.from_config_dict({"model": model})
    self.assertEqual(config.diffusion, config_lib.DiffusionConfig())
    self.assertEqual(config.sample, config_lib.SampleConfig())

  @parameterized.parameters(
    (
      "diffusion",
      "step",
      3,
      "unknown config key diffusion.step; did you mean 'steps'?; known:",
    ),
    ("sample", "steps", 250, "sample.steps=250 must be of type str"),
    ("sample", "cfg_interval", (1, 2, 3), "must have 2 values"),
    ("diffusion", "steps", "1000", "must be of type int"),
  )
  def test_wrong_keys_and_types_are_named(self, section, key, value, message):
    cfg = config_lib.to_config_dict(_CONFIG).to_dict()
    cfg[section][key] = value
    with self.assertRaises(ValueError) as caught:
      config_lib.from_config_dict(cfg)
    self.assertIn(f"{section}.{key}", str(caught.exception))
    self.assertIn(message, str(caught.exception))


class FlowTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"model": {"learn_sigma": True}}, "model.learn_sigma=True must be False"),
    ({"sample": {"method": "ddim"}}, "'ddim' must be one of .'euler', 'heun'"),
    ({"sample": {"steps": "ddim50"}}, "steps='ddim50' must be a number in"),
    ({"sample": {"steps": "0"}}, "steps='0' must be a number in"),
    ({"sample": {"eta": 0.5}}, "sample.eta=0.5 must be 0 .*'heun'"),
    ({"diffusion": {"prediction": "v"}}, "'flow' needs 'velocity'"),
    ({"diffusion": {"schedule": "linear"}}, "'flow' needs 'velocity'"),
    ({"diffusion": {"loss_weight": "min_snr"}}, "must be 'uniform'"),
  )
  def test_what_does_not_go_together_is_named(self, changes, text):
    with self.assertRaisesRegex(ValueError, text):
      _with(_FLOW, **changes)

  @parameterized.parameters(
    ({"sample": {"labels": (3, 10)}}, r"\(3, 10\) must be in \[-1, 9\]"),
    (
      {"model": {"label_dropout": 0.0}, "sample": {"labels": (-1,)}},
      "has no label that stands for none",
    ),
  )
  def test_labels_of_previews_must_exist(self, changes, text):
    with self.assertRaisesRegex(ValueError, text):
      _with(_CONFIG, **changes)

  def test_diffusion_refuses_its_solvers(self):
    with self.assertRaisesRegex(ValueError, "'heun' must be one of .'ddpm'"):
      _with(_CONFIG, sample={"method": "heun"})


if __name__ == "__main__":
  absltest.main()
