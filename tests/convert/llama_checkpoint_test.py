"""Language models from transformers' folders to ours and back."""

import dataclasses
import json
import pathlib
from unittest import mock

import chex
import numpy as np
from absl.testing import absltest, parameterized

from moh_jax.cli.main import main
from moh_jax.config import (
  MeshConfig,
  TextDataConfig,
  TuneConfig,
  get_family,
  released_model,
)
from moh_jax.convert import checkpoints, llama_config, tensor_files
from moh_jax.convert.checkpoints import convert, export, load_sharded
from moh_jax.convert.llama import released_run
from moh_jax.convert.tensor_files import read_tensors
from moh_jax.inference.restore import restore
from moh_jax.runtime.sharding import make_mesh
from tests.convert import folder_case, tiny_llm


class ConvertTest(folder_case.FolderCase):
  @parameterized.product(
    dtype=("float32", "bfloat16", "float16"), shards=(1, 4)
  )
  def test_folder_becomes_a_checkpoint(self, dtype, shards):
    stored = tiny_llm.write_folder(self.source, tiny_llm.MHA, dtype, shards)
    _, count = self._convert()
    restored = restore(str(self.out))
    self.assertEqual(restored.config.model, tiny_llm.MHA)
    chex.assert_trees_all_equal(
      restored.params, tiny_llm.random_params(tiny_llm.MHA, dtype)
    )
    self.assertEqual(count, sum(x.size for x in stored.values()))

  def test_run_has_text_of_the_models_length(self):
    tiny_llm.write_folder(self.source, tiny_llm.MHA)
    self._convert()
    config = restore(str(self.out)).config
    self.assertEqual(config.data, TextDataConfig(sequence_length=64))
    self.assertEqual(config.tune, TuneConfig())
    self.assertEqual(
      released_run(released_model("llama3-8b"), {}).data.sequence_length, 2048
    )

  @parameterized.parameters(("hf/model-00001-of-00001.safetensors",), ("hf",))
  def test_file_is_read_with_the_config_beside_it(self, source):
    tiny_llm.write_folder(self.source, tiny_llm.MHA)
    convert("llama", str(self.folder / source), str(self.out))
    self.assertEqual(restore(str(self.out)).config.model, tiny_llm.MHA)

  def test_moh_llama3_splits_the_heads_of_any_shape(self):
    # An odd count is rounded down: 3 heads are 1 shared, 0 routed.
    model = dataclasses.replace(
      tiny_llm.MHA, num_heads=(9,) * 3, shared_heads=(9,) * 3
    )
    tiny_llm.write_folder(self.source, model)
    self._convert("moh-llama3")
    converted = restore(str(self.out)).config.model
    self.assertEqual(converted.router.kind, "query_norm")
    self.assertEqual(converted.shared_heads, (4, 4, 4))
    self.assertEqual(converted.top_k, (2, 2, 2))

  def test_ignored_tensors_are_no_obstacle(self):
    tied = dataclasses.replace(tiny_llm.MHA, tie_embeddings=True)
    tiny_llm.write_folder(self.source, tiny_llm.MHA, config={})  # lm_head
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)}
    tensor_file = self.source / "model-00001-of-00001.safetensors"
    checkpoints_tensors = read_tensors(tensor_file) | more
    _write(tensor_file, checkpoints_tensors)
    (self.source / "config.json").write_text(
      json.dumps(llama_config.to_hf(tied))
    )
    self._convert()
    self.assertNotIn("head", restore(str(self.out)).params)

  def test_without_config_json_the_shapes_decide(self):
    tiny_llm.write_folder(self.source, tiny_llm.QUERY_NORM, config={})
    models = {
      "llama3-tiny": dataclasses.replace(tiny_llm.MHA, mlp_dim=21),
      "llama3-mini": tiny_llm.MHA,
      "moh-llama3-mini": tiny_llm.QUERY_NORM,
      "moh-llm-mini": tiny_llm.MOH,
    }
    unread = mock.Mock(side_effect=AssertionError("a tensor was read"))
    llm = get_family("llm")
    with mock.patch.object(llm, "released", lambda: models):
      for kind, name in (
        ("llama", "llama3-mini"),
        ("moh-llama3", "moh-llama3-mini"),
      ):
        with mock.patch("numpy.memmap", unread):
          found = checkpoints._open(kind, str(self.source), None, None, None)
        self.assertEqual(found[0], name)
        self.assertEqual(found[1].config.model, models[name])

  def test_without_config_json_no_model_lists_the_candidates(self):
    tiny_llm.write_folder(self.source, tiny_llm.MHA, config={})
    with self.assertRaisesRegex(ValueError, "none of .*'llama3-8b'"):
      self._convert()
    with self.assertRaisesRegex(ValueError, r"none of \['moh-llama3-8b'\]"):
      self._convert("moh-llama3")

  def test_named_model_overrules_config_json(self):
    tiny_llm.write_folder(self.source, tiny_llm.MHA)
    with self.assertRaisesRegex(ValueError, "(?s)hf: .*missing.*shape"):
      self._convert(model="llama3-8b")

  def test_given_config_overrules_config_json(self):
    tiny_llm.write_folder(self.source, tiny_llm.MHA, config={"vocab_size": 1})
    self._convert(config=released_run(tiny_llm.QUERY_NORM, {}))
    self.assertEqual(restore(str(self.out)).config.model, tiny_llm.QUERY_NORM)

  def test_image_size_is_refused(self):
    tiny_llm.write_folder(self.source, tiny_llm.MHA)
    with self.assertRaisesRegex(ValueError, "only image classifiers .*'llm'"):
      self._convert(image_size=224)


def _write(path: pathlib.Path, tensors) -> None:
  planned = [
    tensor_files.Planned((n,), (x.shape,), lambda x=x: [x])
    for n, x in tensors.items()
  ]
  tensor_files.write_file(path, planned, "float32", {})


class BadSourceTest(folder_case.FolderCase):
  """Nothing is written of a source that is not whole."""

  def setUp(self):
    super().setUp()
    tiny_llm.write_folder(self.source, tiny_llm.MHA, shards=3)
    self.shard = self.source / "model-00002-of-00003.safetensors"

  def _refused(self, error, regex, kind="llama"):
    with self.assertRaisesRegex(error, regex):
      self._convert(kind)
    self.assertFalse(self.out.exists())

  def test_missing_shard(self):
    self.shard.unlink()
    self._refused(
      FileNotFoundError, "model-00002-of-00003.safetensors: no such"
    )

  @parameterized.parameters(0.5, 0.99)
  def test_truncated_shard(self, share):
    content = self.shard.read_bytes()
    self.shard.write_bytes(content[: int(len(content) * share)])
    self._refused(ValueError, "model-00002-of-00003.safetensors: found a dam")

  def test_index_that_names_an_absent_tensor(self):
    path = self.source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = self.shard.name
    path.write_text(json.dumps(index))
    self._refused(ValueError, "no shard holds 'model.extra.weight'")

  def test_missing_and_misshapen_tensors(self):
    tensors = dict(read_tensors(self.shard))
    gone, bent = sorted(tensors)[:2]
    del tensors[gone]
    tensors[bent] = np.zeros((3, 3), np.float32)
    _write(self.shard, tensors)
    path = self.source / "model.safetensors.index.json"
    path.unlink()
    self._refused(ValueError, rf"1 missing: {gone}; 1 shape: {bent} \(3, 3\)")

  def test_config_of_another_network(self):
    stored = llama_config.to_hf(tiny_llm.MHA) | {"hidden_act": "relu"}
    (self.source / "config.json").write_text(json.dumps(stored))
    self._refused(ValueError, "config.json: hidden_act='relu'")

  def test_code_of_its_own(self):
    stored = llama_config.to_hf(tiny_llm.MHA) | {
      "auto_map": {"AutoModel": "modeling_llama.LlamaModel"}
    }
    (self.source / "config.json").write_text(json.dumps(stored))
    self._refused(ValueError, "config.json: auto_map=.*--from moh-llama3")

  def test_heads_that_do_not_group(self):
    stored = llama_config.to_hf(tiny_llm.MHA) | {"num_key_value_heads": 4}
    (self.source / "config.json").write_text(json.dumps(stored))
    self._refused(ValueError, "num_key_value_heads=4 must divide")

  def test_heads_too_few_to_route(self):
    stored = llama_config.to_hf(tiny_llm.MHA) | {
      "num_attention_heads": 1,
      "num_key_value_heads": 1,
    }
    (self.source / "config.json").write_text(json.dumps(stored))
    self._refused(ValueError, "no head active", "moh-llama3")


class ExportTest(folder_case.FolderCase):
  @parameterized.parameters("float32", "bfloat16")
  def test_gives_back_what_was_converted(self, dtype):
    stored = tiny_llm.write_folder(self.source, tiny_llm.MHA, "bfloat16")
    self._convert()
    folder = self._export(dtype=dtype)
    exported = read_tensors(folder)
    self.assertEqual(exported.keys(), stored.keys())
    for name, want in stored.items():
      self.assertEqual(exported[name].dtype, dtype)
      np.testing.assert_array_equal(exported[name], want.astype(dtype))
    config = json.loads((folder / "config.json").read_text())
    self.assertEqual(config["torch_dtype"], dtype)

  @parameterized.parameters(
    ("moh", tiny_llm.MOH), ("query_norm", tiny_llm.QUERY_NORM)
  )
  def test_moh_model_comes_back_as_itself(self, _, model):
    tiny_llm.write_folder(self.source, model)
    with self.assertRaisesRegex(ValueError, "use --from moh-hf"):
      self._convert()
    self._convert("moh-hf")
    self.assertEqual(restore(str(self.out)).config.model, model)
    folder = self._export()
    config = json.loads((folder / "config.json").read_text())
    self.assertEqual(config["architectures"], ["MoHLlamaForCausalLM"])
    convert("moh-hf", str(folder), str(self.folder / "third"))
    again = restore(str(self.folder / "third"))
    self.assertEqual(again.config.model, model)
    chex.assert_trees_all_equal(again.params, tiny_llm.random_params(model))

  def test_shards_are_within_their_size_and_indexed(self):
    stored = tiny_llm.write_folder(self.source, tiny_llm.MHA)
    self._convert()
    folder = self._export(shard_size=5000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    self.assertEqual(files, found)
    count = len(files)
    self.assertGreater(count, 3)
    self.assertEqual(files[0], f"model-00001-of-{count:05}.safetensors")
    sizes = [
      sum(x.nbytes for x in read_tensors(folder / file).values())
      for file in files
    ]
    self.assertLessEqual(max(sizes), 5000)
    self.assertEqual(index["metadata"]["total_size"], sum(sizes))
    chex.assert_trees_all_equal(read_tensors(folder), stored)

  def test_tensor_above_the_limit_has_a_shard_of_its_own(self):
    stored = tiny_llm.write_folder(self.source, tiny_llm.MHA)
    self._convert()
    folder = self._export(shard_size=1)
    chex.assert_trees_all_equal(read_tensors(folder), stored)

  def test_folder_that_holds_something_is_refused(self):
    tiny_llm.write_folder(self.source, tiny_llm.MHA)
    self._convert()
    with self.assertRaisesRegex(ValueError, "hf holds 'config.json'; choose"):
      self._export("hf")
    with self.assertRaisesRegex(ValueError, "config.json is a file"):
      self._export("hf/config.json")

  def test_empty_folder_is_filled(self):
    tiny_llm.write_folder(self.source, tiny_llm.MHA)
    self._convert()
    (self.folder / "empty").mkdir()
    self.assertLen(list(self._export("empty").iterdir()), 3)

  def test_failure_in_the_middle_leaves_nothing(self):
    tiny_llm.write_folder(self.source, tiny_llm.MHA)
    self._convert()
    before = sorted(self.folder.iterdir())
    failing = mock.Mock(side_effect=OSError("disk full"))
    with (
      mock.patch.object(tensor_files, "_write_array", failing),
      self.assertRaisesRegex(OSError, "disk full"),
    ):
      self._export()
    self.assertEqual(sorted(self.folder.iterdir()), before)

  @parameterized.parameters(
    ({"dtype": "float16"}, "'float16' must be one of .*'bfloat16'"),
    ({"shard_size": 0}, "shard_size=0 must be at least 1"),
  )
  def test_bad_options_are_named(self, options, regex):
    with self.assertRaisesRegex(ValueError, regex):
      export("nowhere", "out", **options)


class CommandTest(folder_case.FolderCase):
  def test_both_ways(self):
    stored = tiny_llm.write_folder(self.source, tiny_llm.MHA, "bfloat16")
    out, again = str(self.out), str(self.folder / "again")
    source = ["--source", str(self.source)]
    status = main(["convert", "--from", "llama", *source, "--out", out])
    self.assertEqual(status, 0)
    options = ["--dtype", "bfloat16", "--shard-size", "1MB"]
    status = main(["export", "--checkpoint", out, "--out", again, *options])
    self.assertEqual(status, 0)
    chex.assert_trees_all_equal(read_tensors(again), stored)

  @parameterized.parameters("5", "GB", "0GB", "1.5GB", "-1GB", "5TB")
  def test_size_of_a_shard_has_a_number_and_a_unit(self, size):
    with self.assertRaises(SystemExit):
      main(["export", "--checkpoint", "a", "--out", "b", "--shard-size", size])


class LoadShardedTest(folder_case.FolderCase):
  def test_equals_the_restored_checkpoint(self):
    tiny_llm.write_folder(self.source, tiny_llm.MHA, "bfloat16", shards=2)
    self._convert("moh-llama3")
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    restored = restore(str(self.out), mesh=mesh)
    config, params = load_sharded("moh-llama3", str(self.source), mesh)
    self.assertEqual(config, restored.config)
    chex.assert_trees_all_equal(params, restored.params)


if __name__ == "__main__":
  absltest.main()
