import dataclasses
import functools
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from etils import epath
from flax import traverse_util

from moh_jax import config as config_lib
from moh_jax.convert import rules
from moh_jax.convert.dit import model_rules as dit_rules
from moh_jax.data.infer import resolve
from moh_jax.data.tokenizers import BytesTokenizer, JsonTokenizer
from moh_jax.inference import restore as restore_lib
from moh_jax.runtime import checkpoint
from moh_jax.runtime.mesh import make_mesh
from moh_jax.training import saving
from moh_jax.training.step import TrainState
from tests.data import tiny_words
from tests.folders import FolderTest
from tests.inference import tiny_text_model, tiny_writer
from tests.models import small
from tests.training import tiny

_CONFIG = resolve(
  config_lib.Config(
    model=dataclasses.replace(small.ONE_STAGE, depths=(2,), drop_path=0.1),
    checkpoint=config_lib.CheckpointConfig(keep_last=9),
  )
)
_NAMES = ("ant", "bee", "cat", "dog", "eel", "fox")


_params = functools.partial(tiny.random_params, _CONFIG)


def _save(directory, config=_CONFIG):
  names = _NAMES if config.model.num_classes == len(_NAMES) else ()
  metadata = checkpoint.Metadata(config, names)
  checkpoint.save_params(directory, tiny.random_params(config), metadata)


def _save_steps(directory, steps, config=_CONFIG):
  """Checkpoints of a run; parameters of step s have the seed s, EMA 100 + s."""
  metadata = checkpoint.Metadata(config, _NAMES)
  for step in steps:
    state = TrainState(
      step=jnp.int32(step),
      params=_params(step),
      opt_state={"count": jnp.int32(step)},
      ema=_params(100 + step),
      rng=jnp.zeros(2, jnp.uint32),
    )
    with saving.Saver(epath.Path(directory), metadata, {}) as saver:
      saver.save(state)


class RestoreTest(FolderTest):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.released, cls.run_dir = cls.shared_folder(), cls.shared_folder()
    _save(cls.released)
    _save_steps(cls.run_dir, (2, 4))

  @parameterized.parameters(
    (None, False, 4), (2, False, 2), (None, True, 104), (2, True, 102)
  )
  def test_newest_or_the_wanted_step_averages_first(self, step, ema, seed):
    restored = restore_lib.restore(self.run_dir, step=step, use_ema=ema)
    self.assertEqual(restored.step, seed % 100)
    chex.assert_trees_all_equal(restored.params, _params(seed))

  def test_averages_that_are_mostly_the_start_say_so(self):
    config = config_lib.apply_overrides(_CONFIG, "optim", ema_decay=0.7)
    _save_steps(self.root, (2, 7), config)
    with self.assertLogs("moh_jax", "WARNING") as logs:
      restore_lib.restore(self.root, step=2)
    said = "step 2: averaged parameters are still 49% those of"
    self.assertIn(said, logs.output[0])
    with self.assertNoLogs("moh_jax", "WARNING"):
      restore_lib.restore(self.root, step=2, use_ema=False)
      restore_lib.restore(self.root, step=7)

  def test_missing_checkpoints_are_named(self):
    with self.assertRaisesRegex(FileNotFoundError, r"step 3; it has \[2, 4\]"):
      restore_lib.restore(self.run_dir, step=3)
    message = f"{self.root} holds no check"
    with self.assertRaisesRegex(FileNotFoundError, message):
      restore_lib.restore(self.root)

  @parameterized.parameters(
    ({"top_k": (4,)}, r"top_k=4 must be in \[0, 3\]"),
    ({"top_k": (1, 1)}, r"model\.top_k=\(1, 1\) must have one value"),
    ({"top_k": 1.5}, r"model.top_k\[0\]=1.5 must be of type int"),
    ({"changes": ["sample.steps=2"]}, "section 'sample'"),
  )
  def test_override_that_does_not_fit_is_named(self, override, message):
    with self.assertRaisesRegex(ValueError, message):
      restore_lib.restore(self.released, **override)

  def test_needs_the_checkpoint_alone_and_shards_it_over_a_mesh(self):
    mesh = make_mesh(config_lib.MeshConfig(data=2, fsdp=4))
    restored = restore_lib.restore(self.released, mesh=mesh)
    self.assertEqual((restored.config, restored.step), (_CONFIG, 0))
    self.assertEqual(restored.class_names, _NAMES)
    kernel = restored.params["stage1"]["blocks"]["mlp"]["gate"]["kernel"]
    self.assertLen(kernel.sharding.device_set, 8)
    self.assertLess(kernel.addressable_shards[0].data.size, kernel.size)
    chex.assert_trees_all_equal(jax.device_get(restored.params), _params())


class DiffusionRestoreTest(FolderTest):
  def test_overrides_of_model_and_sampling_go_together(self):
    config = tiny.dit_config()
    _save(self.root, config)
    sample = {"method": "dpm", "steps": "7"}
    changes = [f"sample.{key}={value}" for key, value in sample.items()]
    model = {"top_k": (0, 2), "dtype": "bfloat16", "attention_impl": None}
    restored = restore_lib.restore(
      str(self.root), changes=changes, router={"gate_form": "paper"}, **model
    )
    expected = dataclasses.replace(config.sample, **sample)
    self.assertEqual(restored.config.sample, expected)
    del model["attention_impl"]  # None leaves a field as it was trained
    router = dataclasses.replace(config.model.router, gate_form="paper")
    expected = dataclasses.replace(config.model, router=router, **model)
    self.assertEqual(restored.config.model, expected)
    self.assertEqual(restored.model.config, expected)
    chex.assert_trees_all_equal(restored.params, tiny.random_params(config))


class ComputeDtypeTest(FolderTest):
  @parameterized.parameters((False, "two_stage"), (True, "query_norm"))
  def test_matrices_of_a_text_model_have_it_and_outputs_stay(self, tie, router):
    changes = {"tie_embeddings": tie, "router": {"kind": router}}
    config = config_lib.apply_overrides(
      tiny_text_model.CONFIG, "model", **changes
    )
    tiny_text_model.save(self.root, config)
    restored = restore_lib.restore(self.root, dtype="bfloat16")
    flat = traverse_util.flatten_dict(restored.params)
    wide = {path for path, x in flat.items() if x.dtype == jnp.float32}
    self.assertNotEmpty(set(flat) - wide)
    for path in flat:
      kept = path[-1] == "scale" or "router" in path
      self.assertEqual(path in wide, kept, path)
    tokens = np.random.RandomState(0).randint(0, 264, (2, 9), np.int32)
    stored, trained = (
      jax.jit(restored.model.apply)({"params": params}, tokens)[0]
      for params in (restored.params, tiny_text_model.params(config))
    )
    np.testing.assert_array_equal(stored, trained)


class RestackTest(FolderTest):
  """Runs of equal layers depend on top_k; what a layer computes does not."""

  def _config(self, top_k):
    heads = {"num_heads": (4,) * 4, "shared_heads": (1,) * 4}
    return tiny.dit_config(model=heads | {"top_k": top_k})

  @parameterized.parameters(
    ((1, 1, 2, 2), (1, 1, 1, 1)),  # two runs become one
    ((2, 2, 2, 2), (2, 1, 1, 3)),  # one becomes three
  )
  @pytest.mark.integration
  def test_serves_other_shares_whatever_the_runs(self, trained, wanted):
    config = self._config(trained)
    _save(self.root, config)
    restored = restore_lib.restore(self.root, top_k=wanted)
    self.assertEqual(restored.config.model.top_k, wanted)

    public = dit_rules(config.model)
    ours = rules.dump_params(public, tiny.random_params(config))
    table = dit_rules(restored.config.model)
    theirs = rules.dump_params(table, restored.params)
    chex.assert_trees_all_equal(theirs, ours)
    inputs = (jnp.ones((2, 8, 8, 1)), jnp.arange(2), jnp.arange(2))
    apply = jax.jit(restored.model.apply)
    _, aux = apply({"params": restored.params}, *inputs)
    share = sum(1 + k for k in wanted) / 16
    self.assertAlmostEqual(float(aux.activated_share), share, places=6)

  def test_a_layer_without_a_trained_router_cannot_route(self):
    _save(self.root, self._config((1, 0, 0, 1)))
    with self.assertRaisesRegex(ValueError, "it has no blocks0/attn/router"):
      restore_lib.restore(self.root, top_k=(1, 1, 1, 1))


class LoadTokenizerTest(FolderTest):
  def setUp(self):
    super().setUp()
    self.other = tiny_words.tokenizer(("[NEW]",))
    self.file = self.root / "tokenizer.json"
    tiny_writer.save_alphabet(self.root)

  def test_finds_the_file_of_the_run_and_refuses_others(self):
    for folder in (self.root, self.root / "checkpoints"):
      tokenizer = restore_lib.load_checkpoint_tokenizer(str(folder))
      self.assertIsInstance(tokenizer, JsonTokenizer)
      self.assertEqual(tokenizer.sha256, tiny_writer.WORDS.sha256)
    self.file.write_bytes(self.other.content)
    with self.assertRaisesRegex(ValueError, "json: .* another tokenizer"):
      restore_lib.load_checkpoint_tokenizer(str(self.root))
    self.file.unlink()
    with self.assertRaisesRegex(FileNotFoundError, "json: no such tokenizer"):
      restore_lib.load_checkpoint_tokenizer(str(self.root))

  @parameterized.parameters(BytesTokenizer.sha256, "")
  def test_bytes_need_no_file_and_any_fits_where_none_is_known(self, sha256):
    shutil.rmtree(self.root / "checkpoints")
    tiny_writer.save_alphabet(self.root, tokenizer_sha256=sha256)
    self.file.write_bytes(self.other.content)
    tokenizer = restore_lib.load_checkpoint_tokenizer(str(self.root))
    self.assertEqual(tokenizer.sha256, sha256 or self.other.sha256)
