"""What the sections refuse, and the last values that they take."""

import dataclasses
import math
import re

from absl.testing import absltest, parameterized

from moh_jax import config as config_lib
from moh_jax.config import HeadBudget, reference
from moh_jax.config.data import RandAugmentPolicy, parse_policy
from moh_jax.config.dit import LatentScaling
from tests.config import small

_DTYPES = "('float32', 'bfloat16')"
_REMATS = "('none', 'full', 'attention', 'dots', 'all_dots', 'offload')"
_SECTIONS = {
  "vit": small.VIT,
  "dit": small.DIT,
  "llm": small.LLM,
  "router": config_lib.RouterConfig(),
  "rope": config_lib.RotaryConfig(),
  "vae": config_lib.VAEConfig(),
  "latents": LatentScaling(),
  "data": config_lib.DataConfig(),
  "text": config_lib.TextDataConfig(),
  "mix": config_lib.TextDataConfig(
    source="tokens", path="here", mix=("web", "code"), ratios=(60.0, 40.0)
  ),
  "tune": config_lib.TuneConfig(),
  "classifier": config_lib.ClassifierConfig(),
  "diffusion": config_lib.DiffusionConfig(),
  "sample": config_lib.SampleConfig(),
  "optim": config_lib.OptimConfig(),
  "train": config_lib.TrainConfig(),
  "rewind": config_lib.RewindConfig(),
  "mesh": config_lib.MeshConfig(),
  "checkpoint": config_lib.CheckpointConfig(),
  "eval": config_lib.EvalConfig(),
  "log": config_lib.LogConfig(),
}
# Section, field, a value just outside its range, what the message says.
_REFUSED = (
  *(
    (model, *row)
    for model in ("vit", "dit", "llm")
    for row in (
      ("family", "resnet", f"must be one of ('{model}',)"),
      ("router", "none", "a section with the fields ['kind', "),
      ("router", "none", "'none' looks like model.router.kind"),
      ("dtype", "float64", _DTYPES),
      ("remat", "some", _REMATS),
      ("attention_impl", "flash", "('auto', 'dense', 'packed', 'kernel'"),
      ("num_heads", 3, "must be a tuple"),
      ("top_k", (1, 10**5), "at most 4096"),
    )
  ),
  *(
    (model, field, 0, "must be at least 1")
    for model, fields in (
      ("vit", ("channels", "num_classes", "patch_stride", "window")),
      ("dit", ("channels", "num_classes", "patch_size", "head_dim", "width")),
      ("llm", ("vocab_size", "max_length", "width", "mlp_dim", "head_dim")),
      ("llm", ("num_kv_heads",)),
    )
    for field in fields
  ),
  ("vit", "attention_impl", "kernel", "the kernels add no position bias"),
  ("vit", "router", config_lib.RouterConfig("query_norm"), "'two_stage'"),
  ("vit", "fixed_pool_size", -1, "at least 0"),
  ("vit", "fixed_pool_size", 5, "model.fixed_pool_size=5)"),
  ("vit", "pretrain_image_size", -1, "at least 0"),
  ("vit", "pretrain_columns", -1, "at least 0"),
  ("vit", "drop_path", 1.0, "in [0, 0.999]"),
  ("vit", "drop_path", -0.1, "in [0, 0.999]"),
  ("vit", "image_size", (8,), "2 values"),
  ("vit", "image_size", (8, 0), "image_size[1]=0 must be at least 1"),
  ("vit", "image_size", (16, 2), "is too small for stage 1"),
  ("vit", "window", 2, "odd"),
  ("vit", "depths", (), "at least one stage"),
  ("vit", "depths", (1, 0), "depths[1]=0 must be at least 1"),
  ("vit", "embed_dims", (8, 0), "at least 1"),
  ("vit", "embed_dims", (8, 10), "a multiple of model.num_heads[1]=4"),
  ("vit", "num_heads", (2, 0), "at least 1"),
  ("vit", "sr_ratios", (0, 1), "at least 1"),
  ("vit", "mlp_ratios", (2, 0), "leaves a stage no MLP column"),
  *(
    ("vit", name, (2,), "one value per stage, as model.depths=(1, 2) has (2)")
    for name in (
      *("embed_dims", "num_heads", "shared_heads", "top_k"),
      *("mlp_ratios", "sr_ratios"),
    )
  ),
  ("vit", "top_k", (1, 3), "model, stage 2: top_k=3 must be in [0, 2]"),
  ("vit", "top_k", (-1, 1), "model.top_k[0]=-1 must be at least 0"),
  ("vit", "shared_heads", (3, 2), "stage 1: shared=3 must be in [0, 2]"),
  ("dit", "width", 6, "multiple of 4"),
  ("dit", "width", -4, "at least 1"),
  ("dit", "mlp_ratio", 0.1, "leaves no MLP column at width 8"),
  ("dit", "mlp_ratio", -1.0, "at least 0"),
  ("dit", "label_dropout", -0.1, "in [0, 0.999]"),
  ("dit", "label_dropout", 1.0, "in [0, 0.999]"),
  ("dit", "input_size", (4, 5), "multiples of model.patch_size=2"),
  ("dit", "input_size", (0, 4), "at least 1"),
  ("dit", "num_heads", (), "at least one layer"),
  ("dit", "num_heads", (4,) * 1025, "at most 1024 layers, not 1025"),
  ("dit", "num_heads", (4, 0, 6), "layer 1: num_heads=0 must be at least 1"),
  ("dit", "shared_heads", (2, 2), "one value per layer"),
  ("dit", "shared_heads", (2, 2, 6, 6), "num_heads=(4, 4, 6) has (3)"),
  ("dit", "shared_heads", (2, 2, 7), "layer 2: shared=7 must be in [0, 6]"),
  ("dit", "top_k", (1, 3, 0), "layer 1: top_k=3 must be in [0, 2]"),
  ("llm", "num_kv_heads", 3, "must divide model.num_heads[0]=4"),
  ("llm", "num_heads", (4, 5), "must divide model.num_heads[1]=5"),
  ("llm", "head_dim", 7, "even"),
  ("llm", "norm_eps", 0.0, "in [1e-12, 1"),
  ("llm", "norm_eps", math.nan, "in [1e-12, 1"),
  ("llm", "loss_chunk", -1, "at least 0"),
  ("llm", "rope", None, "a section with the fields ['theta', "),
  ("llm", "head_order", ((0, 1, 2, 3),), "one value per layer"),
  ("llm", "head_order", ((0, 1, 2, 3), (0, 1, 2, 2)), "each of the 4 heads"),
  ("llm", "head_order", ((0, 1, 2), (0, 1, 2, 3)), "[0]=(0, 1, 2) must hold"),
  ("llm", "head_order", ((1, 2, 3, 4),) * 2, "[0]=(1, 2, 3, 4) must hold"),
  ("router", "kind", "norm", "('two_stage', 'query_norm', 'none'"),
  ("router", "gate_form", "release", "('released', 'paper')"),
  ("router", "straight_through", "no", "('selected', 'all')"),
  ("router", "top_p", 1.5, "in [0, 1]"),
  ("rope", "scaling", "su", "('none', 'linear', 'dynamic', 'llama3', 'yarn')"),
  ("rope", "theta", 0.5, "at least 1"),
  ("rope", "theta", math.inf, "finite"),
  ("rope", "factor", 0.5, "at least 1"),
  ("rope", "original_length", 0, "at least 1"),
  ("rope", "low_freq_factor", 0.0, "above 0 and below"),
  ("rope", "low_freq_factor", 4.0, "below rope.high_freq_factor=4.0"),
  ("rope", "beta_slow", 0.0, "above 0 and at most"),
  ("rope", "beta_slow", 33.0, "at most rope.beta_fast=32.0"),
  ("rope", "attention_factor", 0.0, "above 0"),
  ("vae", "dtype", "float16", _DTYPES),
  ("vae", "layers_per_block", 0, "at least 1"),
  ("vae", "image_channels", 0, "at least 1"),
  ("vae", "latent_channels", 0, "at least 1"),
  ("vae", "norm_groups", 0, "at least 1"),
  ("vae", "norm_eps", 0.0, "in [1e-12, 1"),
  ("vae", "block_out_channels", (), "norm_groups=32, at least one"),
  ("vae", "block_out_channels", (64, 48), "multiples of vae.norm_groups=32"),
  ("vae", "block_out_channels", (64, 0), "at least 1"),
  ("vae", "scaling", LatentScaling(mean=(0.1,)), "must have 4 values"),
  ("latents", "scale", 0.0, "above 0"),
  ("data", "source", "csv", "('digits', 'image_folder', 'array_record', "),
  ("data", "source", "csv", "'parquet', 'latents', 'fake')"),
  ("data", "source", "image_folder", "path='' must name the directory of"),
  ("data", "source", "latents", "path='' must name the directory of"),
  ("data", "decode", "quick", "('exact', 'fast')"),
  ("data", "decode", "fast", "'exact' with data.source='fake'; it is for ('im"),
  ("data", "class_list", "x.txt", "for ('image_folder', 'parquet')"),
  ("data", "label_column", "y", "for ('parquet',)"),
  ("data", "augment", "flip", "('none', 'shift', 'crop_flip', 'center_flip')"),
  ("data", "auto_augment", "v0", "'', '3a', or 'rand' with sections"),
  ("data", "color_jitter", -0.1, "at least 0"),
  ("data", "random_erasing", 1.1, "in [0, 1]"),
  ("data", "repeats", 0, "at least 1"),
  ("data", "bad_images", "ignore", "('raise', 'skip', 'check')"),
  ("data", "batch_size", 0, "at least 1"),
  ("data", "batch_size", 2**20 + 1, "at most 1048576"),
  ("data", "prefetch", 0, "at least 1"),
  ("data", "fake_examples", 0, "at least 1"),
  ("data", "num_threads", 0, "at least 1"),
  ("data", "eval_resize", -1, "at least 0"),
  ("data", "mean", (), "must have one value per channel each"),
  ("text", "source", "digits", "('tokens', 'stdlib', 'fake')"),
  ("text", "source", "stdlib", "path='' must name the directory of"),
  ("text", "source", "tokens", "path='' must name the directory of"),
  ("text", "tokenizer", "words", "('bpe', 'bytes')"),
  ("text", "sequence_length", 0, "at least 1"),
  ("text", "batch_size", 0, "at least 1"),
  ("text", "prefetch", 0, "at least 1"),
  ("text", "num_threads", 0, "at least 1"),
  ("text", "fake_examples", 0, "at least 1"),
  ("text", "ratios", (100.0,), "must be () with data.source='fake'"),
  ("mix", "source", "stdlib", "mix=('web', 'code') must be () with data."),
  ("mix", "mix", ("a", "a"), "must name each source once"),
  ("mix", "ratios", (100.0,), "must have one value for each of data.mix"),
  ("mix", "ratios", (100.0, 0.0), "above 0"),
  ("mix", "ratios", (120.0, -20.0), "above 0"),
  ("mix", "ratios", (math.nan, 50.0), "above 0"),
  ("mix", "ratios", (math.inf, 50.0), "above 0, at most"),
  ("mix", "ratios", (60.0, 39.0), "must sum to 100 (percent), not 99"),
  ("mix", "ratios", (0.6, 0.4), "must sum to 100 (percent), not 1"),
  ("tune", "top_k_values", (3,), "one value for each of tune.top_k_steps=()"),
  ("classifier", "mixup", -0.1, "at least 0"),
  ("classifier", "cutmix", -0.1, "at least 0"),
  ("classifier", "cutmix_prob", 1.5, "in [0, 1]"),
  ("classifier", "label_smoothing", math.nan, "in [0, 1]"),
  ("diffusion", "space", "wavelet", "('latent', 'pixel')"),
  ("diffusion", "schedule", "sqrt", "('linear', 'cosine', 'flow')"),
  ("diffusion", "schedule", "flow", "'flow' needs 'velocity'"),
  ("diffusion", "prediction", "score", "('epsilon', 'x0', 'v', 'velocity')"),
  ("diffusion", "loss_weight", "snr", "('uniform', 'min_snr')"),
  ("diffusion", "steps", 20, "in [21, 100000]"),
  ("diffusion", "steps", 100_001, "in [21, 100000]"),
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
  ("sample", "labels", (3, -2), "labels[1]=-2 must be at least -1"),
  ("sample", "zoom", 0, "in [1, 64]"),
  ("sample", "method", "rk4", "('ddpm', 'ddim', 'dpm', 'euler', 'heun')"),
  ("sample", "cfg_channels", "four", "('three', 'all')"),
  ("sample", "cfg_interval", (5, 5), "0 <= low < high"),
  ("sample", "cfg_interval", (-1, 5), "0 <= low < high"),
  ("sample", "fid_images", 1, "0, or at least 2"),
  ("sample", "fid_images", 50, "fid_reference='' must name a file"),
  ("optim", "schedule", "linear", "('cosine', 'constant', 'wsd')"),
  ("optim", "name", "sgd", "('adamw', 'adafactor', 'lion', 'muon')"),
  ("optim", "decay_form", "root", "('linear', 'cosine', 'sqrt')"),
  ("optim", "state_memory", "disk", "('device', 'host')"),
  ("optim", "moment_dtype", "float16", _DTYPES),
  ("optim", "ema_dtype", "float16", _DTYPES),
  *(
    ("optim", name, -1e-9, "at least 0")
    for name in (
      *("lr", "warmup_lr", "final_lr", "eps", "weight_decay", "clip_norm"),
    )
  ),
  ("optim", "lr", math.nan, "at least 0"),
  ("optim", "warmup_steps", -1, "at least 0"),
  ("optim", "decay_steps", -1, "at least 0"),
  ("optim", "accumulation", 0, "at least 1"),
  ("optim", "ema_every", 0, "at least 1"),
  ("optim", "b1", 1.0, "in [0, 1)"),
  ("optim", "b2", -0.1, "in [0, 1)"),
  ("optim", "ema_decay", 1.0, "in [0, 1)"),
  ("optim", "layer_decay", 0.0, "in (0, 1]"),
  ("train", "steps", 0, "at least 1"),
  ("train", "seed", -1, "in [0, 2147483647]"),
  ("train", "seed", 2**31, "in [0, 2147483647]"),
  ("train", "balance_weight", -0.01, "at least 0"),
  ("rewind", "steps", -1, "at least 0"),
  ("rewind", "limit", 0, "at least 1"),
  ("rewind", "spike", 0.5, "0 or at least 1"),
  ("rewind", "spike", 2.0, "0 where rewind.steps=0"),
  ("mesh", "data", 0, "-1 or at least 1"),
  ("mesh", "fsdp", -2, "at least -1"),
  ("mesh", "tensor", 0, "-1 or at least 1"),
  ("mesh", "sequence", 0, "-1 or at least 1"),
  ("mesh", "fsdp", -1, "at most one axis of size -1"),
  ("mesh", "max_imbalance", 0.9, "at least 1"),
  ("checkpoint", "every", 0, "at least 1"),
  ("checkpoint", "keep_last", 0, "at least 1"),
  ("checkpoint", "keep_every", -1, "at least 0"),
  ("checkpoint", "keep_every", 1500, "multiple of checkpoint.every=1000"),
  ("checkpoint", "on_error", "ask", "('stop', 'continue')"),
  ("eval", "every", -1, "at least 0"),
  ("eval", "batch_size", 0, "at least 1"),
  ("log", "every", 0, "at least 1"),
  ("log", "collapse_entropy", 1.1, "in [0, 1]"),
  ("log", "profile", "5:2", "'A:B' with steps 1 <= A < B"),
)
# Section, field and the last value inside its range.
_TAKEN = (
  ("vit", "top_k", (0, 2)),
  ("vit", "top_k", (1, 1)),
  ("dit", "label_dropout", 0.0),
  ("dit", "label_dropout", 0.999),
  ("dit", "width", 4),
  ("llm", "head_dim", 2),
  ("llm", "loss_chunk", 0),
  ("llm", "num_kv_heads", 1),
  ("llm", "num_kv_heads", 4),
  ("llm", "norm_eps", 1.0),
  ("llm", "head_order", ((3, 2, 1, 0), (0, 1, 2, 3))),
  ("rope", "theta", 1.0),
  ("rope", "factor", 1.0),
  ("rope", "original_length", 1),
  ("data", "source", "digits"),
  ("mix", "ratios", (33.33, 66.67)),  # rounded
  ("mix", "ratios", (66.7, 33.34)),
  ("classifier", "cutmix_prob", 1.0),
  ("classifier", "label_smoothing", 1.0),
  ("diffusion", "steps", 21),
  ("diffusion", "vb_weight", 0.0),
  ("sample", "every", 0),
  ("sample", "cfg_scale", 0.0),
  ("sample", "cfg_interval", (0, 1)),
  ("optim", "b1", 0.0),
  ("optim", "ema_decay", 0.9999),
  ("optim", "clip_norm", 0.0),
  ("train", "seed", 2**31 - 1),
  ("mesh", "data", 2),
  ("checkpoint", "keep_every", 0),
  ("eval", "every", 0),
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
  def test_range_includes_its_last_value(self, section, field, value):
    built = dataclasses.replace(_SECTIONS[section], **{field: value})
    self.assertEqual(getattr(built, field), value)

  @parameterized.parameters(
    ("data", {"mean": (0.5,), "std": (1.0, 1.0)}, "must have one value per ch"),
    ("data", {"mean": (0.5,), "std": (0.0,)}, "std[0]=0.0 must be in (0, "),
    ("llm", {"shared_heads": (1, 0), "top_k": (2, 0)}, "1: shared=0 and top_k"),
    (
      "router",
      {"kind": "none", "top_p": 0.5},
      "top_p=0.5 must be 0 for ro",
    ),
    ("rope", {"scaling": "yarn", "theta": 1.0}, "theta=1.0 must be above 1"),
    *(
      ("tune", {"top_k_steps": steps, "top_k_values": values}, words)
      for steps, values, words in (
        ((0, 5), (3,), "top_k_values=(3,) must have one value for each"),
        ((1, 5), (3, 2), "top_k_steps=(1, 5) must rise from 0"),
        ((0, 5, 5), (3, 2, 1), "top_k_steps=(0, 5, 5) must rise"),
        ((0, 5, 4), (3, 2, 1), "top_k_steps=(0, 5, 4) must rise"),
        ((0, 5), (3, 0), "top_k_values[1]=0 must be at least 1"),
      )
    ),
    (
      "diffusion",
      {
        "schedule": "flow",
        "prediction": "velocity",
        "loss_weight": "min_snr",
      },
      "loss_weight='min_snr' must be 'uniform'",
    ),
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
    self.assertContainsSubset(
      {*cls.RUNTIME_FIELDS, *cls.NUMERIC_FIELDS}, fields
    )

  def test_values_become_what_their_types_say(self):
    built = config_lib.ViTConfig(
      depths=[5, 5, 22, 5], mlp_ratios=[8, 8, 4, 4], router={"kind": "none"}
    )
    self.assertEqual(built.depths, (5, 5, 22, 5))
    self.assertIsInstance(built.mlp_ratios[0], float)
    self.assertEqual(built.router, config_lib.RouterConfig("none"))


class HeadBudgetTest(parameterized.TestCase):
  def test_counts(self):
    budget = HeadBudget(num_heads=8, shared=2, top_k=4, head_dim=16)
    self.assertEqual((budget.routed, budget.active, budget.share), (6, 6, 0.75))

  @parameterized.parameters(
    ((0, 0, 0, 4), r"num_heads=0 .*at least 1"),
    ((4, 1, 1, 0), r"head_dim=0 .*at least 1"),
    ((4, -1, 2, 4), r"shared=-1 must be at least 0"),
    ((4, 5, 0, 4), r"shared=5 .*\[0, 4\]"),
    ((4, 1, -1, 4), r"top_k=-1 must be at least 0"),
    ((4, 1, 4, 4), r"top_k=4 .*\[0, 3\]"),
    ((4, 0, 0, 4), r"shared=0 and top_k=0"),
    ((4, 1, 1.5, 4), r"top_k=1\.5 must be of type int"),
    ((4, True, 1, 4), r"shared=True must be of type int"),
  )
  def test_a_split_that_does_not_add_up_is_named(self, split, message):
    with self.assertRaisesRegex(ValueError, message):
      HeadBudget(*split)


class PolicyTest(parameterized.TestCase):
  @parameterized.parameters(
    ("rand", {}),
    (
      "rand-m9-mstd0.5-inc1",
      {"magnitude": 9, "spread": 0.5, "increasing": True},
    ),
    ("rand-inc1-m9", {"magnitude": 9, "increasing": True}),
    ("rand-n3-p0.8-mmax20-m15",
     {"layers": 3, "probability": 0.8, "limit": 20, "magnitude": 15}),
    ("rand-mstd101-inc0", {"spread": math.inf}),
    ("rand-mstd100", {"spread": 100.0}),
  )  # fmt: skip
  def test_means_what_timm_means(self, text, fields):
    self.assertEqual(parse_policy(text), RandAugmentPolicy(**fields))

  @parameterized.parameters("", "3a")
  def test_has_no_options(self, text):
    self.assertIsNone(parse_policy(text))

  @parameterized.parameters(
    *(
      (text, f"'rand-m9-mstd0.5-inc1', not '{text}")
      for text in ("v0", "rand-", "rand-m", "rand-tweights")
    ),
    ("3a-mstd0.5", "must be '', '3a', or 'rand' with sections"),
    ("rand-m9-m8", "each key once, such as"),
    ("rand-m-9", "not 'rand-m'; keys are m, n, p, mstd, mmax, inc"),
    ("rand-m9.5", "magnitude=9.5 must be of type int"),
    ("rand-m31", "magnitude=31 must be in [0, 30]"),
    ("rand-n0", "layers=0 must be in [1, 15]"),
    ("rand-p1.5", "probability=1.5 must be in [0, 1]"),
    ("rand-inc2", "increasing=2 must be of type bool"),
    ("rand-m" + "9" * 40, "keys are m, n"),
  )
  def test_names_what_is_not_understood(self, text, words):
    with self.assertRaisesRegex(
      ValueError, rf"data\.auto_augment.*{re.escape(words)}"
    ):
      parse_policy(text)


if __name__ == "__main__":
  absltest.main()
