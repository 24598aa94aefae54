import dataclasses
import math

from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.config import reference

_SECTIONS = {
  "data": config_lib.DataConfig,
  "optim": config_lib.OptimConfig,
  "train": config_lib.TrainConfig,
  "rewind": config_lib.RewindConfig,
  "classifier": config_lib.ClassifierConfig,
  "mesh": config_lib.MeshConfig,
  "checkpoint": config_lib.CheckpointConfig,
  "eval": config_lib.EvalConfig,
  "log": config_lib.LogConfig,
}
# Section, field, a value just outside its range, what the message allows.
_OUT_OF_RANGE = (
  ("data", "source", "csv", "('digits', 'image_folder', "),
  ("data", "source", "csv", "'array_record', 'parquet', 'latents', 'fake')"),
  ("data", "decode", "quick", "('exact', 'fast')"),
  ("data", "decode", "fast", "'exact' with data.source='fake'; it is for ('im"),
  ("data", "class_list", "x.txt", "for ('image_folder', 'parquet')"),
  ("data", "label_column", "y", "for ('parquet',)"),
  ("data", "augment", "flip", "('none', 'shift', 'crop_flip', 'center_flip')"),
  ("data", "auto_augment", "v0", "'', '3a', or 'rand' with sections"),
  ("data", "color_jitter", -0.1, "at least 0"),
  ("data", "random_erasing", 1.1, "[0, 1]"),
  ("data", "repeats", 0, "at least 1"),
  ("data", "bad_images", "ignore", "('raise', 'skip', 'check')"),
  ("data", "batch_size", 0, "at least 1"),
  ("data", "prefetch", 0, "at least 1"),
  ("data", "fake_examples", 0, "at least 1"),
  ("data", "num_threads", 0, "at least 1"),
  ("data", "eval_resize", -1, "at least 0"),
  ("optim", "schedule", "linear", "('cosine', 'constant', 'wsd')"),
  ("optim", "name", "sgd", "('adamw', 'adafactor', 'lion', 'muon')"),
  ("optim", "decay_form", "root", "('linear', 'cosine', 'sqrt')"),
  ("optim", "decay_steps", -1, "at least 0"),
  ("optim", "moment_dtype", "float16", "('float32', 'bfloat16')"),
  ("optim", "ema_dtype", "float16", "('float32', 'bfloat16')"),
  ("optim", "ema_every", 0, "at least 1"),
  ("optim", "lr", -1e-9, "at least 0"),
  ("optim", "lr", math.nan, "at least 0"),
  ("optim", "warmup_lr", -0.1, "at least 0"),
  ("optim", "final_lr", -0.1, "at least 0"),
  ("optim", "eps", -1e-8, "at least 0"),
  ("optim", "weight_decay", -0.05, "at least 0"),
  ("optim", "clip_norm", -1.0, "at least 0"),
  ("optim", "warmup_steps", -1, "at least 0"),
  ("optim", "accumulation", 0, "at least 1"),
  ("optim", "b1", 1.0, "[0, 1)"),
  ("optim", "b2", -0.1, "[0, 1)"),
  ("optim", "ema_decay", 1.0, "[0, 1)"),
  ("train", "steps", 0, "at least 1"),
  ("train", "seed", -1, "[0, 2147483647]"),
  ("train", "seed", 2**31, "[0, 2147483647]"),
  ("train", "balance_weight", -0.01, "at least 0"),
  ("rewind", "steps", -1, "at least 0"),
  ("rewind", "limit", 0, "at least 1"),
  ("rewind", "spike", 0.5, "0 or at least 1"),
  ("rewind", "spike", 2.0, "0 where rewind.steps=0"),
  ("classifier", "mixup", -0.1, "at least 0"),
  ("classifier", "cutmix", -0.1, "at least 0"),
  ("classifier", "cutmix_prob", 1.5, "[0, 1]"),
  ("classifier", "label_smoothing", math.nan, "[0, 1]"),
  ("mesh", "data", 0, "-1 or at least 1"),
  ("mesh", "fsdp", -2, "-1 or at least 1"),
  ("mesh", "tensor", 0, "-1 or at least 1"),
  ("mesh", "sequence", 0, "-1 or at least 1"),
  ("checkpoint", "every", 0, "at least 1"),
  ("checkpoint", "keep_last", 0, "at least 1"),
  ("checkpoint", "keep_every", -1, "at least 0"),
  ("checkpoint", "keep_every", 1500, "multiple of checkpoint.every=1000"),
  ("eval", "every", -1, "at least 0"),
  ("eval", "batch_size", 0, "at least 1"),
  ("log", "every", 0, "at least 1"),
)
# Section, field and the last value inside its range.
_IN_RANGE = (
  ("optim", "b1", 0.0),
  ("optim", "ema_decay", 0.9999),
  ("optim", "clip_norm", 0.0),
  ("train", "seed", 2**31 - 1),
  ("classifier", "cutmix_prob", 1.0),
  ("classifier", "label_smoothing", 1.0),
  ("mesh", "fsdp", 1),
  ("checkpoint", "keep_every", 0),
  ("eval", "every", 0),
)


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

  @parameterized.parameters(*_IN_RANGE)
  def test_range_includes_its_last_value(self, section, field, value):
    built = _SECTIONS[section](**{field: value})
    self.assertEqual(getattr(built, field), value)

  @parameterized.parameters("image_folder", "array_record", "latents")
  def test_source_on_disk_needs_a_path(self, source):
    with self.assertRaisesRegex(
      ValueError, rf"data\.path='' must .*data\.source='{source}'"
    ):
      config_lib.DataConfig(source=source)

  @parameterized.parameters("digits", "fake")
  def test_source_without_files_needs_no_path(self, source):
    self.assertEqual(config_lib.DataConfig(source=source).path, "")

  def test_mean_and_std_have_equally_many_values(self):
    with self.assertRaisesRegex(
      ValueError, r"data\.mean=\(0\.5,\) and data\.std=\(1\.0, 1\.0\)"
    ):
      config_lib.DataConfig(mean=(0.5,), std=(1.0, 1.0))

  @parameterized.parameters(0.0, -1.0)
  def test_std_is_above_zero(self, std):
    with self.assertRaisesRegex(ValueError, r"data\.std=.* above 0"):
      config_lib.DataConfig(mean=(0.5,), std=(std,))

  def test_empty_mean_and_std_are_refused_by_name(self):
    with self.assertRaisesRegex(ValueError, r"data\.(mean|std)=\(\)"):
      config_lib.DataConfig(mean=(), std=())

  def test_mesh_has_at_most_one_open_axis(self):
    with self.assertRaisesRegex(ValueError, "at most one axis of size -1"):
      config_lib.MeshConfig(data=-1, fsdp=-1)

  def test_open_axis_may_be_any(self):
    mesh = config_lib.MeshConfig(data=2, tensor=-1)
    self.assertEqual((mesh.data, mesh.tensor), (2, -1))


class DocumentationTest(parameterized.TestCase):
  @parameterized.parameters(
    *_SECTIONS.values(),
    config_lib.ViTConfig,
    config_lib.DiTConfig,
    config_lib.LLMConfig,
    config_lib.TextDataConfig,
    config_lib.TuneConfig,
    config_lib.DiffusionConfig,
    config_lib.SampleConfig,
    config_lib.RouterConfig,
    config_lib.RotaryConfig,
  )
  def test_every_field_has_its_line(self, section):
    documented = reference.meanings(section)
    fields = [field.name for field in dataclasses.fields(section)]
    self.assertCountEqual(documented, fields)


if __name__ == "__main__":
  absltest.main()
