"""What the sections refuse, and the last values that they take."""

import dataclasses
import math
import re

from absl.testing import absltest, parameterized

from docs import write_reference
from moh_jax import config as config_lib
from moh_jax.config import reference
from moh_jax.config.data import RandAugmentPolicy, parse_policy
from moh_jax.config.dit import LatentScaling, VAEConfig
from moh_jax.config.run import section_types
from tests.models import small

_CLASSES = (
  *(*section_types("vit").values(), *section_types("dit").values()),
  *(config_lib.RouterConfig, config_lib.RotaryConfig, config_lib.LoraConfig),
  *(LatentScaling, VAEConfig),
)
_SECTIONS = {
  **{cls.NAME: cls() for cls in _CLASSES},
  "vit": small.TALL_VIT,
  "dit": small.DIT,
  "llm": small.LLM,
  "text": config_lib.TextDataConfig(),
  "mix": config_lib.TextDataConfig(
    source="tokens", path="here", mix=("web", "code"), ratios=(60.0, 40.0)
  ),
}
# A value just outside of a range, what the message says, and some fields.
_OUTSIDE = (
  (0, "must be at least 1", "vit.channels data.batch_size train.steps"),
  (-1, "must be at least 0", "vit.fixed_pool_size data.workers log.heads"),
  (-1e-09, "must be at least 0", "classifier.mixup optim.lr"),
  (1.1, "must be in [0, 1]", "data.val_share classifier.cutmix_prob"),
  (1.0, "must be in [0, 1)", "optim.b1 optim.b2 optim.ema_decay"),
  (0.0, "must be in (0, 1]", "optim.layer_decay"),
  (0.0, "must be above 0", "rope.attention_factor dit.mlp_ratio"),
  (math.nan, "must be finite", "llm.norm_eps optim.lr"),
  (math.inf, "must be finite", "diffusion.vb_weight"),
  (0, "-1 or at least 1", "mesh.data mesh.sequence"),
  (20, "must be at least 21", "diffusion.steps"),
  ("?", "must be one of ('float32', 'bfloat16')", "vit.dtype"),
  (
    "?",
    "('two_stage', 'query_norm', 'timestep', 'gate', 'none'",
    "router.kind",
  ),
  ("?", "'array_record', 'parquet', 'latents', 'fake')", "data.source"),
)
_STAGES = "one value per stage, or one, as model.depths=(1, 2"
_SOURCE = "path='' must name the directory of"
# Section, field, a value, what the message says.
_REFUSED = (
  *(
    (*field.split("."), value, words)
    for value, words, fields in _OUTSIDE
    for field in fields.split()
  ),
  ("dit", "router", "none", "a section with the fields ['kind', "),
  ("vit", "embed_dims", (2,) * 3, _STAGES),
  ("vit", "attention_impl", "kernel", "('auto', 'dense', 'packed', 'cudnn')"),
  ("vit", "router", config_lib.RouterConfig("query_norm"), "the norms"),
  ("vit", "image_size", (16, 2), "for a pooled grid (4, 0) in stage 1"),
  ("vit", "embed_dims", (8, 10), "a multiple of model.num_heads[1]=4"),
  ("vit", "top_k", (1, 3), "model, stage 2: top_k=3 must be in [0, 2]"),
  ("dit", "width", 6, "multiple of 4"),
  ("dit", "input_size", (4, 5), "multiples of model.patch_size=2"),
  ("dit", "num_heads", (4, 0, 6), "layer 1: num_heads=0 must be at least 1"),
  ("dit", "top_k", (1, 1), "num_heads=(4, 4, 6) has (3)"),
  ("llm", "num_kv_heads", 3, "num_heads=4 must be a multiple of 3 key"),
  ("llm", "head_dim", 7, "even"),
  ("llm", "head_order", ((0, 1, 2, 3), (0, 1, 2, 2)), "each of the 4 heads"),
  ("rope", "theta", 1.0, "must be above 1"),
  ("rope", "low_freq_factor", 4.0, "below rope.high_freq_factor=4.0"),
  ("vae", "block_out_channels", (64, 48), "multiples of vae.norm_groups=32"),
  ("vae", "scaling", LatentScaling(mean=(0.1,)), "must have 4 values"),
  ("data", "source", "image_folder", _SOURCE),
  ("data", "label_column", "y", "for ('parquet',)"),
  ("mix", "mix", ("a", "a"), "must name each source once"),
  ("mix", "ratios", (60.0, 39.0), "must sum to 100 (percent), not 99"),
  ("diffusion", "schedule", "flow", "must be 'velocity' for 'flow'"),
  ("mesh", "fsdp", -1, "at most one axis of size -1"),
  ("checkpoint", "keep_every", 15, "needs checkpoint.every too"),
  ("log", "profile", (5, 2), "(A, B) with A < B"),
)
# Fields, and the last value inside of their ranges.
_TAKEN = (
  ("data", "batch_size", 1),
  ("optim", "lr", 0.0),
  ("optim", "layer_decay", 1.0),
  ("diffusion", "steps", 21),
  ("vit", "top_k", (0, 2)),
  ("mix", "ratios", (33.33, 66.67)),  # rounded
)


class SectionsTest(parameterized.TestCase):
  @parameterized.parameters(*_REFUSED)
  def test_message_names_field_value_and_what_is_allowed(
    self, section, field, value, words
  ):
    base = _SECTIONS[section]
    with self.assertRaises(ValueError) as caught:
      dataclasses.replace(base, **{field: value})
    message = str(caught.exception)
    self.assertIn(words, message)
    name = re.escape(base.NAME)
    self.assertRegex(message, rf"^({name}\.\w+|{name},|mesh=|latents)")
    if message.startswith(f"{base.NAME}.{field}=") and type(value) is not tuple:
      self.assertStartsWith(message, f"{base.NAME}.{field}={value!r} ")

  @parameterized.parameters(*_TAKEN)
  def test_range_includes_its_last_value(self, section, name, value):
    built = dataclasses.replace(_SECTIONS[section], **{name: value})
    self.assertEqual(getattr(built, name), value)

  @parameterized.parameters(
    ("data", {"mean": (0.5,), "std": (1.0, 1.0)}, "must have one value per ch"),
    ("llm", {"shared_heads": (1, 0), "top_k": (2, 0)}, "1: shared=0 and top_k"),
    ("checkpoint", {"every": 1000, "keep_every": 1500}, "multiple of checkpoi"),
    ("tune", {"top_k_steps": (0, 5), "top_k_values": (3,)}, "one value for ea"),
    ("tune", {"top_k_steps": (1, 5), "top_k_values": (3, 2)}, "rise from 0"),
  )
  def test_fields_that_do_not_fit_together_are_named(
    self, section, fields, words
  ):
    with self.assertRaisesRegex(ValueError, re.escape(words)):
      dataclasses.replace(_SECTIONS[section], **fields)

  @parameterized.parameters(*_SECTIONS)
  def test_every_field_is_documented_and_every_named_one_there(self, section):
    cls = type(_SECTIONS[section])
    fields = [field.name for field in dataclasses.fields(cls)]
    self.assertCountEqual(reference.meanings(cls), fields)
    named = {*cls.RUNTIME_FIELDS, *cls.NUMERIC_FIELDS}
    self.assertContainsSubset(named, fields)

  def test_one_value_stands_for_every_stage(self):
    one, each = (
      dataclasses.replace(small.TALL_VIT, mlp_ratios=(2,) * n) for n in (1, 2)
    )
    self.assertEqual(one, each)

  def test_values_become_what_their_types_say(self):
    built = config_lib.ViTConfig(
      mlp_ratios=[8, 8, 4, 4], router={"kind": "none"}
    )
    self.assertEqual(built.mlp_ratios, (8, 8, 4, 4))
    self.assertIsInstance(built.mlp_ratios[0], float)
    self.assertEqual(built.router, config_lib.RouterConfig("none"))


class PolicyTest(parameterized.TestCase):
  @parameterized.parameters(
    ("", None),
    ("rand-m9-mstd0.5-inc1", {"magnitude": 9, "spread": 0.5}),
    ("rand-inc1-n3-p0.8-mmax20-m15",
     {"layers": 3, "probability": 0.8, "limit": 20, "magnitude": 15}),
  )  # fmt: skip
  def test_means_what_timm_means(self, text, fields):
    expected = None if fields is None else RandAugmentPolicy(**fields)
    self.assertEqual(parse_policy(text), expected)

  @parameterized.parameters(
    *(
      (text, f"{text}' must be '', or 'rand' with sections -KEYVALUE, each")
      for text in ("rand-tweights-inc1", "rand-m9-m8-inc1", "rand-m9")
    ),
    ("rand-m31-inc1", "magnitude=31 must be in [0, 30]"),
  )
  def test_names_what_is_not_understood(self, text, words):
    with self.assertRaisesRegex(
      ValueError, rf"data\.auto_augment.*{re.escape(words)}"
    ):
      parse_policy(text)


class ReferenceTest(absltest.TestCase):
  def test_markdown_has_every_key_of_every_family_once(self):
    text = write_reference.sections()
    for part in (
      *("| `optim.lr` | `0.001` | `float` |", "### diffusion"),
      "| `model.image_size` | `(224, 224)` | `tuple[int, int] \\| None` |",
      "| `model.router.two_stage` | `True` | `bool` | whether",
      # A meaning of several lines, and choices.
      "as fine-tuning wants it: the output has the whole rate, the first",
      "1 is one rate for all. |",
      "One of 'cosine', 'constant', 'wsd'. |",
      "One of 'two_stage', 'query_norm', 'timestep', 'gate', 'none'",
    ):
      self.assertIn(part, text)
    self.assertEqual(text.count("| `train.steps` |"), 1)
    self.assertEqual(text.count("| `data.augment` |"), 1)
    for line in text.splitlines():
      if line.startswith("|"):
        self.assertEqual(line.replace(r"\|", "").count("|"), 5, line)
