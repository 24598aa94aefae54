"""Starting a run from another model: parameters, classes, tokenizer, tuning."""

import json
import pathlib
import tempfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from etils import epath
from flax.traverse_util import flatten_dict

from moh_jax.config import (
  RotaryConfig,
  RouterConfig,
  apply_overrides,
  without_router,
)
from moh_jax.data import sequences
from moh_jax.data.tokenizers import (
  JsonTokenizer,
  copy_tokenizer_files,
  load_tokenizer,
)
from moh_jax.models.registry import grow_vocabulary, make_model, restack
from moh_jax.runtime import checkpoint
from moh_jax.runtime.checkpoint import Metadata
from moh_jax.runtime.parameters import abstract_on
from moh_jax.training.language_modeling import make_loss
from moh_jax.training.step import metric_values
from moh_jax.training.warm_start import keep_tokenizer, warm_start
from tests import folders
from tests.training import meshes, tiny

_TEN = tuple("0123456789")
_PLAIN = tiny.llm_config(model=without_router(tiny.LLM))  # the baseline
_NORMS = RouterConfig("query_norm")
_OTHER_ORDER = ((1, 2, 3, 0),) * 2
# What a run stores, and makes a model that cannot start from it.
_REFUSED = (
  (tiny.dit_config, "diffusion", {"prediction": "v"},
   r"diffusion\.prediction: 'v' here, 'epsilon' there"),
  (tiny.config, "model", {"sr_ratios": (4, 1)},
   r"model\.sr_ratios: \(4, 1\) here, \(2, 1\) there"),
  *((tiny.llm_config, "model", model, message) for model, message in (
    ({"rope": RotaryConfig(theta=500.0)}, r"model\.rope\.theta: 500.0 here"),
    ({"attention_out_multiplier": 0.5}, r"attention_out_multiplier: 0\.5 here"),
    ({"router": RouterConfig(gate_form="paper")},
     r"router\.gate_form: 'paper' here, 'released' there"),
    ({"head_order": _OTHER_ORDER}, r"head_order: \(\(1, .* here, \(\) t"),
    ({"tie_embeddings": True}, "does not fit .*: head/kernel not used"),
    ({"num_kv_heads": 4}, r"blocks0/attn/qkv/kernel missing"),
    ({"num_heads": (4,), "shared_heads": (1,), "top_k": (2,)},
     r"blocks0/attn/kv/kernel \(2, .*\), \(1, .*\) needed.*, and \d+ more"),
  )),
)  # fmt: skip


class WarmStartTest(folders.FolderTest):
  def _start(self, config, stored, names=((), ()), sha256=("", "")):
    """Stored parameters, initial ones, and those of a run that starts so.

    Args:
      config: of the run.
      stored: of the model.
      names: of the classes of both.
      sha256: of the tokenizers of both.
    """
    source = tempfile.mkdtemp(dir=self.root)
    theirs = tiny.random_params(stored)
    metadata = Metadata(stored, names[1], sha256[1])
    checkpoint.save_params(source, theirs, metadata)
    config = apply_overrides(config, "train", init_from=source)
    mesh = meshes.mesh_of(config)
    abstract = abstract_on(*make_model(config), mesh)
    _, read = warm_start(Metadata(config, names[0], sha256[0]), abstract, mesh)
    initial = tiny.random_params(config, seed=1)
    with self.assertLogs("moh_jax.training.warm_start", "INFO") as logs:
      started = read(initial)
    self.said = logs.output[-1]
    return theirs, initial, started

  def test_stored_parameters_lie_on_the_runs_mesh(self):
    config = tiny.llm_config(mesh=tiny.MESH)
    stored, _, started = self._start(config, tiny.llm_config())
    spec = started["head"]["kernel"].sharding.spec
    self.assertEqual(tuple(spec), (None, ("tensor", "fsdp")))
    chex.assert_trees_all_equal(jax.device_get(started), stored)

  def test_router_that_one_of_both_lacks_is_sampled_or_left_out(self):
    stored, sampled, started = (
      flatten_dict(tree, sep="/")
      for tree in self._start(tiny.llm_config(), _PLAIN)
    )
    self.assertEqual(started.keys(), sampled.keys())
    routers = [path for path in started if "/router/" in path]
    self.assertLen(routers, 2)
    for path, leaf in started.items():
      expected = sampled[path] if path in routers else stored[path]
      np.testing.assert_array_equal(leaf, expected, path)
    config = tiny.llm_config(model={"router": _NORMS})
    stored, _, started = self._start(config, tiny.llm_config())
    stored = flatten_dict(stored)
    for path, leaf in flatten_dict(started).items():
      np.testing.assert_array_equal(leaf, stored[path], path)

  def test_vocabulary_is_grown_and_layers_are_regrouped(self):
    config = tiny.llm_config(model={"vocab_size": 70})
    stored, _, started = self._start(config, tiny.llm_config())
    chex.assert_trees_all_close(started, grow_vocabulary(stored, 70), atol=1e-6)
    config = tiny.llm_config(model={"top_k": (1, 3)})
    stored, _, started = self._start(config, tiny.llm_config())
    expected = restack(stored, tiny.LLM, config.model)
    chex.assert_trees_all_equal(started, expected)

  @pytest.mark.integration
  def test_all_heads_on_continue_the_baseline_exactly(self):
    config = tiny.llm_config(model={"router": _NORMS, "top_k": (3, 3)})
    stored, _, started = self._start(config, _PLAIN)
    data = sequences.Text(config.data, 60, "train").stream(0)
    batch = tiny.stacked(data, 4)

    def loss(config, params):
      loss_fn = make_loss(make_model(config)[0], config)
      args = (batch, jax.random.key(0), jnp.int32(0))
      values = jax.jit(lambda p: metric_values(loss_fn(p, *args)[1]))(params)
      return float(values["task_loss"])

    self.assertEqual(loss(config, started), loss(_PLAIN, stored))

  @parameterized.parameters(*_REFUSED)
  def test_what_differs_is_refused_by_name(self, make, section, changes, text):
    with self.assertRaisesRegex(ValueError, f"train.init_from='.*{text}"):
      self._start(make(**{section: changes}), make())

  @pytest.mark.integration
  def test_another_family_and_a_missing_checkpoint_are_refused(self):
    with self.assertRaisesRegex(ValueError, "'vit', model.family='llm'"):
      self._start(tiny.llm_config(), tiny.config())
    config = tiny.llm_config(train={"init_from": "/nowhere"})
    with self.assertRaisesRegex(FileNotFoundError, "/nowhere"):
      tiny.train(config, self.root)

  @parameterized.parameters("query_norm", "two_stage")
  def test_what_the_parameters_do_not_depend_on_is_free(self, kind):
    router = RouterConfig(kind, two_stage=False)
    model = {"head_order": _OTHER_ORDER, "router": router}
    self._start(tiny.llm_config(model=model), _PLAIN)
    config = tiny.dit_config(diffusion={"vb_weight": 0.5})
    self._start(config, tiny.dit_config())

  def test_another_tokenizer_is_refused_unless_the_vocabulary_grows(self):
    config, sha256 = tiny.llm_config(), ("b" * 64, "a" * 64)
    with self.assertRaisesRegex(ValueError, "sha256 a{16}, .* with b{16}"):
      self._start(config, config, sha256=sha256)
    larger = tiny.llm_config(model={"vocab_size": 70})
    with self.assertLogs(level="WARNING"):
      self._start(larger, config, sha256=sha256)

  @parameterized.parameters(
    (("7", "new", "2"), _TEN, {"num_classes": 3}),
    (tuple("abcdefghij"), _TEN, {}),
    # The same classes, or as many that nobody has named.
    (_TEN, (), {}),
    (_TEN, _TEN, {"image_size": (16, 16), "pretrain_image_size": 8}),
  )
  @pytest.mark.integration
  def test_other_classes_get_a_new_head(self, ours, theirs, model):
    is_new, alike = ours != _TEN, tiny.ALIKE["vit"]
    config, stored = (tiny.config(model=m) for m in (alike | model, alike))
    trees = self._start(config, stored, (ours, theirs))
    stored, initial, started = map(flatten_dict, trees)
    for path, leaf in started.items():
      expected = initial if is_new and path[0] == "head" else stored
      np.testing.assert_array_equal(leaf, expected[path], path)
    said = "; initialised head/bias, head/kernel"
    self.assertEqual(self.said.endswith(said), is_new)

  @pytest.mark.integration
  def test_a_run_starts_from_another_and_is_resumed_without_it(self):
    source = tiny.save(self.root, tiny.llm_config())
    stored = tiny.random_params(tiny.llm_config())
    for init_from, steps in ((source, 2), ("/nowhere", 3)):
      config = tiny.llm_config(
        train={"init_from": init_from, "steps": steps}, optim={"lr": 0.0}
      )
      state = jax.device_get(tiny.train(config, self.root / "run").state)
      self.assertEqual(state.step, steps)
      chex.assert_trees_all_equal(state.params, stored)
      chex.assert_trees_all_close(state.ema, stored, rtol=1e-6)


_TOKENIZER = (
  pathlib.Path(__file__).parents[1] / "data/recorded/tokenizers/qwen2"
)
_TEMPLATE = "chat_template.jinja"


class TokenizerTest(folders.FolderTest):
  """A model like Qwen2: no begin of text, two stops, a template."""

  def test_run_that_starts_from_the_model_keeps_its_files(self):
    ours, run = self.root / "ours", epath.Path(self.root / "run")
    copy_tokenizer_files(_TOKENIZER, ours)
    (ours / _TEMPLATE).write_text("{{ messages[0].content }}")
    stops = json.dumps({"eos_token_id": [340, 342]})
    (ours / "generation_config.json").write_text(stops)
    # The text is of the tokenizer's own file, without what lies beside it.
    used = JsonTokenizer((_TOKENIZER / "tokenizer.json").read_bytes())
    metadata = Metadata(tiny.llm_config(train={"init_from": str(ours)}))
    keep_tokenizer(run, metadata, used)
    kept = load_tokenizer(run)
    self.assertEqual((kept.stop_ids, kept.add_bos), ((340, 342), False))
    self.assertIn(_TEMPLATE, kept.files)
    # A run that goes on keeps what it has.
    (run / _TEMPLATE).write_text("mine")
    keep_tokenizer(run, metadata, kept, is_new=False)
    self.assertEqual((run / _TEMPLATE).read_text(), "mine")
